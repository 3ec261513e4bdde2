"""Ops that move values or compute each by itself in torch, with the conventions of MegEngine's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as TF

from qtrace.extras.torch.learning.fake_quants import absolute, clip, larger, smaller
from qtrace.extras.torch.learning.layers import moved

__all__ = ["FORMS"]

Form = Callable[..., Any]


def _two(function: Callable[[Any, Any], Any]) -> Form:
    """Builds the form of an op of two operands, of which one may be a number or an array."""

    def compute(*_: Any, operands: tuple[Any, Any], **__: Any) -> Any:
        return function(*operands)

    return compute


def _one(function: Callable[[Any], Any]) -> Form:
    def compute(x: Any, **_: Any) -> Any:
        return function(x)

    return compute


def _tensors(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes tensors of both operands before ``function`` is called."""

    def compute(x: Any, y: Any) -> Any:
        like = x if isinstance(x, torch.Tensor) else y
        x, y = (v if isinstance(v, torch.Tensor) else torch.as_tensor(v, dtype=like.dtype) for v in (x, y))
        return function(x, y)

    return compute


def _clip(x: Any, lower: Any, upper: Any) -> Any:
    if isinstance(lower, torch.Tensor) or isinstance(upper, torch.Tensor):
        raise NotImplementedError("with bounds that are computed")
    return clip(x, lower, upper)


def _leaky_relu(x: Any, negative_slope: float) -> Any:
    return torch.where(x >= 0, x, x * negative_slope)


def _prelu(x: Any, slope: Any) -> Any:
    return torch.where(x >= 0, x, x * moved(slope, x))


def _gelu_tanh(x: Any) -> Any:
    return TF.gelu(x, approximate="tanh")


def _hard_sigmoid(x: Any, slope: float, offset: float) -> Any:
    return clip(x * slope + offset, 0.0, 1.0)


def _scale_and_shift(x: Any, scale: Any, shift: Any) -> Any:
    return x * scale + shift


def _elemwise(x: Any, y: Any, mode: str) -> Any:
    return {"FUSE_ADD_SIGMOID": torch.sigmoid, "FUSE_ADD_TANH": torch.tanh}[mode](x + y)


def _reduce(function: Callable[..., Any]) -> Form:
    def reduce(x: Any, axis: Any, keepdims: bool) -> Any:
        over = tuple(range(x.ndim)) if axis is None else axis
        return function(x, over, keepdims and axis is not None)

    return reduce


def _extreme(extreme: Callable[..., Any]) -> Form:
    def reduce(x: Any, over: Any, keepdims: bool) -> Any:
        top = extreme(x.detach(), over, keepdim=True)
        # Every value that equals the result gets its gradient, as in MegEngine.
        y = ((x - x.detach()) * (x.detach() == top)).sum(over, keepdim=keepdims)
        return y + (top if keepdims else extreme(x.detach(), over))

    return _reduce(reduce)


def _interpolate(x: Any, size: Any, scale_factor: Any, mode: str, align_corners: bool) -> Any:
    if mode not in ("nearest", "bilinear"):
        raise NotImplementedError(f"in the mode {mode}")
    if size is not None:
        size = tuple(int(n) for n in (size if hasattr(size, "__len__") else (size, size)))
    else:
        factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * 2
        size = tuple(int(n * float(f)) for n, f in zip(x.shape[-2:], factors, strict=True))
    corners = {} if mode == "nearest" else {"align_corners": align_corners}
    return TF.interpolate(x, size=size, mode=mode, **corners)


def _integers(value: Any) -> tuple[int, ...]:
    values = value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else value
    return tuple(int(n) for n in values)


def _reshape(x: Any, target_shape: Any) -> Any:
    return x.reshape(_integers(target_shape))


def _transpose(x: Any, pattern: Any) -> Any:
    if any(isinstance(axis, str) for axis in pattern):
        raise NotImplementedError("with new axes")
    return x.permute(_integers(pattern))


def _flatten(x: Any, start: int, end: int) -> Any:
    return x.flatten(start, end)


def _expand_dims(x: Any, axis: tuple[int, ...]) -> Any:
    rank = x.ndim + len(axis)
    for place in sorted(a % rank for a in axis):
        x = x.unsqueeze(place)
    return x


def _squeeze(x: Any, axis: Any) -> Any:
    return x.squeeze() if axis is None else x.squeeze(tuple(axis))


def _broadcast_to(x: Any, shape: Any) -> Any:
    return x.broadcast_to(_integers(shape))


def _repeat(x: Any, repeats: Any, axis: int | None) -> Any:
    if not isinstance(repeats, int):
        raise NotImplementedError("by several numbers")
    return torch.repeat_interleave(x, repeats, axis)


