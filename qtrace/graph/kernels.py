"""How MegEngine computes: large tensors without copies, calls at which a kernel ends the process, its engine.

MegEngine copies a tensor by its values, and keeps what was read as an array as long as the tensor lives. A
view of a whole tensor is cheaper: it shares the values, and its array goes with it. A write into either does
not reach the other, since MegEngine writes a new value and never into an old one.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import megengine as mge
import megengine.functional.nn as nn
import megengine.functional.vision as vision
import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core.ops import builtin
from megengine.core.ops.builtin import GetVarShape
from megengine.core.tensor import array_method
from megengine.jit.tracing import is_tracing
from megengine.module import Module
from megengine.traced_module import expr as expressions
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph
from megengine.utils.network_node import VarNode

from qtrace.graph.walk import modules_of

# Copies and reads large tensors without a further copy of their values.

# Bytes of parameters that are held in several copies at once: a large network is gone through in parts of
# this size. A constant, not a share of the free memory: the parts may decide the last bits of values.
PART_BYTES = 64 << 20

STAGE_BYTES = 512 << 20
"""Of values that a stage keeps until others have read them: outputs of layers, or batches that run ahead."""

# Of smaller tensors a copy is as quick, and their roundings are not worth being given back.
_LARGE_BYTES = 2**16
MAX_RANK = int(GetVarShape().axis)  # of MegEngine's tensors: this axis stands for the whole shape
_INPLACE = "MEGENGINE_INPLACE_UPDATE"  # MegEngine's own switch: optimizers write into values then


def count_bytes(node: Node) -> int:
    """Returns the size of a value in float32; 0 for a module, and where the graph records no shape."""
    shape = node.shape if isinstance(node, TensorNode) else None
    return 4 * math.prod(int(n) for n in shape) if shape else 0


def large_reads(graph: InternalGraph) -> dict[Expr, int]:
    """Maps the exprs that read large parameters, and may round them, to the size of these in float32."""
    sizes: dict[Expr, int] = {}
    for expr in graph._exprs:
        size = count_bytes(expr.outputs[0]) if isinstance(expr, GetAttr) else 0
        if size >= _LARGE_BYTES:
            for reader in expr.outputs[0].users:
                sizes[reader] = sizes.get(reader, 0) + size
    return sizes


def read_array(tensor: Tensor) -> np.ndarray:
    """Returns the values of a tensor, which keeps no array of them.

    Args:
        tensor: the tensor; it is not changed.
    """
    array: np.ndarray = (_view(tensor) if _is_large(tensor) else tensor).numpy()
    return array


def stored_tensor(values: np.ndarray, trainable: bool = True) -> Tensor:
    """Returns a new tensor with some values, which keeps no array of them.

    Args:
        values: the values.
        trainable: whether it is a Parameter.
    """
    kind = Parameter if trainable else Tensor
    tensor = kind(values)
    return kind(_view(tensor)) if _is_large(tensor) else tensor


def shared_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor; a large one shares its values with the copy until one of them is written.

    Args:
        tensor: the tensor or parameter; it is not changed.
    """
    if not _is_large(tensor) or os.environ.get(_INPLACE, "0") != "0":
        return copy.deepcopy(tensor)
    return type(tensor)(_view(tensor))


def shared_copies(module: Module) -> dict[int, Any]:
    """Returns a memo for `copy.deepcopy` in which the large tensors of a module are copied already."""
    tensors = (tensor for _, tensor in module.named_tensors())
    return {id(tensor): shared_copy(tensor) for tensor in tensors if _is_large(tensor)}


def holds_large_tensors(value: Any) -> bool:
    """Returns whether ``value`` is a module with tensors that are worth to be shared."""
    return isinstance(value, Module) and any(_is_large(tensor) for _, tensor in value.named_tensors())


def _is_large(tensor: Tensor) -> bool:
    """Returns whether a tensor is large, and a copy needs only its values."""
    dtype = np.dtype(tensor.dtype)
    plain = dtype.kind in "fiub" and dtype.metadata is None and tensor._qparams is None
    return plain and int(np.prod(tensor._tuple_shape, dtype=np.int64)) * dtype.itemsize >= _LARGE_BYTES


def _view(tensor: Tensor) -> Tensor:
    return tensor.detach()[...]


# Calls at which a kernel of MegEngine's ends the process, and how the engine runs a graph.


@contextmanager
def synchronous() -> Iterator[None]:
    """Lets MegEngine run each op at once: kernels raise their errors there, gradients on CPU are right."""
    level, mge.config.async_level = mge.config.async_level, 0
    try:
        yield
    finally:
        mge.config.async_level = level


@contextmanager
def quiet_engine(root: Module) -> Iterator[None]:
    """Makes kernels raise their errors at once, and keeps modules from updating their statistics."""
    training = [m for m in modules_of(root) if m.training]
    for module in training:
        module.training = False
    try:
        with synchronous():
            yield
    finally:
        for module in training:
            module.training = True


