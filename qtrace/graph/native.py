"""MegEngine's own quantized modules: float layers in their place, and the scales that they were trained with.

`reading` takes scale and zero point from observers, fake quants and integer types. `lowering` puts float
layers in the place of `megengine.module.qat` and `megengine.module.quantized`, and `ranges` is the record of
the scales that a traced module carries.

The record is a plain attribute of the traced module, as JSON text, which ``flatten``, ``save`` and ``load``
keep. It names layers by their path, since paths survive changes of the graph.

A BatchNorm that a QAT module folds on the way is folded by the same formula, in the same precision: the scale
of the weight belongs to the folded one. Integer weights become the floats that they stand for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Parameter, Tensor
from megengine.core.tensor.dtype import _builtin_quant_dtypes, is_quantize
from megengine.module import Module, qat, quantized
from megengine.module.qat import QATModule
from megengine.module.quantized.module import QuantizedModule
from megengine.quantization.observer import HistogramObserver, MinMaxObserver
from megengine.quantization.utils import QuantMode

from qtrace.errors import SchemeError, TraceError
from qtrace.graph import failures
from qtrace.graph.failures import parsing
from qtrace.graph.types import GetAttr, ModuleNode, TracedModule
from qtrace.graph.walk import graphs_of
from qtrace.scheme import QParams, QScheme

# The scales that a model brings from MegEngine's own quantization, as a record of its traced module.

_ATTRIBUTE = "native_ranges"


@dataclass(frozen=True)
class LayerRanges:
    """The quantization parameters of one layer of MegEngine's own quantization.

    Attributes:
        kind: the class that the layer had, such as ``qat.ConvBnRelu2d``.
        activation: the parameters of its result; None if there are none.
        weight: the parameters of its weight; None if there are none.
        notes: a clause for each parameter that could not be taken over.
    """

    kind: str
    activation: QParams | None = None
    weight: QParams | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the parameters as plain data."""
        sides = {"activation": self.activation, "weight": self.weight}
        parameters = {side: None if q is None else q.to_dict() for side, q in sides.items()}
        return {"kind": self.kind, "notes": list(self.notes), **parameters}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerRanges:
        """Reads what `to_dict` returned.

        Raises:
            ValueError: for anything else.
        """
        if set(data) != {"kind", "notes", "activation", "weight"}:
            raise ValueError("its keys are others")
        sides = (None if data[k] is None else QParams.from_dict(data[k]) for k in ("activation", "weight"))
        texts = (data["kind"], *data["notes"])
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its kind or its notes are no text")
        activation, weight = sides
        if any(side is not None and side.scheme.per_channel for side in (activation, weight)):
            raise ValueError("it has a scale per channel")
        return cls(data["kind"], activation, weight, tuple(data["notes"]))