def _tile(x: Any, reps: Any) -> Any:
    return x.tile(_integers(reps))


def _split(x: Any, sections: Any, axis: int) -> Any:
    parts = sections if isinstance(sections, int) else _integers(sections)
    return torch.tensor_split(x, parts, axis)


def _pad(x: Any, width: Any, mode: str, value: float) -> Any:
    flat = [n for pair in reversed(width) for n in pair]
    if mode == "constant":
        return TF.pad(x, flat, value=value)
    planes = 2 * (x.ndim - 2)
    if x.ndim not in (3, 4) or any(flat[planes:]):
        raise NotImplementedError(f"in the mode {mode} of these axes")
    return TF.pad(x, flat[:planes], {"edge": "replicate", "replicate": "replicate"}.get(mode, mode))


def _channel_shuffle(x: Any, groups: int) -> Any:
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def _space_to_depth(x: Any, block: int, order: Any) -> Any:
    batch, channels, high, wide = x.shape
    parts = x.reshape(batch, channels, high // block, block, wide // block, block)
    parts = parts.permute(0, *((3, 5, 1)[i] for i in order), 2, 4)
    return parts.reshape(batch, -1, high // block, wide // block)


def _concat(*_: Any, parts: Any, axis: int) -> Any:
    return torch.cat([p for p in parts if p.numel() or p.ndim > 1], axis)


def _stack(*_: Any, parts: Any, axis: int) -> Any:
    return torch.stack(list(parts), axis)


def _getitem(x: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    plain = all(
        isinstance(i, (int, slice, type(None), type(...))) or getattr(i, "ndim", None) == 0 for i in items
    )
    if not plain:
        raise NotImplementedError("by an index that is computed")
    if any(isinstance(i, slice) and (i.step or 1) < 0 for i in items):
        raise NotImplementedError("backwards")
    return x[tuple(int(i) if isinstance(i, torch.Tensor) else i for i in items)]


def _where(*_: Any, mask: Any, operands: tuple[Any, Any]) -> Any:
    return torch.where(mask.bool(), *operands)


FORMS: dict[str, Form] = {
    "add": _two(lambda x, y: x + y),
    "sub": _two(lambda x, y: x - y),
    "mul": _two(lambda x, y: x * y),
    "div": _two(lambda x, y: x / y),
    "maximum": _two(_tensors(larger)),
    "minimum": _two(_tensors(smaller)),
    "less": _two(lambda x, y: x < y),
    "less_equal": _two(lambda x, y: x <= y),
    "greater": _two(lambda x, y: x > y),
    "greater_equal": _two(lambda x, y: x >= y),
    "pow": _two(lambda x, y: x**y),
    "neg": _one(torch.neg),
    "abs": _one(absolute),
    "square": _one(torch.square),
    "elemwise": _elemwise,
    "relu": _one(torch.relu),
    "relu6": _one(TF.relu6),
    "clip": _clip,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "sigmoid": _one(torch.sigmoid),
    "silu": _one(TF.silu),
    "hswish": _one(TF.hardswish),
    "hsigmoid": _one(TF.hardsigmoid),
    "tanh": _one(torch.tanh),
    "gelu": _one(TF.gelu),
    "gelu_tanh": _one(_gelu_tanh),
    "softplus": _one(TF.softplus),
    "logsigmoid": _one(TF.logsigmoid),
    "erf": _one(torch.erf),
    "exp": _one(torch.exp),
    "log": _one(torch.log),
    "sqrt": _one(torch.sqrt),
    "sin": _one(torch.sin),
    "cos": _one(torch.cos),
    "mish": _one(TF.mish),
    "hard_sigmoid": _hard_sigmoid,
    "scale_and_shift": _scale_and_shift,
    "mean": _reduce(lambda x, over, keepdims: x.mean(over, keepdim=keepdims)),
    "sum": _reduce(lambda x, over, keepdims: x.sum(over, keepdim=keepdims)),
    "max": _extreme(torch.amax),
    "min": _extreme(torch.amin),
    "interpolate": _interpolate,
    "reshape": _reshape,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "flatten": _flatten,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "broadcast_to": _broadcast_to,
    "repeat": _repeat,
    "tile": _tile,
    "split": _split,
    "pad": _pad,
    "identity": _one(lambda x: x),
    "dropout": _one(lambda x: x),
    "pixel_shuffle": lambda x, factor: TF.pixel_shuffle(x, factor),
    "channel_shuffle": _channel_shuffle,
    "space_to_depth": _space_to_depth,
    "concat": _concat,
    "stack": _stack,
    "getitem": _getitem,
    "where": _where,
}
"""Kind of an op -> its form."""
