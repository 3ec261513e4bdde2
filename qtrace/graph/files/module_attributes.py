"""The attributes of MegEngine's own modules and of fake quants, held to what their ``forward`` takes.

MegEngine checks them in constructors, which loading does not run: a stride that is no number would be an
error of a kernel when the model runs.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import FullArgSpec
from typing import Any

import megengine.module as M
import numpy as np
from megengine import Tensor
from megengine.core._imperative_rt.ops import Elemwise, ElemwiseMultiType, Pooling, RNNCell
from megengine.core.tensor.dtype import QuantDtypeMeta
from megengine.module import (
    batchnorm,
    normalization,
    quantized,
    rnn,
)
from megengine.quantization import fake_quant, observer
from megengine.quantization.utils import LSQParams, QParams, QuantMode

from qtrace.fakequant.base import PHASES, FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.files.allowlist import RefusedError, shown
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.recurrent import DIRECTIONS, OnnxRecurrent
from qtrace.observers.base import Observer
from qtrace.onnxfile.fragment import check_fragment
from qtrace.scheme import QScheme

_LARGEST, _LARGEST_FLOAT = int(np.iinfo(np.int32).max), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Kind:
    """The values that an attribute may have.

    Args:
        description: completes "it must be ...".
        fits: whether a value is one of them.
    """

    description: str
    fits: Callable[[Any], bool]

    def __or__(self, other: _Kind) -> _Kind:
        either = f"{self.description} or {other.description}"
        return _Kind(either, lambda value: self.fits(value) or other.fits(value))


def _instance(description: str, *kinds: type) -> _Kind:
    return _Kind(description, lambda value: isinstance(value, kinds))


def _integer(description: str, minimum: int) -> _Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, (int, np.integer)) and bool(minimum <= value <= _LARGEST)

    return _Kind(description, fits)


def _number(description: str, minimum: float = -_LARGEST_FLOAT, maximum: float = _LARGEST_FLOAT) -> _Kind:
    def fits(value: Any) -> bool:
        real = isinstance(value, (int, float, np.integer, np.floating))
        return real and not math.isnan(value) and bool(minimum <= value <= maximum)

    return _Kind(description, fits)


def _sequence(item: _Kind, count: int | None = None) -> _Kind:
    """A tuple or list of ``count`` items, or of any number of them."""

    def fits(value: Any) -> bool:
        right = type(value) in (tuple, list) and (count is None or len(value) == count)
        return right and all(map(item.fits, value))

    return _Kind(f"a tuple of {count or 'values'}, each {item.description}", fits)


def _choice(*names: str) -> _Kind:
    return _Kind(f"one of {', '.join(names)}", lambda value: type(value) is str and value.lower() in names)


def _mode_of(op: Any) -> _Kind:
    """The members of an enum of MegEngine's ops, in any case."""
    return _Kind(
        "a mode that MegEngine knows", lambda value: type(value) is str and hasattr(op, value.upper())
    )


_NONE, _TEXT = _instance("None", type(None)), _instance("a string", str)
_FLAG = _instance("True or False", bool, np.bool_, int)
_COUNT, _SIZE = _integer("a positive integer", 1), _integer("an integer of at least 0", 0)
_INTEGER = _integer("an integer", -_LARGEST)
_NUMBER, _POSITIVE = _number("a number"), _number("a number of at least 0", minimum=0)
_TENSOR, _MODULE = _instance("a Tensor", Tensor), _instance("a module", M.Module)
_QUANTIZED = _instance("a quantized dtype", QuantDtypeMeta)

