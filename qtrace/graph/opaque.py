"""Opaque nodes: what a traced graph keeps of an ONNX file as it is there, and onnxruntime runs.

An `OpaqueOp` is a leaf of the graph that holds only data: the nodes of the file, with their constants, as a
small ONNX model. It computes in float, no gradient passes through it, and the ONNX export copies its nodes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import megengine as mge
import numpy as np
from megengine.core._imperative_rt.core2 import get_grad_key, is_tracing_module
from megengine.jit.tracing import is_tracing
from megengine.module import Module
from megengine.traced_module import TracedModule, register_as_builtin
from megengine.traced_module.expr import Apply, Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode

from qtrace.errors import ExportError, GraphError, QtraceWarning
from qtrace.graph.kernels import divisor_of_integers
from qtrace.graph.walk import exprs, get_module, owner, reads_shape
from qtrace.onnxfile.fragment import Fragment, operators_of
from qtrace.onnxfile.selecting import Replayed, SelectingFragment, selecting_nodes, selects_inside

_INT32 = np.iinfo(np.int32)
_CARRIED = {
    **dict.fromkeys(("float32", "float16", "float64"), np.dtype(np.float32)),
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), np.dtype(np.int32)),
    **{name: np.dtype(name) for name in ("bool", "int8", "uint8", "int16")},
    "uint16": np.dtype(np.int32),
}


def carried_dtype(dtype: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """Returns the dtype in which MegEngine carries tensors of ``dtype``; None if it lacks such tensors."""
    return None if dtype is None else _CARRIED.get(dtype.name)


class OpaqueOp(Module):
    """Nodes of an ONNX file, run by onnxruntime on CPU.

    Args:
        model: a serialized ONNX model with these nodes and their constants, functions and opset imports.
        for_open_axes: whether MegEngine has a form of these nodes for fixed sizes.

    Attributes:
        model: that model.
        for_open_axes: see above.
    """

    for_open_axes = False  # of files that were saved without it

    def __init__(self, model: bytes, for_open_axes: bool = False) -> None:
        super().__init__()
        self.model = model
        self.for_open_axes = for_open_axes

    @property
    def fragment(self) -> Fragment:
        """The model, opened."""
        if self not in _OPENED:
            _OPENED[self] = Fragment(self.model)
        return _OPENED[self]

    @property
    def operators(self) -> str:
        """The kinds of the nodes, with their domain unless it is ONNX's own."""
        return operators_of(self.fragment.model)

    @property
    def selects_inside(self) -> bool:
        """Whether the body of a loop or a function of the nodes selects, where no run tells its places."""
        return selects_inside(self.fragment.model)

    @property
    def selecting(self) -> SelectingFragment | None:
        """The fragment with the places that its nodes pick; None if none selects."""
        if self not in _SELECTING:
            model = self.fragment.model
            _SELECTING[self] = SelectingFragment(model) if selecting_nodes(model) else None
        return _SELECTING[self]

    def places(self, *inputs: mge.Tensor) -> np.ndarray:
        """Returns the places that the nodes pick by these values, one a row; see `SelectingFragment`."""
        assert self.selecting is not None
        with self._located():
            return self.selecting.places(self._arrays(inputs))

    def replay(self, places: np.ndarray, *inputs: mge.Tensor) -> tuple[tuple[mge.Tensor, ...], Replayed]:
        """Computes the outputs for the places of another run.

        Returns:
            The outputs, and what `SelectingFragment.replay` gives.
        """
        assert self.selecting is not None
        with self._located():
            replayed = self.selecting.replay(self._arrays(inputs), places)
        return self._tensors(replayed.outputs), replayed

    def forward(self, *inputs: mge.Tensor) -> Any:
        """Computes the outputs: a tensor, or a tuple of several.

        A gradient that is recorded for an input ends here, of which the first such call warns.

        Raises:
            GraphError: when onnxruntime refuses the values, or under ``jit.trace``, which would keep the
                results of one call for all.
        """
        if is_tracing() and not is_tracing_module():
            cure = f"run the module without jit.trace{f'; {_CURE}' if self.for_open_axes else ''}"
            raise GraphError(
                f"{self.operators} is run by onnxruntime, which jit.trace cannot capture: {cure}."
            )
        if get_grad_key(inputs) is not None and self.say_once():
            name = getattr(self, "_name", None) or self.operators
            sentence = _stopped_sentence(str(name), _CURE if self.for_open_axes else "")
            warnings.warn(sentence, QtraceWarning, stacklevel=_level_of_caller())
        with self._located():
            results = self.fragment.run(self._arrays(inputs))
        tensors = self._tensors(results)
        return tensors[0] if len(tensors) == 1 else tensors

    def say_once(self) -> bool:
        """Returns whether nobody has said yet that a gradient stops here, and notes that it is said now."""
        said = self in _SAID
        _SAID.add(self)
        return not said

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        """Says of an error which nodes have it."""
        try:
            yield
        except ExportError as error:
            raise GraphError(f"{self.operators}: {error}") from error

    def _arrays(self, inputs: Sequence[mge.Tensor]) -> list[np.ndarray]:
        dtypes = self.fragment.input_dtypes
        return [x.numpy().astype(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]

    def _tensors(self, results: Sequence[np.ndarray]) -> tuple[mge.Tensor, ...]:
        return tuple(mge.Tensor(self._carried(result)) for result in results)

    def _carried(self, array: np.ndarray) -> np.ndarray:
        dtype = carried_dtype(array.dtype)
        if dtype is None:
            raise GraphError(f"{self.operators} gives {array.dtype.name}, which MegEngine lacks.")
        wide = array.dtype.kind in "iu" and array.dtype.itemsize > 2 and array.size > 0
        if wide and (int(array.max()) > _INT32.max or int(array.min()) < _INT32.min):
            raise GraphError(
                f"{self.operators} gives numbers that exceed int32, the largest integers of MegEngine."
            )
        return np.ascontiguousarray(array.astype(dtype)).reshape(array.shape)

    def infer(
        self, shapes: Sequence[Sequence[int]], values: Mapping[int, np.ndarray] | None = None
    ) -> list[tuple[tuple[int, ...] | None, np.dtype[Any]]]:
        """Returns shape and dtype of each output for inputs of these shapes.

        A shape is None where it depends on values of the inputs that are not known.

        Args:
            shapes: the shape of each input.
            values: place of an input -> its values, where these are known.

        Raises:
            ExportError: when onnxruntime is not installed, or refuses inputs of these shapes.
        """
        results = []
        for tensor in self.fragment.infer([tuple(shape) for shape in shapes], values):
            results.append((tensor.fixed_shape, carried_dtype(tensor.dtype) or np.dtype(np.float32)))
        return results

    def stand_in(self, *inputs: mge.Tensor, known: Collection[int] = ()) -> Any:
        """Returns zeros of the shapes and dtypes of the outputs.

        A size that unknown values decide is 1: the nodes may refuse zeros in place of the values.

        Args:
            *inputs: the inputs.
            known: the places of those whose values are known.

        Raises:
            GraphError: when onnxruntime refuses inputs of these shapes.
        """
        try:
            values = {place: inputs[place].numpy() for place in known}
            kinds = self.fragment.infer([tuple(int(n) for n in x.shape) for x in inputs], values)
        except ExportError as error:
            raise GraphError(f"{self.operators}: {error}") from error
        sizes = ([1 if n is None else n for n in kind.shape or ()] for kind in kinds)
        dtypes = (carried_dtype(kind.dtype) or np.dtype(np.float32) for kind in kinds)
        tensors = tuple(mge.Tensor(np.zeros(n, dtype)) for n, dtype in zip(sizes, dtypes, strict=True))
        return tensors[0] if len(tensors) == 1 else tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueOp:
        """Returns a copy that shares the opened model, which never changes."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if self in _OPENED:
            _OPENED[result] = _OPENED[self]
        if self in _SELECTING:
            _SELECTING[result] = _SELECTING[self]
        if self in _SAID:
            _SAID.add(result)
        return result


register_as_builtin(OpaqueOp)

# What runs add to an op: not its attributes, which MegEngine lists, saves and prints, nor slots, with which
# it cannot trace the module again.
_OPENED: WeakKeyDictionary[OpaqueOp, Fragment] = WeakKeyDictionary()
_SELECTING: WeakKeyDictionary[OpaqueOp, SelectingFragment | None] = WeakKeyDictionary()
_SAID: WeakSet[OpaqueOp] = WeakSet()


def opaque_calls(traced: TracedModule) -> list[Expr]:
    """Returns the exprs of a graph that call an `OpaqueOp`, in order."""
    return [expr for expr in exprs(traced) if isinstance(owner(expr), OpaqueOp)]


_CURE = (
    "it is kept as in the file only for its open axes, so import the file with fixed=True (--fixed), or a "
    "module of torch without dynamic axes"
)


def cure_for_opaque(expr: Expr | None) -> str:
    """Returns, as a clause, that the node of a call is kept for open axes, and how to get its form instead.

    Returns:
        The clause; "" for other exprs, and for nodes that MegEngine lacks at fixed sizes, too.
    """
    op = None if expr is None else owner(expr)
    return _CURE if isinstance(op, OpaqueOp) and op.for_open_axes else ""


def find_random(traced: TracedModule) -> str:
    """Returns the name of the first result in a graph that is drawn at random in each run; "" for none."""
    for expr in exprs(traced):
        op = owner(expr)
        fragment = isinstance(op, OpaqueOp) and op.fragment.draws_numbers
        if fragment or (isinstance(expr, Apply) and type(expr.opdef).__name__.endswith("RNG")):
            return str(expr.outputs[0].name)
    return ""


def divides_by_inputs(traced: TracedModule) -> bool:
    """Returns whether a graph divides integers by what it computes, of which onnxruntime survives no 0.

    Divisors that depend only on sizes are none of these.
    """
    computed: set[Node] = set(traced.graph.inputs[1:])
    for expr in exprs(traced):
        op = owner(expr)
        if isinstance(op, OpaqueOp) and op.fragment.divides_by_inputs:
            return True
        divisor = divisor_of_integers(expr)
        if isinstance(divisor, Node) and divisor in computed:
            return True
        if not (reads_shape(expr) or computed.isdisjoint(expr.inputs)):
            computed.update(expr.outputs)
    return False


def say_stopped_gradients(traced: TracedModule) -> str:
    """Returns a sentence on the opaque nodes that a gradient would have to pass; "" if there are none.

    The caller says it: the nodes do not repeat it when they run.
    """
    stopped = stopped_gradients(traced)
    if not stopped:
        return ""
    for expr in stopped:
        op = owner(expr)
        if isinstance(op, OpaqueOp):
            op.say_once()
    more = f" and {len(stopped) - 1} more" if len(stopped) > 1 else ""
    cure = next(filter(None, map(cure_for_opaque, stopped)), "")
    return _stopped_sentence(f"{stopped[0].outputs[0].name}{more}", cure)


def _stopped_sentence(names: str, cure: str) -> str:
    sentence = (
        f"no gradient passes {names}, kept as in the imported file: the parameters before it learn from "
        "other paths alone"
    )
    return f"{sentence}; {cure}." if cure else f"{sentence}."


def _level_of_caller() -> int:
    """Returns the ``stacklevel`` of the line that runs the network, seen from the caller."""
    level, frame = 1, sys._getframe(1)
    inner = ("qtrace", "megengine")
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in inner:
        level, frame = level + 1, frame.f_back
    return level


def stopped_gradients(traced: TracedModule) -> list[Expr]:
    """Returns the calls of opaque nodes that a gradient of a parameter would have to pass.

    Args:
        traced: a flat traced module; after the first opaque node on a path nothing counts.
    """
    calls = opaque_calls(traced)
    if not calls:
        return []
    learning: set[Node] = set()
    stopped = []
    for expr in exprs(traced):
        if isinstance(expr, GetAttr):
            value = get_module(traced, str(expr.name))
            learns = isinstance(value, mge.Parameter)
            learns = learns or (isinstance(value, Module) and any(True for _ in value.parameters()))
            if learns:
                learning.update(expr.outputs)
        elif any(node in learning for node in expr.inputs):
            if isinstance(owner(expr), OpaqueOp):
                stopped.append(expr)
            elif any(np.dtype(n.dtype).kind == "f" for n in expr.outputs if isinstance(n, TensorNode)):
                learning.update(expr.outputs)
    return stopped
