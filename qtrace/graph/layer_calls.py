"""Calls of MegEngine's layers read as the calls of the functions that their ``forward`` makes.

``M.Conv2d`` and ``F.conv2d``, ``M.Sigmoid`` and ``F.sigmoid`` are two spellings of one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

from qtrace.gradients import plain
from qtrace.graph.types import CallFunction, Expr, GetAttr, Input, Node
from qtrace.graph.walk import owner

__all__ = [
    "LayerCall",
    "StoredTensor",
    "is_call_of_layer",
    "read_layer",
    "without_equal_sizes",
]


@dataclass(frozen=True)
class StoredTensor:
    """A parameter of a layer that the graph calls, and that no node of the graph need read.

    `GraphEditor` takes it as an argument of a call, as it takes a node.

    Attributes:
        path: the path of the parameter below the module of the graph.
        shape: its shape.
        dtype: its type.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The path, as messages show it."""
        return self.path

    def is_read_by(self, node: Node) -> bool:
        """Returns whether ``node`` stands for the same parameter."""
        return isinstance(node.expr, GetAttr) and _path(node) == self.path


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer as a call of a function.

    Attributes:
        function: the function.
        args: its arguments in order: nodes, numbers, and a `StoredTensor` for each parameter of the layer.
        options: its arguments by name, of a function that takes them only by name.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


_Reader = Callable[[Any, Callable[[str], Any]], tuple[Any, ...]]
_CONV = ("stride", "padding", "dilation", "groups", "conv_mode", "compute_mode")
_CONV_TRANSPOSE = ("stride", "padding", "output_padding", *_CONV[2:])


def _with(*names: str, tensors: tuple[str, ...] = ()) -> _Reader:
    """Reads tensors of the layer, then attributes, in the order of the function's arguments."""
    return lambda layer, stored: (*map(stored, tensors), *(getattr(layer, name) for name in names))


def _norm(*names: str) -> _Reader:
    def read(layer: Any, stored: Callable[[str], Any]) -> tuple[Any, ...]:
        return (*(getattr(layer, name) for name in names), stored("weight"), stored("bias"), layer.eps)

    return read


_LAYER = ("weight", "bias")
_STATISTICS = ("running_mean", "running_var")
_BATCH_NORMS = {M.BatchNorm1d: (2, 3), M.BatchNorm2d: (4,)}  # layer -> ranks of its input
# Class of a layer -> the function that it calls, and the arguments after its input.
LAYERS: dict[type[M.Module], tuple[Callable[..., Any], _Reader]] = {
    M.Conv1d: (F.nn.conv1d, _with(*_CONV, tensors=_LAYER)),
    M.Conv2d: (F.conv2d, _with(*_CONV, tensors=_LAYER)),
    M.Conv3d: (F.nn.conv3d, _with(*_CONV[:-1], tensors=_LAYER)),
    M.ConvTranspose2d: (F.conv_transpose2d, _with(*_CONV_TRANSPOSE, tensors=_LAYER)),
    M.ConvTranspose3d: (F.nn.conv_transpose3d, _with(*_CONV_TRANSPOSE[:4], tensors=_LAYER)),
    M.Embedding: (F.nn.embedding, _with(tensors=("weight",))),
    M.LocalResponseNorm: (F.nn.local_response_norm, _with("kernel_size", "k", "alpha", "beta")),
    M.SlidingWindow: (F.nn.sliding_window, _with("kernel_size", "padding", "stride", "dilation")),
    M.SlidingWindowTranspose: (
        F.nn.sliding_window_transpose,
        _with("output_size", "kernel_size", "padding", "stride", "dilation"),
    ),
    M.Linear: (F.linear, _with("compute_mode", tensors=_LAYER)),
    M.PReLU: (F.nn.prelu, _with(tensors=("weight",))),
    M.LayerNorm: (F.nn.layer_norm, _norm("normalized_shape", "affine")),
    M.GroupNorm: (F.nn.group_norm, _norm("num_groups", "affine")),
    M.InstanceNorm: (F.nn.instance_norm, _norm("affine")),
    **dict.fromkeys(_BATCH_NORMS, (F.nn.batch_norm, _with(tensors=(*_STATISTICS, *_LAYER)))),
    M.ReLU: (F.relu, _with()),
    M.Sigmoid: (F.sigmoid, _with()),
    M.SiLU: (F.nn.silu, _with()),
    M.GELU: (F.nn.gelu, _with()),
    M.LeakyReLU: (F.nn.leaky_relu, _with("negative_slope")),
    M.Softmax: (F.nn.softmax, _with("axis")),
    M.MaxPool2d: (F.nn.max_pool2d, _with("kernel_size", "stride", "padding")),
    M.AvgPool2d: (F.nn.avg_pool2d, _with("kernel_size", "stride", "padding", "mode")),
    M.AdaptiveAvgPool2d: (F.nn.adaptive_avg_pool2d, _with("oshp")),
    M.AdaptiveMaxPool2d: (F.nn.adaptive_max_pool2d, _with("oshp")),
    M.PixelShuffle: (F.nn.pixel_shuffle, _with("upscale_factor")),
    M.Pad: (F.nn.pad, _with("pad_width", "mode", "pad_val")),
}
_SIZES = frozenset(("kernel_size", "stride", "padding", "output_padding", "dilation", "oshp"))