# The kinds of attributes that mean the same wherever a class has them.
_KINDS = {
    name: kind
    for names, kind in {
        "name _name _short_name": _TEXT | _NONE,
        "in_channels out_channels groups in_features out_features batch num_parameters num_features": _COUNT,
        "num_channels num_groups num_embeddings embedding_dim input_height input_width": _COUNT,
        "upscale_factor part_size pooled_h pooled_w sample_per_part embed_dim kdim vdim": _COUNT,
        "num_heads head_dim weight_bias_len input_size hidden_size gate_hidden_size num_layers": _COUNT,
        "num_directions bins upsample_rate dst_nbins": _COUNT,
        "proj_size _size": _SIZE,
        "qmin qmax": _INTEGER,
        "kernel_size stride dilation output_size": _COUNT | _sequence(_COUNT, 2),
        "padding output_padding": _SIZE | _sequence(_SIZE, 2),
        "oshp": _COUNT | _sequence(_COUNT, 2) | _TENSOR,
        "pad_width": _sequence(_sequence(_SIZE, 2)),
        "axis": _INTEGER | _sequence(_INTEGER) | _NONE,
        "normalized_shape normalized_axis": _INTEGER | _sequence(_INTEGER) | _NONE,
        "eps": _POSITIVE,
        "negative_slope momentum spatial_scale trans_std k alpha beta pad_val scale_limit": _NUMBER,
        "drop_prob attn_dropout out_dropout dropout": _number("a number from 0 to 1", 0, 1),
        "quantize_disabled affine track_running_stats _track_running_stats_saved freeze no_trans": _FLAG,
        "is_qat _is_top": _FLAG,
        "watch_points end_points": _instance("a list", list),
        "watch_node_value": _instance("a dict", dict),
        "argspec": _instance("a signature or None", FullArgSpec, type(None)),
        "add_bias_kv add_zero_attn batch_first bidirectional enabled": _FLAG,
        "weight io_weight_bias _flatten_weights weight_ih weight_hh bias_ih bias_hh": _TENSOR,
        "min_val max_val runtime_momentum histogram scale step_size zero_point grad_scale": _TENSOR,
        "bias bias_k bias_v running_mean running_var": _TENSOR | _NONE,
        "padding_idx max_norm norm_type": _NONE,
        "conv_mode": _choice("cross_correlation"),
        "compute_mode": _choice("default", "float32"),
        "padding_mode": _choice("zeros", "reflect", "replicate"),
        "nonlinear_mode unsupport_reason mode method": _TEXT,
        "nonlinearity": _mode_of(RNNCell.NonlineMode),
        "conv bn conv_transpose2d linear": _MODULE,
        "weight_observer act_observer weight_fake_quant act_fake_quant": _MODULE | _NONE,
        "cells": _sequence(_sequence(_MODULE)),
        "layer_keys _module_keys": _sequence(_TEXT),
        "output_dtype": _instance("a dtype or None", np.dtype, type, type(None)),
        "dtype": _QUANTIZED,
        "qparams": _instance("quantization parameters or None", QParams, LSQParams, type(None)),
    }.items()
    for name in names.split()
}


def _windows(rank: int) -> dict[str, _Kind]:
    """The kinds of a convolution over ``rank`` axes.

    Its constructor makes a tuple of each number, but ``forward`` takes a number that was set later, too.
    """
    positive = dict.fromkeys(("kernel_size", "stride", "dilation"), _COUNT | _sequence(_COUNT, rank))
    return positive | dict.fromkeys(("padding", "output_padding"), _SIZE | _sequence(_SIZE, rank))


_MAY_LACK_WEIGHT = {"weight": _TENSOR | _NONE}

