"""Reads an expr as the operation that it computes, whichever spelling its call has.

``M.Conv2d`` and ``F.conv2d``, ``M.Sigmoid`` and ``F.sigmoid`` are two spellings of one operation.

``x + 3``, ``F.add(x, 3)``, ``x.__iadd__(3)`` and the kernel ADD call one function, `F.add`; so do
``x.reshape(2, -1)`` and ``F.reshape(x, (2, -1))`` call `F.reshape`. Patterns of calls ask
`canonical_call` for that function and its arguments; patterns of formulas ask `read_operation` for a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Parameter, Tensor

from qtrace.gradients import plain
from qtrace.graph import functions
from qtrace.graph.types import (
    Apply,
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    Input,
    Node,
    TensorNode,
    is_call_module,
)
from qtrace.graph.walk import get_module, op_label, owner, signature

# Calls of MegEngine's layers read as the calls of the functions that their ``forward`` makes.


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


_BINARY = {
    **{"add": F.add, "sub": F.sub, "mul": F.mul, "truediv": F.div, "floordiv": F.floor_div},
    **{"mod": F.mod, "pow": F.pow, "matmul": F.matmul},
    **{"and": F.logical_and, "or": F.logical_or, "xor": F.logical_xor},
    **{"lshift": F.left_shift, "rshift": F.right_shift},
}
_REVERSED = {f"__r{name}__": function for name, function in _BINARY.items()}
METHODS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": function for name, function in _BINARY.items()},
    **{f"__i{name}__": function for name, function in _BINARY.items()},
    **_REVERSED,
    **{"__neg__": F.neg, "__abs__": F.abs, "__floor__": F.floor, "__ceil__": F.ceil, "__round__": F.round},
    **{"__lt__": F.less, "__le__": F.less_equal, "__gt__": F.greater, "__ge__": F.greater_equal},
    **{"__eq__": F.equal, "__ne__": F.not_equal, "__invert__": F.logical_not},
    **{"reshape": F.reshape, "transpose": F.transpose, "_broadcast": F.broadcast_to, "flatten": F.flatten},
    **{"sum": F.sum, "mean": F.mean, "prod": F.prod, "max": F.max, "min": F.min, "var": F.var},
}
"""Method of a tensor -> the function that computes the same from the same arguments."""
_WITH_OPEN_TUPLE = ("reshape", "transpose", "_broadcast")  # x.reshape(2, -1) is F.reshape(x, (2, -1))
_COMMUTATIVE = (F.add, F.mul, F.maximum, F.minimum, F.equal, F.not_equal)
# Function, or method that no function equals -> kind of the operation.
_KINDS: dict[Any, str] = {
    **{f: f.__name__ for f in (F.add, F.sub, F.mul, F.div, F.pow, F.matmul, F.maximum, F.minimum, F.neg)},
    **{f: f.__name__ for f in (F.square, F.sqrt, F.exp, F.log, F.log1p, F.abs, F.clip, functions.erf)},
    **{f: f.__name__ for f in (F.relu, F.relu6, F.sigmoid, F.hsigmoid, F.tanh, F.softplus, F.softmax)},
    **{f: f.__name__ for f in (functions.hard_sigmoid, F.mean, F.sum, F.max, F.norm, F.var, F.concat)},
    **{f: f.__name__ for f in (F.reshape, F.transpose, F.swapaxes, F.squeeze, F.broadcast_to)},
    **{F.nn.instance_norm: "instance_norm", "__getitem__": "getitem"},
}
_SAME_NAMES = (
    "add sub mul pow floor_div mod relu relu6 sigmoid hsigmoid tanh silu gelu softplus logsigmoid prelu clip "
    "exp expm1 log log1p sqrt square abs floor ceil round sign sin cos tan asin isnan isinf"
)
KERNELS: dict[str, Callable[..., Any]] = {
    **{name.upper(): getattr(F, name) for name in _SAME_NAMES.split()},
    **{"NEGATE": F.neg, "TRUE_DIV": F.div, "MAX": F.maximum, "MIN": F.minimum, "H_SWISH": F.hswish},
    **{"LT": F.less, "LEQ": F.less_equal, "EQ": F.equal, "NEQ": F.not_equal, "ERF": functions.erf},
    **{"AND": F.logical_and, "OR": F.logical_or, "XOR": F.logical_xor, "NOT": F.logical_not},
    **{"SHL": F.left_shift, "SHR": F.right_shift},
}
"""Mode of the elementwise kernel -> the function that computes the same. F.greater and F.greater_equal are
LT and LEQ with the operands exchanged."""
# Number of leading arguments that are operands, where it is not 1.
_OPERANDS = {
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "matmul", "maximum", "minimum"), 2),
    "clip": 3,
}
_COMMUTATIVE_KINDS = ("add", "mul", "maximum", "minimum")
# Kind of a call -> the kinds of the operations as which it may be read, where these are others.
_READINGS = {"relu6": ("clip",), "clip": ("clip", "maximum", "minimum"), "swapaxes": ("transpose",)}


@dataclass(frozen=True)
class CanonicalOp:
    """A function, method or kernel; equal for all spellings of its call.

    Attributes:
        key: the function, or the name of a Tensor method or kernel that no function equals.
        text: the operation as source code has it, for messages.
    """

    key: Any
    text: str

    @property
    def commutative(self) -> bool:
        """Whether both orders of the two operands give the same."""
        return any(self.key is function for function in _COMMUTATIVE)

    def is_called_by(self, expr: Expr) -> bool:
        """Returns whether ``expr`` calls the operation in any spelling."""
        call = canonical_call(expr, layers=True)
        return call is not None and call.op == self


@dataclass(frozen=True)
class CanonicalCall:
    """A call of an operation.

    Attributes:
        op: the operation.
        values: the arguments in the order of the operation's function, defaults included: by parameter name,
            or by position if there is no signature.
    """

    op: CanonicalOp
    values: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The nodes and constants of the arguments in order, with containers and slices opened."""
        return _open(*self.values.values())


