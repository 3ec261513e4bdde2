"""Infers shapes and dtypes of a graph's tensors from its inputs, without running its kernels.

MegEngine's computing graph deduces the shape of a variable from its op. Each expr is therefore called on
variables of the types of its inputs. Three kinds of ops are computed instead. Ops on sizes decide shapes by
their values. Some ops accept impossible arguments, such as a reshape; most of these only move data. Ops on
scalars look like ops on vectors of one value to a computing graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._imperative_rt.core2 import apply
from megengine.core._imperative_rt.utils import Logger
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.pytree import TreeDef, tree_flatten
from megengine.utils.network import Network
from megengine.utils.network_node import VarNode

from qtrace.errors import ExportError, GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import LAYERS, BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.gradients import plain
from qtrace.graph.failures import describe_failure
from qtrace.graph.kernels import (
    check_op,
    divisor_of_integers,
    holds_large_tensors,
    quiet_engine,
    shared_copies,
    synchronous,
)
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.walk import called_graph, freeze, get_module, owner, reads_shape, updates_inputs

SMALL = 256
"""Entries of a tensor that holds sizes, paddings or bounds: such a tensor counts by its values."""
# Functions, methods and layers whose arguments the deduction of shapes does not check.
_COMPUTED = {
    *(
        "reshape",
        "flatten",
        "Reshape",
        "__getitem__",
        "split",
        "Split",
        "broadcast_to",
        "Broadcast",
        "expand_dims",
    ),
    *("squeeze", "layer_norm", "group_norm", "instance_norm", "general_norm", "LayerNorm", "GroupNorm"),
    *("InstanceNorm", "GeneralNorm", "softmax", "Softmax"),
}
# Ops whose number of results depends on the values of their inputs.
_SIZED_BY_VALUES = {"cond_take", "nms", "non_zero", "CondTake", "NMSKeep", "NonZero"}
# Ops whose result has the same shape for all values of their integer and boolean inputs, like the operators
# of Python (`_is_operator`) and the functions of the module `_ELEMENTWISE`.
_ELEMENTWISE = "megengine.functional.elemwise"
_SIZED_BY_SHAPES = {
    *("Elemwise", "TypeCvt", "astype", "gather", "where", "sum", "prod", "mean", "max", "min", "cumsum"),
    *("argmax", "argmin", "sort", "argsort", "transpose", "concat", "stack", "flatten", "copy"),
    *("zeros_like", "ones_like", "full_like"),
}
_NO_OPERATORS = {"__getitem__", "__setitem__", "__call__", "__new__"}
# Layers whose forward in eval mode changes none of their attributes.
_STATELESS = (
    "qtrace.graph.recurrent",
    *(
        f"megengine.module.{name}"
        for name in (
            *("activation", "adaptive_pooling", "batch_matmul_activation", "batchnorm", "concat", "conv"),
            *("deformable", "dropout", "elemwise", "embedding", "identity", "linear", "lrn", "multiheadattn"),
            *("normalization", "padding", "pixel_shuffle", "pooling", "rnn", "sequential"),
            "sliding_window",
        )
    ),
)


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor whose values are not known.

    Attributes:
        shape: the shape.
        dtype: a dtype of MegEngine's.
    """

    shape: tuple[int, ...]
    dtype: Any


class OpError(GraphError):
    """An op cannot run on tensors of the types that it reads."""


def recorded_type(node: Node) -> TensorType | None:
    """Returns the type that ``node`` records; None for a module, and where the shape is unknown."""
    if not isinstance(node, TensorNode) or node._shape is None or node._dtype is None:
        return None
    return TensorType(tuple(int(n) for n in node._shape), node._dtype)