# The kinds of attributes that mean something else in a class than in the others.
_OWN_KINDS: dict[type, dict[str, _Kind]] = {
    M.Conv1d: {"kernel_size": _COUNT, "stride": _COUNT, "padding": _SIZE, "dilation": _COUNT},
    **dict.fromkeys((M.Conv2d, M.ConvTranspose2d, M.DeformableConv2d, M.RegionRestrictedConv), _windows(2)),
    **dict.fromkeys((M.Conv3d, M.ConvTranspose3d), _windows(3)),
    M.Elemwise: {"method": _mode_of(Elemwise.Mode)},
    M.LocalResponseNorm: {"kernel_size": _COUNT},
    M.MultiHeadAttention: {"bias": _FLAG},
    OnnxRecurrent: {
        "kind": _choice("lstm", "gru", "rnn"),
        "direction": _choice(*DIRECTIONS),
        "nonlinearity": _choice("tanh", "relu"),
        "linear_before_reset": _FLAG,
        "recurrence": _TENSOR,
    },
    rnn.RNNBase: {"bias": _FLAG},
    rnn.RNNCellBase: {"bias": _FLAG},
    batchnorm._BatchNorm: _MAY_LACK_WEIGHT,
    normalization.GeneralNorm: _MAY_LACK_WEIGHT,
    normalization.GroupNorm: _MAY_LACK_WEIGHT,
    normalization.InstanceNorm: _MAY_LACK_WEIGHT,
    normalization.LayerNorm: {**_MAY_LACK_WEIGHT, "normalized_shape": _sequence(_COUNT)},
    M.Pad: {"mode": _choice("constant", "edge", "replicate", "reflect")},
    M.AvgPool2d: {"mode": _mode_of(Pooling.Mode)},
    quantized.Linear: _MAY_LACK_WEIGHT,
    quantized.Elemwise: {"method": _mode_of(ElemwiseMultiType.Mode)},
    fake_quant.LSQ: {"eps": _TENSOR, "mode": _instance("a QuantMode or None", QuantMode, type(None))},
    observer.MinMaxObserver: {"mode": _instance("a QuantMode", QuantMode)},
    observer.ExponentialMovingAverageObserver: {"momentum": _TENSOR},
}
# What every fake quant of qtrace has.
_FAKE_QUANT: dict[str, _Kind] = {
    "site": _TEXT,
    "scheme": _instance("a QScheme", QScheme),
    "observer": _instance("an observer or None", Observer, type(None)),
    "shape": _sequence(_SIZE),
    "phase": _choice(*PHASES),
    "scale": _TENSOR,
    "zero_point": _TENSOR,
}
# What the fake quants of biases and of folded BatchNorms have.
_BIAS_QUANT: dict[str, _Kind] = {
    "site": _TEXT,
    "shape": _sequence(_SIZE),
    "factor": _NUMBER,
    "phase": _choice(*PHASES),
}
_BN_FOLD: dict[str, _Kind] = {
    "site": _TEXT,
    "kind": _choice("conv2d", "conv_transpose2d", "linear"),
    "phase": _choice(*PHASES),
    "options": _instance("a dict", dict),
    "bias_shape": _sequence(_SIZE),
    "bias_quant": _instance("a BiasQuant", BiasQuant),
}
_DYNAMIC_QUANT: dict[str, _Kind] = {"site": _TEXT, "phase": _choice(*PHASES), "steps": _TENSOR}
_FOLLOWERS: dict[type, dict[str, _Kind]] = {
    BiasQuant: _BIAS_QUANT,
    BnFold: _BN_FOLD,
    DynamicQuant: _DYNAMIC_QUANT,
}
# Files of earlier versions of MegEngine do not have these.
_OPTIONAL = frozenset(("name", "_name", "_short_name", "quantize_disabled", "padding_mode", "argspec"))
# Modules that a pass took out, such as a folded BatchNorm: the graph no longer calls them.
_REMOVABLE = frozenset(("conv", "bn", "conv_transpose2d", "linear"))
# Flags with the tensors that forward needs when they are set.
_NEEDS: dict[type, dict[str, tuple[str, ...]]] = {
    batchnorm._BatchNorm: dict.fromkeys(("track_running_stats", "freeze"), ("running_mean", "running_var")),
    normalization.GeneralNorm: {"affine": ("weight", "bias", "normalized_shape")},
    normalization.GroupNorm: {"affine": ("weight", "bias")},
    normalization.InstanceNorm: {"affine": ("weight", "bias")},
    normalization.LayerNorm: {"affine": ("weight", "bias")},
}
# The number of axes that a weight of one group has; a weight of several groups has one more.
_AXES: dict[type, int] = {M.Conv2d: 4, M.Conv3d: 5, M.ConvTranspose2d: 4, M.DeformableConv2d: 4}