def read_layer(expr: Expr) -> LayerCall | None:
    """Reads a call of a layer; None for any other expr, and for a layer that calls more than one function.

    A layer that pads with anything but zeros calls two functions, and a frozen BatchNorm does arithmetic. Any
    other BatchNorm is read as in eval mode.
    """
    layer = owner(expr)
    entry = LAYERS.get(type(layer))
    if layer is None or entry is None or getattr(layer, "padding_mode", "zeros") != "zeros":
        return None
    if getattr(layer, "freeze", False):
        return None
    path = _path(expr.inputs[0])

    def stored(name: str) -> Any:
        value = getattr(layer, name, None)
        if isinstance(value, Tensor) and path is not None:
            shape = tuple(int(n) for n in value.shape)
            return StoredTensor(f"{path}.{name}".lstrip("."), shape, np.dtype(value.dtype))
        return value

    function, read = entry
    arguments = read(layer, stored)
    if any(isinstance(value, Tensor) for value in arguments):
        return None  # a constant of the trace: its parameters are without a path
    options = {}
    if type(layer) in _BATCH_NORMS:
        options = {"training": layer.running_mean is None, "eps": layer.eps}
    return LayerCall(plain(function), (*expr.args[1:], *arguments), options)


def is_call_of_layer(expr: Expr, kind: type) -> bool:
    """Returns whether ``expr`` calls the function of a class of layers on parameters that are stored."""
    entry = LAYERS.get(kind)
    if entry is None or not isinstance(expr, CallFunction) or plain(expr.func) != plain(entry[0]):
        return False
    if kind in _BATCH_NORMS and (expr.kwargs.get("training") or not _has_rank(expr, _BATCH_NORMS[kind])):
        return False
    return all(isinstance(node.expr, GetAttr) for node in expr.inputs[1:])


def _has_rank(expr: Expr, ranks: tuple[int, ...]) -> bool:
    """Returns whether the rank of the first input is one of these, or not recorded."""
    shape = getattr(expr.inputs[0], "shape", None)
    return shape is None or len(shape) in ranks


def without_equal_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a function with one number for equal sizes, and the stride that None means."""
    result = {name: _size(value) if name in _SIZES else value for name, value in values.items()}
    if result.get("stride", 0) is None and "kernel_size" in result:
        result["stride"] = result["kernel_size"]
    for name in ("mode", "conv_mode", "compute_mode"):
        if isinstance(result.get(name), str):
            result[name] = result[name].lower()
    return result


def _size(value: Any) -> Any:
    if (
        isinstance(value, (tuple, list))
        and value
        and all(isinstance(n, int) and n == value[0] for n in value)
    ):
        return value[0]
    return value


def _path(node: Node) -> str | None:
    """The path of an attribute below the graph's module; None for what is no attribute."""
    parts: list[str] = []
    while isinstance(node.expr, GetAttr):
        parts.insert(0, node.expr.name)
        (node,) = node.expr.inputs
    return ".".join(parts) if parts and isinstance(node.expr, Input) else None