@dataclass(frozen=True)
class NativeRanges:
    """The quantization parameters that a model brings.

    Attributes:
        layers: path of a layer -> its parameters.
    """

    layers: Mapping[str, LayerRanges]

    def to_json(self) -> str:
        """Returns the record as JSON text."""
        return json.dumps({path: layer.to_dict() for path, layer in self.layers.items()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> NativeRanges:
        """Reads what `to_json` wrote.

        Raises:
            GraphError: when the text is anything else.
        """
        with parsing("the scales that the model brings are", "trace it again"):
            document = json.loads(text)
            return cls({str(path): LayerRanges.from_dict(data) for path, data in document.items()})


def write_ranges(traced: TracedModule, ranges: NativeRanges) -> None:
    """Attaches ``ranges`` to ``traced``."""
    setattr(traced, _ATTRIBUTE, ranges.to_json())


def read_ranges(traced: TracedModule) -> NativeRanges | None:
    """Returns the scales that ``traced`` brings; None if its model was not quantized by MegEngine.

    Raises:
        GraphError: when they are damaged.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    return None if text is None else NativeRanges.from_json(text)


def drop_ranges(traced: TracedModule) -> None:
    """Removes the scales that ``traced`` brings: `prepare` then treats it as any float model."""
    if hasattr(traced, _ATTRIBUTE):
        delattr(traced, _ATTRIBUTE)


# Puts float layers in the place of MegEngine's QAT modules and quantized modules, and keeps their scales.

# Name of a quantized type of MegEngine's kernels -> its lowest and highest integer.
_TYPES = {
    meta.cname: (meta.qmin, meta.qmax)
    for meta in (_builtin_quant_dtypes[name] for name in ("qint8", "quint8", "qint4", "quint4"))
}


def read_fake_quant(module: QATModule, side: str) -> QParams | str:
    """Reads the parameters of a QAT module's weight or activation, as ``quantize`` of MegEngine would.

    Args:
        module: the module.
        side: "weight" or "act".

    Returns:
        The parameters, or a clause that says why there are none.
    """
    observer, fake_quant = getattr(module, f"{side}_observer"), getattr(module, f"{side}_fake_quant")
    source: Module = fake_quant if hasattr(fake_quant, "get_qparams") else observer
    if source is None or not hasattr(source, "get_qparams"):
        return "it has neither an observer nor a fake quant that knows a scale"
    if problem := _unused(source):
        return problem
    qparams = source.get_qparams()
    if qparams is None or qparams.scale is None:
        return f"its {type(source).__name__} was given no scale"
    meta = qparams.dtype_meta if qparams.dtype_meta is not None else source.dtype
    affine = qparams.mode is QuantMode.ASYMMERTIC and qparams.zero_point is not None
    zero = qparams.zero_point.numpy() if affine else np.zeros((), np.float32)
    return _parameters(int(meta.qmin), int(meta.qmax), qparams.scale.numpy(), zero)


def read_dtype(dtype: Any) -> QParams | str:
    """Reads the parameters of a tensor type, such as the type of a quantized layer's result.

    Args:
        dtype: a numpy dtype with MegEngine's metadata, or None.

    Returns:
        The parameters, or a clause that says why there are none.
    """
    if dtype is None or not is_quantize(dtype):
        return "its type has no scale"
    data = dtype.metadata["mgb_dtype"]
    if data["name"] not in _TYPES:
        return f"qtrace has no scheme for its type {data['name']}"
    zero = np.asarray(data.get("zero_point") or 0)
    return _parameters(*_TYPES[data["name"]], np.asarray(data["scale"], np.float32), zero)


def _unused(source: Module) -> str:
    """Returns why the statistics of an observer say nothing; "" if they do."""
    if isinstance(source, MinMaxObserver):
        low, high = float(source.min_val.numpy()), float(source.max_val.numpy())
        empty = isinstance(source, HistogramObserver) and float(source.histogram.numpy()[0]) < 0
        if empty or not (math.isfinite(low) and math.isfinite(high) and low <= high):
            return f"its {type(source).__name__} has seen no finite value"
        if abs(low) == abs(high) == float(np.finfo(np.float32).max):
            return f"its {type(source).__name__} has seen no finite value"
    return ""


def _parameters(qmin: int, qmax: int, scale: np.ndarray, zero_point: np.ndarray) -> QParams | str:
    scheme = _scheme(qmin, qmax, bool(np.any(zero_point != 0)))
    if scheme is None:
        return f"qtrace has no scheme for integers from {qmin} to {qmax}"
    if scale.size != 1 or zero_point.size != 1:
        return f"it has {scale.size} scales, and qtrace takes over one for each tensor"
    zero = float(zero_point.reshape(()))
    if not zero.is_integer():
        return f"its zero point {zero:g} is no integer"
    try:
        return QParams(scheme, np.asarray(scale, np.float32).reshape(()), np.asarray(int(zero)))
    except SchemeError:
        return f"its scale {float(scale.reshape(())):g} and zero point {zero:g} are impossible"


def _scheme(qmin: int, qmax: int, affine: bool) -> QScheme | None:
    """Returns the scheme with these integers; None if there is none."""
    signed = qmin < 0
    bits = qmax.bit_length() + signed
    if not 2 <= bits <= 16:
        return None
    narrow = qmin == (-qmax if signed else 1)
    scheme = QScheme(
        bits=bits,
        signed=signed,
        symmetric=signed and not affine,
        narrow=narrow,
        rounding="half_away",
    )
    return scheme if (scheme.qmin, scheme.qmax) == (qmin, qmax) else None


_KEPT = ("name", "_name", "_short_name", "training", "_forward_hooks", "_forward_pre_hooks")
_SIDES = ("weight_observer", "act_observer", "weight_fake_quant", "act_fake_quant")


def lower(module: Module) -> tuple[Module, NativeRanges | None]:
    """Returns a copy of ``module`` with float layers for MegEngine's quantized ones, and their scales.

    Args:
        module: any module; it is not changed. One without quantized layers is returned itself.

    Returns:
        The float module, and the scales by the path of the layer; None for a module without such layers.

    Raises:
        TraceError: naming each layer that qtrace does not know.
    """
    if not any(map(_is_native, module.modules())):
        return module, None
    name = type(module).__name__
    root = failures.copy_module(module, "its quantized layers cannot be replaced")
    root.eval()
    layers = {path: part for path, part in root.named_modules() if _is_native(part)}
    if unknown := [
        f"{p or 'the model'} ({_kind(m)})" for p, m in layers.items() if type(m) not in _LOWERINGS
    ]:
        raise TraceError(
            f"{name} has layers of MegEngine's own quantization that qtrace does not know: "
            f"{', '.join(unknown)}: give the float model, from before quantize_qat or quantize, with the "
            "trained weights in it, or write these layers with megengine.module's own."
        )
    ranges = {path: _LOWERINGS[type(layer)](layer) for path, layer in layers.items()}
    if isinstance(root, TracedModule):
        _renew_types(root)
    return root, NativeRanges(ranges)


def _is_native(module: Module) -> bool:
    """Returns whether MegEngine's quantization made ``module``, or a trace of it op by op."""
    own = isinstance(module, (QATModule, QuantizedModule))
    return own or (isinstance(module, TracedModule) and bool(module.is_qat))


def _renew_types(traced: TracedModule) -> None:
    """Writes the classes of the layers into the nodes of all graphs of ``traced``."""
    for expr in (expr for graph in graphs_of(traced) for expr in graph._exprs):
        for node in expr.outputs if isinstance(expr, GetAttr) else ():
            if isinstance(node, ModuleNode) and not isinstance(node.owner, TracedModule):
                node.module_type = type(node.owner)


def _kind(module: Module) -> str:
    own = type(module)
    if isinstance(module, TracedModule):
        return "trace of a qat module"
    known = own.__module__.startswith(("megengine.module.qat", "megengine.module.quantized"))
    return f"{own.__module__.split('.')[2]}.{own.__name__}" if known else f"{own.__module__}.{own.__name__}"


def _become(module: Module, layer: Module) -> None:
    """Turns ``module`` into ``layer`` in place, so that whoever holds it holds the layer."""
    attributes = {key: module.__dict__[key] for key in _KEPT if key in module.__dict__}
    module.__class__ = type(layer)
    module.__dict__.clear()
    module.__dict__.update({**layer.__dict__, **attributes})


def _ranges(module: Module, activation: QParams | str | None, weight: QParams | str | None) -> LayerRanges:
    sides = {"result": activation, "weight": weight}
    notes = tuple(f"no scale for its {name}: {side}" for name, side in sides.items() if isinstance(side, str))
    result, parameter = (side if isinstance(side, QParams) else None for side in sides.values())
    return LayerRanges(_kind(module), result, parameter, notes)


# -- QAT modules ---------------------------------------------------------------------------------------


def _read_qat(module: Any, has_weight: bool) -> LayerRanges:
    activation = read_fake_quant(module, "act") if module.with_act else None
    return _ranges(module, activation, read_fake_quant(module, "weight") if has_weight else None)


def _qat(float_class: type[Module], has_weight: bool = True) -> Callable[[Any], LayerRanges]:
    """Returns the lowering of a QAT module that is a subclass of its float layer."""

    def lowering(module: Any) -> LayerRanges:
        ranges = _read_qat(module, has_weight)
        for side in _SIDES:
            if side in module._modules:
                module._modules.remove(side)
            module.__dict__.pop(side, None)
        module.__class__ = float_class
        return ranges

    return lowering


def _qat_norm(float_class: type[Module], child: str) -> Callable[[Any], LayerRanges]:
    """Returns the lowering of a QAT module with the layer ``child`` and a BatchNorm."""

    def lowering(module: Any) -> LayerRanges:
        ranges = _read_qat(module, True)
        layer = getattr(module, child)
        weight, bias = _fold(layer, module.bn)
        layer.__class__ = float_class
        layer.weight = Parameter(weight)
        layer.bias = Parameter(bias)
        _become(module, layer)
        return ranges

    return lowering


def _fold(layer: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Folds a BatchNorm in eval mode into weight and bias, by the formula of MegEngine's QAT modules."""
    channels = norm.num_features
    gamma = F.ones((channels,)) if norm.weight is None else norm.weight.reshape(-1)
    beta = F.zeros((channels,)) if norm.bias is None else norm.bias.reshape(-1)
    mean = F.zeros((channels,)) if norm.running_mean is None else norm.running_mean.reshape(-1)
    variance = F.ones((channels,)) if norm.running_var is None else norm.running_var.reshape(-1)
    bias = F.zeros((channels,)) if layer.bias is None else layer.bias.reshape(-1)
    inverse = 1.0 / F.sqrt(variance + norm.eps)
    folded_bias = beta + gamma * (bias - mean) * inverse
    if isinstance(layer, M.Linear):
        shape: tuple[int, ...] = (-1, 1)
    elif isinstance(layer, M.ConvTranspose2d):
        shape = (1, -1, 1, 1) if layer.groups == 1 else (layer.groups, 1, -1, 1, 1)
    else:
        shape = (-1, 1, 1, 1) if layer.groups == 1 else (layer.groups, -1, 1, 1, 1)
    if not isinstance(layer, M.Linear):
        folded_bias = folded_bias.reshape(1, -1, 1, 1)
    return layer.weight * (gamma * inverse).reshape(*shape), folded_bias


# -- quantized modules ---------------------------------------------------------------------------------


def _read_weight(weight: Tensor) -> QParams | str:
    """Reads the parameters of an integer weight; it is narrow if it does not use the lowest integer."""
    qparams = read_dtype(weight.dtype)
    if isinstance(qparams, str) or not qparams.scheme.signed:
        return qparams
    lowest = float(weight.astype("float32").numpy().min(initial=0.0)) / float(qparams.scale)
    narrow = round(lowest) > qparams.scheme.qmin
    return QParams(qparams.scheme.replace(narrow=narrow), qparams.scale, qparams.zero_point)


def _floats(weight: Tensor) -> Parameter:
    """Returns the floats that the integers of ``weight`` stand for."""
    return Parameter(weight.astype("float32").numpy())


def _quantized(float_class: type[Module]) -> Callable[[Any], LayerRanges]:
    """Returns the lowering of a quantized convolution, which is a subclass of its float layer."""

    def lowering(module: Any) -> LayerRanges:
        ranges = _ranges(module, read_dtype(module.output_dtype), _read_weight(module.weight))
        del module.__dict__["output_dtype"]
        module.weight = _floats(module.weight)
        module.__class__ = float_class
        return ranges

    return lowering


def _quantized_linear(float_class: type[Module]) -> Callable[[Any], LayerRanges]:
    def lowering(module: Any) -> LayerRanges:
        ranges = _ranges(module, read_dtype(module.output_dtype), _read_weight(module.weight))
        outputs, inputs = module.weight.shape
        layer = M.Linear(int(inputs), int(outputs), bias=module.bias is not None)
        layer.__class__ = float_class
        layer.weight, layer.bias = _floats(module.weight), module.bias
        _become(module, layer)
        return ranges

    return lowering


def _quantized_matmul(module: Any) -> LayerRanges:
    ranges = _ranges(module, read_dtype(module.output_dtype), _read_weight(module.weight))
    options = (module.batch, module.in_features, module.out_features)
    layer = M.BatchMatMulActivation(
        *options, bias=module.bias is not None, nonlinear_mode=module.nonlinear_mode
    )
    layer.weight = Parameter(_floats(module.weight).reshape(layer.weight.shape))
    if module.bias is not None:
        layer.bias = Parameter(module.bias.reshape(-1))
    _become(module, layer)
    return ranges


def _quantized_elemwise(module: Any) -> LayerRanges:
    ranges = _ranges(module, read_dtype(module.output_dtype), None)
    _become(module, M.Elemwise(module.method.removeprefix("q")))
    return ranges


def _quantized_plain(float_class: type[Module]) -> Callable[[Any], LayerRanges]:
    """Returns the lowering of a quantized module that has nothing but the type of its result."""

    def lowering(module: Any) -> LayerRanges:
        dtype = getattr(module, "output_dtype", None)
        ranges = _ranges(module, None if float_class is M.DequantStub else read_dtype(dtype), None)
        _become(module, float_class())
        return ranges

    return lowering


_LOWERINGS: dict[type[Module], Callable[[Any], LayerRanges]] = {
    qat.Conv2d: _qat(M.Conv2d),
    qat.ConvRelu2d: _qat(M.ConvRelu2d),
    qat.ConvTranspose2d: _qat(M.ConvTranspose2d),
    qat.ConvTransposeRelu2d: _qat(M.ConvTransposeRelu2d),
    qat.Linear: _qat(M.Linear),
    qat.LinearRelu: _qat(M.LinearRelu),
    qat.BatchMatMulActivation: _qat(M.BatchMatMulActivation),
    qat.Elemwise: _qat(M.Elemwise, has_weight=False),
    qat.Concat: _qat(M.Concat, has_weight=False),
    qat.QuantStub: _qat(M.QuantStub, has_weight=False),
    qat.DequantStub: _qat(M.DequantStub, has_weight=False),
    qat.ConvBn2d: _qat_norm(M.Conv2d, "conv"),
    qat.ConvBnRelu2d: _qat_norm(M.ConvRelu2d, "conv"),
    qat.ConvTransposeBn2d: _qat_norm(M.ConvTranspose2d, "conv_transpose2d"),
    qat.ConvTransposeBnRelu2d: _qat_norm(M.ConvTransposeRelu2d, "conv_transpose2d"),
    qat.LinearBn1d: _qat_norm(M.Linear, "linear"),
    qat.LinearBnRelu1d: _qat_norm(M.LinearRelu, "linear"),
    quantized.Conv2d: _quantized(M.Conv2d),
    quantized.ConvRelu2d: _quantized(M.ConvRelu2d),
    quantized.ConvBn2d: _quantized(M.Conv2d),
    quantized.ConvBnRelu2d: _quantized(M.ConvRelu2d),
    quantized.ConvTranspose2d: _quantized(M.ConvTranspose2d),
    quantized.ConvTransposeRelu2d: _quantized(M.ConvTransposeRelu2d),
    quantized.ConvTransposeBn2d: _quantized(M.ConvTranspose2d),
    quantized.ConvTransposeBnRelu2d: _quantized(M.ConvTransposeRelu2d),
    quantized.Linear: _quantized_linear(M.Linear),
    quantized.LinearRelu: _quantized_linear(M.LinearRelu),
    quantized.LinearBn1d: _quantized_linear(M.Linear),
    quantized.LinearBnRelu1d: _quantized_linear(M.LinearRelu),
    quantized.BatchMatMulActivation: _quantized_matmul,
    quantized.Elemwise: _quantized_elemwise,
    quantized.Concat: _quantized_plain(M.Concat),
    quantized.QuantStub: _quantized_plain(M.QuantStub),
    quantized.DequantStub: _quantized_plain(M.DequantStub),
}