# What a wrapper takes over of a C++ function, whose module is None.
_NAMES = ("__name__", "__doc__")

_STRIDES = {
    builtin.Convolution: ("stride_h", "stride_w"),
    builtin.ConvolutionBackwardData: ("stride_h", "stride_w"),
    builtin.Convolution3D: ("stride_d", "stride_h", "stride_w"),
    builtin.Convolution3DBackwardData: ("stride_d", "stride_h", "stride_w"),
    builtin.ConvBias: ("stride_h", "stride_w"),
    builtin.BatchConvBias: ("stride_h", "stride_w"),
    builtin.DeformableConv: ("stride_h", "stride_w"),
    builtin.GroupLocal: ("stride_h", "stride_w"),
    builtin.RegionRestrictedConvolution: ("stride_h", "stride_w"),
    builtin.RegionRestrictedConvolutionBackwardData: ("stride_h", "stride_w"),
    builtin.Pooling: ("stride_h", "stride_w"),
    builtin.Images2Neibs: ("stride_h", "stride_w"),
    builtin.SlidingWindowTranspose: ("stride_h", "stride_w"),
    builtin.Correlation: ("stride1", "stride2"),
}
_INTERPOLATIONS = (builtin.Resize, builtin.Remap, builtin.WarpPerspective)
_FLOOR_DIV, _MOD = builtin.Elemwise.Mode.FLOOR_DIV, builtin.Elemwise.Mode.MOD
_DIVIDING = {"__floordiv__", "__ifloordiv__", "__mod__", "__imod__", "floor_div", "mod"}
_REVERSED = {"__rfloordiv__", "__rmod__"}
# No kernel divides it by -1. MegEngine computes narrower integers in 32 bits, and lacks wider ones.
_LOWEST = np.iinfo(np.int32).min


def refuse_divisions_by_zero() -> None:
    """Makes MegEngine's functions and operators raise a ValueError where their kernel would end the process.

    Those are strides of 0, and adaptive poolings to a size at which the kernel's stride is 0. Others are
    integers over 0, sizes that a reshape divides by 0 to find, and interpolations of a map without pixels. It
    replaces the functions of MegEngine's core that ``F``, the operators of a Tensor and the ops in a traced
    graph call; all these stay as they are. A second call does nothing.
    """
    if hasattr(nn.adaptive_pool2d_cpp, "__wrapped__"):
        return
    pool, reshape, elementwise = nn.adaptive_pool2d_cpp, array_method.reshape_cpp, array_method._elwise_apply

    @functools.wraps(pool, assigned=_NAMES)
    def checked_pool(inp: Any, oshp: Any, mode: Any) -> Any:
        _check_pooled_size(inp, oshp)
        return pool(inp, oshp, mode)

    @functools.wraps(reshape, assigned=_NAMES)
    def checked_reshape(inp: Any, args: Any) -> Any:
        _check_target(args)
        return reshape(inp, args)

    @functools.wraps(elementwise)
    def checked_elementwise(args: Any, mode: Any) -> Any:
        if mode is _FLOOR_DIV or mode is _MOD:
            _check_division(mode, *args)
        return elementwise(args, mode)

    nn.adaptive_pool2d_cpp, array_method.reshape_cpp = checked_pool, checked_reshape
    array_method._elwise_apply = checked_elementwise
    for module in (nn, vision, expressions):
        module.apply = _checked(module.apply)


def _checked(apply: Any) -> Any:
    @functools.wraps(apply, assigned=_NAMES)
    def checked_apply(op: Any, *inputs: Any) -> Any:
        check_op(op, inputs)
        return apply(op, *inputs)

    return checked_apply


def check_op(op: Any, inputs: Sequence[Any]) -> None:
    """Raises a ValueError if ``op``, an op of MegEngine's core, would end the process on ``inputs``."""
    kind = type(op)
    if kind in _STRIDES:
        if not all(getattr(op, name) for name in _STRIDES[kind]):
            strides = tuple(int(getattr(op, name)) for name in _STRIDES[kind])
            raise ValueError(f"{kind.__name__} with the strides {strides}: give strides of 1 or more")
    elif kind is builtin.Elemwise:
        if op.mode is _FLOOR_DIV or op.mode is _MOD:
            _check_division(op.mode, *inputs)
    elif kind is builtin.AdaptivePooling:
        _check_pooled_size(inputs[0], inputs[1] if len(inputs) > 1 else tuple(op.shape))
    elif kind is builtin.Reshape:
        if len(inputs) > 1:
            _check_target(inputs[1:], op.axis)
    elif kind in _INTERPOLATIONS:
        shape = _shape(inputs[0])
        if shape is not None and 0 in shape[1:]:
            raise ValueError(f"interpolation of an empty map of shape {shape}: give one with pixels")