@dataclass(frozen=True)
class OperandForm:
    """An operation.

    Attributes:
        kind: name of the operation.
        operands: nodes and numbers in the order of the operation; a reversed operator is turned round.
        settings: the other arguments by the names that MegEngine's function gives them.
    """

    kind: str
    operands: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


def canonical_call(expr: Expr, layers: bool = False) -> CanonicalCall | None:
    """Reads ``expr`` as a call of an operation; None for what is no call.

    Args:
        expr: any expr.
        layers: whether a call of a layer is read as the call of its function; else it gives None.
    """
    layer = read_layer(expr) if layers else None
    if layer is not None:
        op = CanonicalOp(layer.function, f"F.{layer.function.__name__}")
        return CanonicalCall(op, _bind(layer.function, layer.args, dict(layer.options)))
    if isinstance(expr, Apply):
        args, kwargs = tuple(expr.inputs), {}
    elif isinstance(expr, CallFunction) or (isinstance(expr, CallMethod) and not is_call_module(expr)):
        args, kwargs = expr.args, expr.kwargs
    else:
        return None
    called = _called(expr)
    if isinstance(expr, CallMethod):
        if expr.method in _REVERSED:
            args = args[::-1]
        elif expr.method in _WITH_OPEN_TUPLE:
            sizes = args[1:]
            is_tuple = len(sizes) == 1 and not isinstance(sizes[0], (int, TensorNode))
            args = (args[0], sizes[0] if is_tuple else sizes)
    if not isinstance(called, str):
        text = op_label(expr) if isinstance(expr, CallFunction) else f"F.{called.__name__}"
        return CanonicalCall(CanonicalOp(called, text), _bind(called, args, kwargs))
    if isinstance(expr, Apply):
        op = CanonicalOp((called, _properties(expr.opdef)), called)
    else:
        # The structure is part of the operation: x[:] and x[None, None, None] have equal constants.
        op = CanonicalOp((called, str(_structure(args))), f"Tensor.{called}")
    return CanonicalCall(op, _by_position(args, kwargs))


def _called(expr: Expr) -> Any:
    """Returns the function that ``expr`` calls, or the name of a method or kernel that no function equals."""
    if isinstance(expr, Apply):
        return KERNELS.get(str(expr.opdef), type(expr.opdef).__name__)
    if isinstance(expr, CallFunction):
        return plain(expr.func)
    return METHODS.get(expr.method, expr.method)


def _bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    try:
        bound = signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # built in: it lacks a signature
        return _by_position(args, kwargs)
    bound.apply_defaults()
    return without_equal_sizes(bound.arguments)


def _by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{str(i): value for i, value in enumerate(args)}, **dict(sorted(kwargs.items()))}


def canonical_arguments(expr: Expr) -> list[Any]:
    """Returns the arguments of ``expr``, a call of an operation or layer, as `CanonicalCall` has them."""
    call = canonical_call(expr, layers=True)
    return [] if call is None else list(call.arguments)