class TypeInference:
    """Infers the values of nodes as far as they decide shapes.

    The value of a node is a Module, a Tensor where every input of the graph gives these values, or a
    `TensorType`. It is None where values of the inputs decide the shape.

    Args:
        traced: a traced module; it is not changed.
        anew: whether `value` infers the types of all nodes, since the recorded ones may not be true.

    Attributes:
        values: the values of the nodes so far; `value` adds to them.
    """

    def __init__(self, traced: TracedModule, anew: bool = False) -> None:
        self.traced = traced
        self.anew = anew
        self.values: dict[Node, Any] = {}
        self._network = Network()
        self._known: dict[Hashable, tuple[list[Any] | None, TreeDef | None]] = {}
        self._arguments: dict[Hashable, int] = {}
        self._last: tuple[Expr | None, int | None] = None, None

    def value(self, node: Node) -> Any:
        """Returns the value of ``node``, from what the nodes before it record.

        Raises:
            OpError: when an op on which ``node`` depends, such as one on sizes, cannot run.
        """
        pending = [node]
        while pending:
            current = pending[-1]
            expr = current.expr
            if current in self.values:
                pending.pop()
            elif current is self.traced.graph._inputs[0]:
                self.values[current] = self.traced
            elif isinstance(expr, Constant) or (expr.inputs and self._is_inferred(current)):
                missing = [n for n in expr.inputs if n not in self.values]
                pending.extend(missing)
                if not missing:
                    results = self.results(expr, [self.values[n] for n in expr.inputs])
                    for output, result in zip(expr.outputs, results, strict=True):
                        self.values[output] = recorded_type(output) if result is None else result
            else:
                self.values[current] = recorded_type(current)
        return self.values[node]

    def _is_inferred(self, node: Node) -> bool:
        return self.anew or isinstance(node.expr, GetAttr) or _is_integer(node)

    def results(self, expr: Expr, inputs: Sequence[Any]) -> list[Any]:
        """Returns the values of the outputs of ``expr`` for the values of its inputs.

        Raises:
            OpError: when the op cannot run, or has another number of results.
        """
        leaves = self.call(expr, inputs)[0]
        if leaves is None:
            return [None] * len(expr.outputs)
        if len(leaves) != len(expr.outputs):
            error = ValueError(f"it has {len(leaves)} results, and the graph {len(expr.outputs)} nodes")
            raise OpError(describe_failure(expr, inputs, error))
        return leaves

    def call(self, expr: Expr, inputs: Sequence[Any]) -> tuple[list[Any] | None, TreeDef | None]:
        """Returns the values of the results of ``expr`` and their structure; None where they are unknown.

        Raises:
            OpError: when the op cannot run.
        """
        if isinstance(expr, Constant):
            return [summarize(expr.value)], None
        if any(value is None for value in inputs) or _is_random(expr):
            return None, None
        if isinstance(expr, GetAttr):
            return [summarize(get_module(inputs[0], expr.name))], None
        if isinstance(owner(expr), (FakeQuant, BiasQuant, DynamicQuant)):
            return [inputs[1]], None
        if inputs and isinstance(inputs[0], OpaqueOp):  # its node is still without an owner
            return _opaque_types(inputs), None
        graph = called_graph(expr)
        if graph is not None:
            return self.run_graph(graph, list(inputs)), None
        if expr.outputs and isinstance(expr, CallMethod) and expr.method == "__setitem__":
            return [inputs[0]], None
        key = self._call_key(expr, inputs)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return known
        try:
            deduced = self._deduced(expr, inputs)
        except Exception as error:  # MegEngine's errors are of no class of their own
            raise OpError(describe_failure(expr, inputs, error)) from error
        if key is not None:
            self._known[key] = deduced
        return deduced

    def _call_key(self, expr: Expr, inputs: Sequence[Any]) -> Hashable | None:
        """Returns a key that calls on types share whose results have equal types; None for other calls."""
        if not inputs or not all(isinstance(value, TensorType) and _is_plain(value) for value in inputs):
            return None
        if self._last[0] is not expr:  # it is called again for other sizes of open axes
            try:
                key = _argument_key(expr)
            except TypeError:  # an argument without a value to compare
                key = None
            number = None if key is None else self._arguments.setdefault(key, len(self._arguments))
            self._last = expr, number
        if self._last[1] is None:
            return None
        return self._last[1], tuple((value.shape, np.dtype(value.dtype)) for value in inputs)

    def run_graph(self, graph: Any, inputs: list[Any]) -> list[Any]:
        """Returns the values of the outputs of ``graph``, of a submodule, for the values of its inputs."""
        values: dict[Node, Any] = dict(zip(graph._inputs, inputs, strict=True))
        for expr in graph._exprs:
            results = self.results(expr, [values[n] for n in expr.inputs])
            values.update(zip(expr.outputs, results, strict=True))
        return [values[node] for node in graph._outputs]

    def _deduced(self, expr: Expr, inputs: Sequence[Any]) -> tuple[list[Any] | None, TreeDef | None]:
        if isinstance(fold := owner(expr), BnFold):
            return [self._layer_type(expr, fold, inputs)], None
        types = [value for value in inputs if isinstance(value, TensorType)]
        if types and not reads_shape(expr) and _op_name(expr) not in _COMPUTED and all(map(_is_plain, types)):
            try:
                with _silent_log():
                    leaves, structure = _call(expr, [_variable(value, self._network) for value in inputs])
                values = [_deduced_value(leaf) for leaf in leaves]
                if all(value is None or value.shape != (1,) for value in values):
                    return values, structure
            except Exception:  # an op that takes Tensors only, or one that cannot run: zeros show which
                pass
        if not _zeros_show_shapes(expr, inputs):
            return None, None
        fill = zeros if divisor_of_integers(expr) is None else _ones
        leaves, structure = _call(expr, [fill(v) if isinstance(v, TensorType) else v for v in inputs])
        exact = not types or reads_shape(expr)
        return [summarize(leaf) if exact else type_of(leaf) for leaf in leaves], structure

    def _layer_type(self, expr: Expr, fold: BnFold, inputs: Sequence[Any]) -> Any:
        """Returns the type of a `BnFold`'s result by its layer, since a call updates statistics."""
        args = expr.unflatten_args([_as_variable(value, self._network) for value in inputs])[0]
        x, weight, bias = args[1:4]
        with _silent_log():
            return _deduced_value(LAYERS[fold.kind](x, weight, bias, **fold.options))