def divisor_of_integers(call: Expr) -> Any:
    """Returns the divisor of a call that divides integers, a node or a value; None for other calls."""
    if isinstance(call, Apply):
        op = call.opdef
        dividing = type(op) is builtin.Elemwise and (op.mode is _FLOOR_DIV or op.mode is _MOD)
        operands: Sequence[Any] = call.inputs if dividing else ()
    elif isinstance(call, CallFunction):
        operands = call.args if call.func.__name__ in _DIVIDING else ()
    elif isinstance(call, CallMethod):
        operands = call.args if call.method in _DIVIDING else ()
        operands = call.args[::-1] if call.method in _REVERSED else operands
    else:
        operands = ()
    if len(operands) != 2:
        return None
    return operands[1] if _is_integer(call.outputs[0]) else None


def _check_division(mode: Any, dividend: Any, divisor: Any) -> None:
    """Raises a ValueError for a division of integers by 0, or of the lowest one by -1."""
    if not (_is_integer(dividend) and _is_integer(divisor)):  # a float over 0 is infinite or NaN
        return
    numbers = _values(divisor)
    if numbers is None or not numbers.size or 0 in (_shape(dividend) or ()):
        return
    sign = "//" if mode is _FLOOR_DIV else "%"
    if not numbers.all():
        raise ValueError(f"a division of integers ({sign}) by 0: keep 0 out of the divisor, or divide floats")
    if (numbers == -1).any():
        over = _values(dividend)
        if over is not None and ((numbers == -1) & (over == _LOWEST)).any():
            raise ValueError(f"a division of {_LOWEST} ({sign}) by -1, which exceeds 32 bits: divide floats")


def _check_target(args: Any, unknown: int | None = None) -> None:
    """Raises a ValueError for a shape with a size to find and one of 0, which its kernel divides by.

    Args:
        args: the sizes, -1 for the one to find.
        unknown: the place of the size to find whose number does not say so.
    """
    sizes = _sizes(args)
    if sizes and unknown is not None and unknown < len(sizes):
        sizes[unknown] = -1
    if sizes and 0 in sizes and -1 in sizes:
        raise ValueError(
            f"a reshape to {tuple(sizes)}, where any size fits the -1 next to 0: give a number in its place"
        )


def _sizes(values: Any) -> list[int] | None:
    """Returns the sizes in a sequence of numbers, tensors and sequences; None where one is not known."""
    sizes: list[int] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            inner = _sizes(value)
        else:
            numbers = _values(value)
            integers = numbers is not None and numbers.dtype.kind in "iu"
            inner = numbers.reshape(-1).tolist() if numbers is not None and integers else None
        if inner is None:
            return None
        sizes += inner
    return sizes


def _is_integer(value: Any) -> bool:
    """Returns whether a tensor, or what an operator makes one of, has integers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return np.asarray(value).dtype.kind in "iub"
    return np.dtype(dtype).kind in "iu"


def _values(value: Any) -> np.ndarray | None:
    """Returns the values of a tensor or number; None where a compiled graph computes them."""
    if isinstance(value, VarNode):  # of a graph without values, except values that only sizes decide
        try:
            return np.asarray(value.numpy())
        except RuntimeError:
            return None
    if isinstance(value, RawTensor):
        return None if is_tracing() else np.asarray(value.numpy())  # what is read there becomes a constant
    return np.asarray(value)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of a tensor; None where it is not known."""
    shape = getattr(value, "_tuple_shape", None) if isinstance(value, RawTensor) else np.shape(value)
    return None if shape is None else tuple(map(int, shape))


def _check_pooled_size(x: Any, size: Any) -> None:
    """Raises a ValueError for a pooled size that is 0, or larger than the size of ``x``.

    MegEngine's stride is the rounded down quotient of both.
    """
    shape, pooled = _shape(x), _pooled_size(size)
    if shape is None or len(shape) != 4 or pooled is None:  # MegEngine itself refuses other numbers of axes
        return
    sizes = shape[2:]
    if any(n < 1 for n in pooled):
        raise ValueError(f"adaptive pooling to {pooled} has an empty result: give a size of 1 or more")
    if any(out > n for out, n in zip(pooled, sizes, strict=True)):
        raise ValueError(
            f"adaptive pooling of an input of {sizes} to the larger {pooled}, which MegEngine cannot "
            "compute: give a larger input there, or enlarge it by F.nn.interpolate"
        )


def _pooled_size(size: Any) -> tuple[int, int] | None:
    """Returns the height and width of the result; None where a compiled graph computes them."""
    sizes = _sizes(size if isinstance(size, (tuple, list)) else (size,))
    if sizes is None or len(sizes) not in (1, 2):
        return None
    return sizes[0], sizes[-1]


refuse_divisions_by_zero()  # whoever runs graphs loads this file