def _open(*values: Any) -> tuple[Any, ...]:
    """Returns the nodes and constants in nested containers and slices, in order."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            leaves += _open(*value)
        elif isinstance(value, dict):
            leaves += _open(*(v for _, v in sorted(value.items())))
        elif isinstance(value, slice):
            leaves += [value.start, value.stop, value.step]
        else:
            leaves.append(value)
    return tuple(leaves)


def _structure(value: Any) -> Any:
    """Returns nested containers without their leaves."""
    if isinstance(value, (tuple, list)):
        return [_structure(v) for v in value]
    return type(value).__name__ if isinstance(value, slice) else "value"


def _properties(opdef: Any) -> str:
    """Returns the attributes of a kernel as text; they compare equal for equal kernels."""
    names = (name for name in dir(opdef) if not name.startswith("_") and name not in ("scope", "name"))
    values = {name: getattr(opdef, name) for name in names}
    return str({name: str(value) for name, value in values.items() if not callable(value)})


def possible_kinds(expr: Expr) -> tuple[str, ...]:
    """Returns the kinds of operations as which `read_operation` may read ``expr``, without its arguments."""
    kind = _kind(expr)
    return () if kind is None else _READINGS.get(kind, (kind,))


def _kind(expr: Expr) -> str | None:
    if not isinstance(expr, (Apply, CallFunction, CallMethod)):
        return None
    layer = LAYERS.get(type(owner(expr)))
    return _KINDS.get(_called(expr) if layer is None else layer[0])


def read_operation(value: Any) -> OperandForm | None:
    """Reads the expr that produces ``value``; None for a number, and for an op that is not in the tables."""
    expr = value.expr if isinstance(value, TensorNode) else None
    kind = None if expr is None else _kind(expr)
    if expr is None or kind is None:
        return None
    module = owner(expr)
    if module is not None:
        return OperandForm(kind, tuple(expr.args[1:]), vars(module))
    call = canonical_call(expr)
    assert call is not None
    settings = dict(call.values)
    operands = tuple(settings.pop(name) for name in list(settings)[: _OPERANDS.get(kind, 1)])
    if kind == "concat":
        return (
            OperandForm(kind, tuple(operands[0]), settings)
            if isinstance(operands[0], (tuple, list))
            else None
        )
    if kind == "swapaxes":
        order = list(range(len(operands[0].shape)))
        one, other = settings["axis1"], settings["axis2"]
        order[one], order[other] = order[other], order[one]
        return OperandForm("transpose", operands, {"pattern": tuple(order)})
    if kind == "clip" and None in operands:
        x, lower, upper = operands
        kind, operands = ("minimum", (x, upper)) if lower is None else ("maximum", (x, lower))
    return _ordered(OperandForm(kind, operands, settings))


def _ordered(operation: OperandForm) -> OperandForm:
    """Moves the constant operand of a commutative operation after the other."""
    if operation.kind == "relu6":
        return OperandForm("clip", (*operation.operands, 0.0, 6.0))
    if operation.kind in _COMMUTATIVE_KINDS and stored_number(operation.operands[0]) is not None:
        return OperandForm(operation.kind, operation.operands[::-1], operation.settings)
    return operation


def is_stored(value: Any) -> bool:
    """Returns whether ``value`` is a node that holds a parameter, a buffer or a constant of the trace."""
    return isinstance(value, TensorNode) and isinstance(value.expr, (GetAttr, Constant))


def numbers_of(value: Any) -> np.ndarray | None:
    """Returns the array of a number or a stored tensor; None for a computed node and for other arguments."""
    if is_stored(value):
        expr = value.expr
        value = get_module(expr.inputs[0].owner, expr.name) if isinstance(expr, GetAttr) else expr.value
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, (bool, Node)) or not isinstance(value, (int, float, np.ndarray, np.number)):
        return None
    return np.asarray(value)


def stored_number(value: Any) -> float | None:
    """Returns the number that ``value`` is: a number, or a stored tensor with one entry.

    A Parameter of 1 or 0 is no constant: these are values with which training of a factor or a summand
    begins, and a rewrite would end its training.
    """
    if is_stored(value) and int(np.prod([int(n) for n in value.shape or ()])) != 1:
        return None
    array = numbers_of(value)
    if array is None or array.size != 1 or array.dtype.kind not in "iuf":
        return None
    number = float(array.reshape(()))
    if number in (0.0, 1.0) and _is_parameter(value):
        return None
    return number


class OperationReader:
    """Reads each node once as an operation or a number, as `read_operation` and `stored_number` do.

    What was read is true until an expr changes: then call ``clear``.
    """

    def __init__(self) -> None:
        self._operations: dict[Node, OperandForm | None] = {}
        self._numbers: dict[Node, float | None] = {}
        self._kinds: dict[Expr, tuple[str, ...]] = {}

    def kinds(self, exprs: Sequence[Expr]) -> Mapping[Expr, tuple[str, ...]]:
        """Returns the possible kinds of all exprs of a graph; see `possible_kinds`."""
        if not self._kinds:
            self._kinds = {expr: possible_kinds(expr) for expr in exprs}
        return self._kinds

    def operation(self, value: Any) -> OperandForm | None:
        """Reads the expr that produces ``value``; see `read_operation`."""
        if not isinstance(value, TensorNode):
            return None
        if value not in self._operations:
            self._operations[value] = read_operation(value)
        return self._operations[value]

    def number(self, value: Any) -> float | None:
        """Returns the number that ``value`` is; see `stored_number`."""
        if not isinstance(value, TensorNode):
            return stored_number(value)
        if value not in self._numbers:
            self._numbers[value] = stored_number(value)
        return self._numbers[value]

    def clear(self) -> None:
        """Forgets everything."""
        self._operations.clear()
        self._numbers.clear()
        self._kinds = {}


def _is_parameter(value: Any) -> bool:
    expr = getattr(value, "expr", None)
    return isinstance(expr, GetAttr) and isinstance(get_module(expr.inputs[0].owner, expr.name), Parameter)