def _variable(value: Any, network: Network) -> Any:
    """Returns a variable of a type, and a copy of a module whose large weights are variables.

    A network keeps the values of the weights of each module that was called in it.
    """
    if isinstance(value, TensorType):
        return network.make_input_node(value.shape, np.dtype(value.dtype), name="")
    if not holds_large_tensors(value):
        return value
    large = shared_copies(value).items()
    variables = {
        key: network.make_input_node(tensor._tuple_shape, np.dtype(tensor.dtype), name="")
        for key, tensor in large
    }
    return copy.deepcopy(value, variables)


def _as_variable(value: Any, network: Network) -> Any:
    """Returns a variable of the type of a tensor, and anything else as it is."""
    kind = value if isinstance(value, TensorType) else type_of(value)
    return value if kind is None else _variable(kind, network)


def _opaque_types(inputs: Sequence[Any]) -> list[Any] | None:
    """Returns the types of the results of an opaque node; None where onnxruntime is not installed."""
    op, *values = inputs
    try:
        known = {i: value.numpy() for i, value in enumerate(values) if isinstance(value, RawTensor)}
        kinds = op.infer([value.shape for value in values], known)
    except ExportError:
        return None
    return [None if shape is None else TensorType(shape, dtype) for shape, dtype in kinds]


def _call(expr: Expr, values: Sequence[Any]) -> tuple[list[Any], TreeDef]:
    """Calls the op of ``expr``; returns the leaves and the structure of its result."""
    module = owner(expr)
    with synchronous():
        if isinstance(expr, Apply):
            check_op(expr.opdef, values)
            result: Any = tuple(apply(expr.opdef, *values))
        elif module is not None:
            if not type(module).__module__.startswith(_STATELESS):  # its forward may change its attributes
                values = [copy.deepcopy(v) if isinstance(v, Module) else v for v in values]
            with quiet_engine(values[0]):
                args, kwargs = expr.unflatten_args(values)
                result = args[0](*args[1:], **kwargs)
        else:
            if updates_inputs(expr):
                values = [F.copy(v) if isinstance(v, RawTensor) else v for v in values]
            args, kwargs = expr.unflatten_args(values)
            _check_rows(expr, args)
            bound = isinstance(expr, CallMethod) and not isinstance(args[0], type)  # Tensor.__new__ is not
            result = _callee(expr, args)(*args[bound:], **kwargs)
            if isinstance(expr, CallMethod) and expr.method == "__setitem__":
                result = args[0]
    leaves, structure = tree_flatten(result, is_leaf=lambda leaf: isinstance(leaf, (RawTensor, VarNode)))
    return list(leaves), structure


def _argument_key(expr: Expr) -> Hashable | None:
    """Returns a key of what ``expr`` calls and with which arguments; None without one.

    Only MegEngine's functions and methods have one: layers and stored values differ from call to call, and a
    function of the user's own may have a state.
    """
    if not isinstance(expr, (CallFunction, CallMethod)):
        return None
    op = plain(expr.func) if isinstance(expr, CallFunction) else str(expr.method)
    if isinstance(expr, CallFunction) and not str(op.__module__).startswith("megengine."):
        return None
    places = {node: place for place, node in enumerate(expr.inputs)}
    key = op, tuple(places[n] for n in expr.inputs), expr.arg_def, freeze(expr.const_val, places.__getitem__)
    hash(key)
    return key


def _zeros_show_shapes(expr: Expr, inputs: Sequence[Any]) -> bool:
    """Returns whether zeros in the place of the activations give the results of ``expr`` their true shapes.

    Args:
        expr: a call.
        inputs: the values that ``expr`` reads; a `TensorType` stands for an activation.
    """
    zeros = [value for value in inputs if isinstance(value, TensorType)]
    name = _op_name(expr)
    if name in _SIZED_BY_VALUES and zeros:
        return False
    if name in _SIZED_BY_SHAPES or _is_operator(expr) or reads_shape(expr):
        return True
    if isinstance(expr, CallFunction) and plain(expr.func).__module__ == _ELEMENTWISE:
        return True
    if name == "__getitem__" and _picks_by_places(expr):
        return True
    tensors = [value for value in inputs if not isinstance(value, Module)]
    if name in _COMPUTED and tensors and isinstance(tensors[0], TensorType):
        zeros = zeros[1:]  # what is moved; the integers after it are sizes and places
    return not any(np.dtype(kind.dtype).kind in "iub" for kind in zeros)