@lru_cache(maxsize=256)
def _kinds(cls: type) -> dict[str, _Kind]:
    """The kinds of the attributes that the constructors of a class and of its bases set."""
    bases = cls.__mro__[::-1]
    constructors = [vars(base).get("__init__") for base in bases[1:]]
    codes = [dis.get_instructions(function) for function in constructors if function is not None]
    names = {step.argval for code in codes for step in code if step.opname == "STORE_ATTR"}
    names |= {"_flatten_weights"} if rnn.RNNBase in bases else set()  # its constructor calls what sets them
    kinds = {name: kind for name, kind in _KINDS.items() if name in names}
    for base in bases:
        kinds |= {name: kind for name, kind in _OWN_KINDS.get(base, {}).items() if name in names}
    return kinds


def check_attributes(module: M.Module, path: str) -> None:
    """Refuses a module of MegEngine, or a fake quant, with an attribute that its ``forward`` does not take.

    Args:
        module: a module with its attributes; modules of other classes are not checked.
        path: path of the module within the model, for the error.

    Raises:
        RefusedError: naming the module and the attribute.
    """
    cls = type(module)
    owner = f"its module {shown(path)}, a {cls.__name__},"
    if isinstance(module, OpaqueOp):
        _check_opaque(module, owner)
        return
    if isinstance(module, (FakeQuant, *_FOLLOWERS)):
        kinds = _FAKE_QUANT if isinstance(module, FakeQuant) else _FOLLOWERS[type(module)]
    elif cls.__module__.startswith("megengine.") or cls is OnnxRecurrent:
        kinds = _kinds(cls)  # type: ignore[arg-type]
    else:
        return
    for name, kind in kinds.items():
        value = getattr(module, name, kind)
        if value is kind:
            if name not in _OPTIONAL | _REMOVABLE:
                raise RefusedError(f"{owner} lacks {name}")
        elif not kind.fits(value):
            raise RefusedError(f"{owner} has the {name} {shown(value)}: it must be {kind.description}")
    for base in cls.__mro__:
        for flag, names in _NEEDS.get(base, {}).items():
            if getattr(module, flag) and any(getattr(module, name) is None for name in names):
                raise RefusedError(f"{owner} has {flag} without {' and '.join(names)}")
    if isinstance(module, FakeQuant):
        _check_counts(module, owner)
    axes = next((_AXES[base] for base in cls.__mro__ if base in _AXES), None)
    if axes is not None and not isinstance(module, M.LocalConv2d):
        rank, axes = module.weight.ndim, axes + (module.groups > 1)
        if rank != axes:
            raise RefusedError(
                f"{owner} has a weight of {rank} axes: with groups={module.groups} it must be one of {axes}"
            )


def _check_opaque(module: OpaqueOp, owner: str) -> None:
    """Refuses an opaque node whose model is none that the importer makes, or that reads other files."""
    model = vars(module).get("model")
    if type(model) is not bytes:
        raise RefusedError(f"{owner} lacks bytes as its model")
    if type(module.for_open_axes) is not bool:
        raise RefusedError(f"{owner} has a for_open_axes that is no truth value")
    if wrong := check_fragment(model):
        raise RefusedError(f"{owner} has a model that {wrong}")


def _check_counts(module: FakeQuant, owner: str) -> None:
    """Refuses scales and zero points whose number does not fit the fake quant's shape."""
    count = math.prod(module.shape)
    for name in ("scale", "zero_point"):
        shape = tuple(int(n) for n in getattr(module, name).shape)
        if math.prod(shape) != count:
            raise RefusedError(
                f"{owner} has a {name} of the shape {shape} for the shape {tuple(module.shape)}"
            )
