"""Normalizations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.model import Stored

_SMALLEST = float(np.finfo(np.float32).tiny)


def _batch_normalization(call: Call) -> Any:
    eps = call.attribute("epsilon", 1e-5)
    call.attribute("momentum", 0.9)
    training = call.attribute("training_mode", 0)
    spatial = call.attribute("spatial", 1)
    unmarked = call.version < 7 and not call.attribute("is_test", 0)
    if unmarked or training or not spatial or sum(1 for name in call.node.outputs if name) > 1:
        call.refuse("is in training mode: export the network for inference")
    if not all(isinstance(value, Stored) for value in call.values[1:]):
        return _computed_batch_normalization(call, eps)
    weight, bias, mean, variance = (call.stored(i) for i in range(1, 5))
    rank = call.rank(0)
    if rank in (2, 3, 4) and call.is_float(0):
        kind = M.BatchNorm2d if rank == 4 else M.BatchNorm1d
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}
        return call.module(kind(call.shape(0)[1], eps=eps), tensors, call.tensor(0))
    # MegEngine's BatchNorm has images of at most two axes.
    scale = weight.array.astype(np.float64) / np.sqrt(variance.array.astype(np.float64) + eps)
    shift = bias.array - mean.array * scale
    shape = (1, -1, *[1] * (rank - 2))
    factors = [
        Stored(v.astype(np.float32).reshape(shape), f"{call.name}_{n}")
        for n, v in (("scale", scale), ("shift", shift))
    ]
    product = call.function(F.mul, call.tensor(0), call.layers.tensor(factors[0]))
    return call.function(F.add, product, call.layers.tensor(factors[1]))


def _computed_batch_normalization(call: Call, eps: float) -> Any:
    """Normalizes by statistics or factors that the graph computes."""
    if not call.is_float(0):
        call.refuse(f"normalizes {call.dtype(0).name}")
    shape = (1, -1, *[1] * (call.rank(0) - 2))
    scale, shift, mean, variance = (
        call.function(F.reshape, call.tensor(i), shape) if call.rank(0) > 2 else call.tensor(i)
        for i in range(1, 5)
    )
    deviation = call.function(F.sqrt, call.function(F.add, variance, eps))
    centered = call.function(F.sub, call.tensor(0), mean)
    scaled = call.function(F.mul, call.function(F.div, centered, deviation), scale)
    return call.function(F.add, scaled, shift)


def _layer_normalization(call: Call) -> Any:
    rank = call.rank(0)
    axis = call.axis(call.attribute("axis", -1), rank)
    eps = call.attribute("epsilon", 1e-5)
    call.attribute("stash_type", 1)
    if sum(1 for name in call.node.outputs if name) > 1:
        call.refuse("gives its mean or deviation, too")
    shape = call.shape(0)[axis:]
    call.refuse_open(0, range(axis, rank), "normalizes over an input")
    if not _stored_as(call, 1, shape) or (call.has(2) and not _stored_as(call, 2, shape)):
        call.refuse("has a weight or bias that is computed, or not of the normalized shape")
    weight = call.stored(1)
    bias = call.stored(2) if call.has(2) else Stored(np.zeros(shape, np.float32), f"{weight.name}_zeros")
    module = M.LayerNorm(tuple(shape), eps=eps)
    return call.module(module, {"weight": weight, "bias": bias}, call.tensor(0))


def _stored_as(call: Call, index: int, shape: tuple[int, ...]) -> bool:
    value = call.values[index]
    return isinstance(value, Stored) and value.array.shape == tuple(shape)


def _instance_normalization(call: Call) -> Any:
    eps = call.attribute("epsilon", 1e-5)
    channels = call.shape(0)[1]
    if isinstance(call.values[1], Stored) and isinstance(call.values[2], Stored):
        tensors = {"weight": call.stored(1), "bias": call.stored(2)}
        return _as_image(call, M.InstanceNorm(channels, eps=eps), tensors)
    shape = (1, -1, *[1] * (call.rank(0) - 2))
    weight, bias = (call.function(F.reshape, call.tensor(i), shape) for i in (1, 2))
    norm = _as_image(call, M.InstanceNorm(channels, eps=eps, affine=False), {})
    return call.function(F.add, call.function(F.mul, norm, weight), bias)


def _as_image(call: Call, module: M.Module, tensors: Mapping[str, Stored]) -> Any:
    """Calls a norm, which MegEngine has for images, on a tensor with another number of axes."""
    rank = call.rank(0)
    if rank == 4:
        return call.module(module, tensors, call.tensor(0))
    if rank < 3:
        call.refuse(f"normalizes a tensor with {rank} axes, which has no places to normalize over")
    _, channels, *space = call.shape(0)
    call.refuse_open(0, [1], "normalizes over an input")
    image: tuple[Any, ...] = (-1, channels, space[0], math.prod(space[1:]))
    whole: tuple[Any, ...] = (-1, channels, *space)
    if len({shape[2:] for shape in call.shapes(0)}) > 1:  # the norm counts its places itself
        whole = tuple(call.layers.size(call.size(0, axis)) for axis in range(rank))
        image = (whole[0], channels, -1, 1)
    x = call.function(F.reshape, call.tensor(0), image, name=f"{call.name}_image")
    norm = call.module(module, tensors, x, name=f"{call.name}_norm")
    return call.function(F.reshape, norm, whole)


def _group_normalization(call: Call) -> Any:
    groups, eps = call.attribute("num_groups"), call.attribute("epsilon", 1e-5)
    call.attribute("stash_type", 1)
    channels, tensors = call.shape(0)[1], {"weight": call.stored(1), "bias": call.stored(2)}
    if any(tensor.array.size != channels for tensor in tensors.values()):
        call.refuse("has weights that are not one number for each channel")
    return _as_image(call, M.GroupNorm(groups, channels, eps=eps), tensors)


def _lp_normalization(call: Call) -> Any:
    axis, order = call.axis(call.attribute("axis", -1), call.rank(0)), call.attribute("p", 2)
    x = call.tensor(0)
    if order == 1:
        norm = call.function(F.sum, call.function(F.abs, x), axis=axis, keepdims=True)
    else:
        norm = call.function(
            F.sqrt, call.function(F.sum, call.function(F.square, x), axis=axis, keepdims=True)
        )
    # A vector of zeros stays 0.
    return call.function(F.div, x, call.function(F.maximum, norm, _SMALLEST))


def _local_response(call: Call) -> Any:
    size, alpha = call.attribute("size"), call.attribute("alpha", 1e-4)
    beta, bias = call.attribute("beta", 0.75), call.attribute("bias", 1.0)
    if size % 2 == 0 or call.rank(0) != 4:
        call.refuse("has an even size, or a tensor without 4 axes")
    return call.function(F.nn.local_response_norm, call.tensor(0), size, bias, alpha / size, beta)


LOWERINGS: dict[str, Lowering] = {
    "BatchNormalization": _batch_normalization,
    "LayerNormalization": _layer_normalization,
    "InstanceNormalization": _instance_normalization,
    "GroupNormalization": _group_normalization,
    "LpNormalization": _lp_normalization,
    "LRN": _local_response,
}