def _picks_by_places(expr: Expr) -> bool:
    """Returns whether ``expr`` is an index only by tensors of integers, whose values decide no shape."""
    index = expr.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    ends = [end for part in parts if isinstance(part, slice) for end in (part.start, part.stop, part.step)]
    tensors = [part for part in parts if isinstance(part, TensorNode)]
    whole = all(part.dtype is not None and np.dtype(part.dtype).kind in "iu" for part in tensors)
    return bool(tensors) and whole and not any(isinstance(end, TensorNode) for end in ends)


def _check_rows(expr: Expr, args: Sequence[Any]) -> None:
    """Refuses rows that a table lacks, as of positions beyond its end: the kernel prints what it raises.

    Raises:
        IndexError: when there is no such row.
    """
    if _op_name(expr) != "__getitem__" or not isinstance(args[0], RawTensor) or not args[0].ndim:
        return
    index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    if not isinstance(index, RawTensor) or np.dtype(index.dtype).kind not in "iu" or 0 in index.shape:
        return
    rows, places = int(args[0].shape[0]), index.numpy()
    if places.max() >= rows or places.min() < -rows:
        raise IndexError(f"place {int(places.max())} of {rows} rows")


def _is_operator(expr: Expr) -> bool:
    """Returns whether ``expr`` is an operator of Python between values, such as ``x < y``."""
    return isinstance(expr, CallMethod) and expr.method.startswith("__") and expr.method not in _NO_OPERATORS


def _callee(expr: Expr, args: Sequence[Any]) -> Callable[..., Any]:
    function: Callable[..., Any]
    function = plain(expr.func) if isinstance(expr, CallFunction) else getattr(args[0], expr.method)
    return function


def _deduced_value(leaf: Any) -> Any:
    if isinstance(leaf, VarNode):
        shape = leaf.shape
        return None if shape is None else TensorType(tuple(int(n) for n in shape), leaf.dtype)
    # A tensor that holds a variable, as detach gives it, has a type and no value.
    return type_of(leaf) if isinstance(leaf, RawTensor) else summarize(leaf)


def summarize(value: Any) -> Any:
    """Returns the value of a stored tensor or module; a large float tensor counts by its type."""
    if not isinstance(value, RawTensor):
        return value if isinstance(value, (Module, TensorType)) else None
    small = int(np.prod(value.shape)) <= SMALL
    return value if small or np.dtype(value.dtype).kind in "iub" else type_of(value)


def type_of(value: Any) -> TensorType | None:
    """Returns the type of a tensor; None for anything else."""
    if not isinstance(value, RawTensor):
        return None
    return TensorType(tuple(int(n) for n in value.shape), value.dtype)


def zeros(kind: TensorType) -> mge.Tensor:
    """Returns a tensor of zeros, which takes no memory if it is of float32."""
    dtype = np.dtype(kind.dtype)
    if _is_plain(kind) and dtype == np.float32:
        return F.broadcast_to(mge.Tensor(np.float32(0)), kind.shape)  # takes no memory
    if dtype.metadata is None:
        return mge.Tensor(np.zeros(kind.shape, dtype))
    return mge.Tensor(np.zeros(kind.shape, np.float32)).astype(kind.dtype)


def _ones(kind: TensorType) -> mge.Tensor:
    return mge.Tensor(np.ones(kind.shape, np.dtype(kind.dtype)))


def _is_plain(kind: TensorType) -> bool:
    """Returns whether a variable of a computing graph can stand for a tensor of this type."""
    return 0 not in kind.shape and len(kind.shape) > 0 and np.dtype(kind.dtype).metadata is None


def _is_random(expr: Expr) -> bool:
    return isinstance(expr, Apply) and type(expr.opdef).__name__.endswith("RNG")


def _is_integer(node: Node) -> bool:
    return isinstance(node, TensorNode) and node._dtype is not None and np.dtype(node._dtype).kind in "iub"


def _op_name(expr: Expr) -> str:
    module = owner(expr)
    if module is not None:
        return type(module).__name__
    if isinstance(expr, CallFunction):
        return str(expr.func.__name__)
    return type(expr.opdef).__name__ if isinstance(expr, Apply) else str(expr.method)


@contextmanager
def _silent_log() -> Iterator[None]:
    """Drops the warnings with which MegEngine comments on some variables of a computing graph."""
    level = Logger.set_log_level(Logger.LogLevel.Error)
    try:
        yield
    finally:
        Logger.set_log_level(level)
