"""Layers, norms and pooling in torch, with the arguments and gradients of MegEngine's functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as TF

Form = Callable[..., Any]
"""Computes an op from its inputs and keyword arguments (``weight``, ``bias`` and the attributes)."""


def _pair(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def _conv(rank: int) -> Form:
    function = (TF.conv1d, TF.conv2d, TF.conv3d)[rank - 1]

    def conv(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        **_: Any,
    ) -> Any:
        if weight.ndim == rank + 3:  # groups first
            weight = weight.flatten(0, 1)
        return function(x, weight, _flat(bias), stride, padding, dilation, groups)

    return conv


def _conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    output_padding: Any = 0,
    **_: Any,
) -> Any:
    if weight.ndim == 5:
        weight = weight.flatten(0, 1)
    return TF.conv_transpose2d(x, weight, _flat(bias), stride, padding, output_padding, groups, dilation)


def _flat(bias: Any) -> Any:
    return None if bias is None else bias.reshape(-1)


def _linear(x: Any, weight: Any, bias: Any = None, **_: Any) -> Any:
    return TF.linear(x, weight, _flat(bias))


def _matmul(x: Any, y: Any, transpose_a: bool, transpose_b: bool) -> Any:
    x = x.transpose(-1, -2) if transpose_a else x
    return torch.matmul(x, y.transpose(-1, -2) if transpose_b else y)


LAYERS: dict[str, Form] = {
    "conv2d": _conv(2),
    "conv_transpose2d": _conv_transpose2d,
    "linear": _linear,
}
"""The layers that a `BnFold` computes."""


def batch_norm(bn: Any, x: Any, leaf: Callable[[Any], Any]) -> Any:
    """Computes what the MegEngine BatchNorm ``bn`` computes; in training it updates the statistics of ``bn``.

    Args:
        bn: the module.
        x: its input.
        leaf: gives the tensor of torch for a Tensor of the module.
    """
    weight, bias = (None if p is None else _flat(leaf(p)) for p in (bn.weight, bn.bias))
    if bn.freeze:
        weight, bias = (None if p is None else p.detach() for p in (weight, bias))
    mean, variance = (leaf(t).reshape(-1) for t in (bn.running_mean, bn.running_var))
    if not bn.training or bn.freeze:
        return TF.batch_norm(x, mean, variance, weight, bias, False, 0.0, bn.eps)
    mean, variance = mean.clone(), variance.clone()
    y = TF.batch_norm(x, mean, variance, weight, bias, True, 1.0 - bn.momentum, bn.eps)
    for tensor, value in ((bn.running_mean, mean), (bn.running_var, variance)):
        tensor._reset(type(tensor)(value.reshape(tuple(tensor.shape)).numpy()))
    return y


def _batch_norm_function(
    x: Any, eps: float, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, **_: Any
) -> Any:
    mean, variance = _flat(running_mean), _flat(running_var)
    return TF.batch_norm(x, mean, variance, _flat(weight), _flat(bias), False, 0.0, eps)


class _MaxPool(torch.autograd.Function):
    """Max pooling; each value that equals the maximum of its window gets the gradient, as in MegEngine."""

    @staticmethod
    def forward(ctx: Any, x: Any, kernel: Any, stride: Any, padding: Any) -> Any:
        y = TF.max_pool2d(x, kernel, stride, padding)
        ctx.save_for_backward(x, y)
        ctx.window = kernel, stride, padding
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        (high, wide), (down, right), (top, left) = ctx.window
        padded = TF.pad(x, (left, left, top, top), value=-math.inf)
        dx = torch.zeros_like(padded)
        rows, columns = y.shape[-2:]
        for i in range(high):
            for j in range(wide):
                place = (
                    ...,
                    slice(i, i + down * (rows - 1) + 1, down),
                    slice(j, j + right * (columns - 1) + 1, right),
                )
                dx[place] += grad * (padded[place] == y)
        return dx[..., top : top + x.shape[-2], left : left + x.shape[-1]], None, None, None


def _max_pool2d(x: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    return _MaxPool.apply(x, _pair(kernel), _pair(stride), _pair(padding))


def _avg_pool2d(x: Any, kernel: Any, stride: Any, padding: Any, count_include_pad: bool) -> Any:
    return TF.avg_pool2d(x, kernel, stride, padding, count_include_pad=count_include_pad)


def _window(x: Any, output_size: Any) -> dict[str, Any]:
    """Returns kernel and stride of an adaptive pooling: MegEngine's windows are all of one size."""
    strides = tuple(size // out for size, out in zip(x.shape[-2:], output_size, strict=True))
    sizes = zip(x.shape[-2:], output_size, strides, strict=True)
    kernel = tuple(size - (out - 1) * stride for size, out, stride in sizes)
    return {"kernel": kernel, "stride": strides, "padding": 0}


def _adaptive_avg_pool2d(x: Any, output_size: Any) -> Any:
    if tuple(output_size) == (1, 1):
        return x.mean((-2, -1), keepdim=True)
    return _avg_pool2d(x, **_window(x, output_size), count_include_pad=True)


def _adaptive_max_pool2d(x: Any, output_size: Any) -> Any:
    return _max_pool2d(x, **_window(x, output_size))


def _softmax(function: Form) -> Form:
    def softmax(x: Any, axis: Any) -> Any:
        axes = axis if isinstance(axis, tuple) else (axis,)
        if len(axes) != 1:
            raise NotImplementedError("over several axes")
        return function(x, axes[0])

    return softmax


def moved(parameter: Any, x: Any) -> Any:
    """Reshapes a parameter of the channels (axis 1) so that it broadcasts to ``x``."""
    if parameter is None or parameter.ndim > 1 or parameter.numel() == 1:
        return parameter
    return parameter.reshape(-1, *[1] * (x.ndim - 2))


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float, normalized_shape: Any = None, **more: Any) -> Any:
    if normalized_shape is None:
        if weight is None:
            raise NotImplementedError("without a known shape")
        normalized_shape = weight.shape
    shape = tuple(normalized_shape) if not isinstance(normalized_shape, int) else (normalized_shape,)
    weight, bias = (None if p is None else p.reshape(shape) for p in (weight, bias))
    return TF.layer_norm(x, shape, weight, bias, eps)


def _group_norm(
    x: Any, weight: Any, bias: Any, eps: float, num_groups: Any = None, group: Any = None, **_: Any
) -> Any:
    return TF.group_norm(x, int(num_groups or group), _flat(weight), _flat(bias), eps)


def _instance_norm(x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Any:
    return TF.instance_norm(x, weight=_flat(weight), bias=_flat(bias), eps=eps)


def _rms_norm(x: Any, weight: Any, axis: int, eps: float) -> Any:
    y = x / torch.sqrt((x * x).mean(axis, keepdim=True) + eps)
    return y if weight is None else y * weight


FORMS: dict[str, Form] = {
    **LAYERS,
    "conv1d": _conv(1),
    "conv3d": _conv(3),
    "matmul": _matmul,
    "batch_norm": _batch_norm_function,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "adaptive_max_pool2d": _adaptive_max_pool2d,
    "softmax": _softmax(torch.softmax),
    "logsoftmax": _softmax(torch.log_softmax),
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "rms_norm": _rms_norm,
}
"""Kind of an op -> its form."""
