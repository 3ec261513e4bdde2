"""Axes whose size a graph leaves open, and the shapes that follow."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import megengine as mge
import numpy as np

from qtrace.graph.failures import Saved, from_json, parsing
from qtrace.graph.inference import SMALL, OpError, TensorType, TypeInference, recorded_type
from qtrace.graph.kernels import MAX_RANK
from qtrace.graph.types import Apply, Constant, Expr, GetAttr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, reads_shape

# Computes the numbers that a graph derives from shapes, at the traced shapes.


def traced_value(node: TensorNode) -> np.ndarray | None:
    """Computes ``node`` from the shapes that the graph was traced with.

    Args:
        node: a node of a graph, such as ``(x.shape[2] + 31) // 32``.

    Returns:
        The value of ``node``; None if it depends on the values of an input or a parameter, or is large.
    """
    order = _collect_exprs(node)
    if order is None:
        return None
    values: dict[Node, np.ndarray] = {}
    for expr in order:
        results = _evaluate(expr, values)
        if results is None:
            return None
        for out, value in zip(expr.outputs, results, strict=True):
            values[out] = value
    return values[node]


def _collect_exprs(node: TensorNode) -> list[Expr] | None:
    """Returns the exprs that compute ``node``, in order; None if one reads more than shapes and numbers."""
    order: list[Expr] = []
    visited: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(node.expr, False)]
    while stack:
        expr, ready = stack.pop()
        if expr in visited:
            continue
        if ready:
            visited.add(expr)
            order.append(expr)
            continue
        if not _is_small(expr):
            return None
        stack.append((expr, True))
        if not reads_shape(expr):
            stack.extend((n.expr, False) for n in expr.inputs)
    return order


def _is_small(expr: Any) -> bool:
    """Returns whether an expr gives at most `SMALL` numbers and reads no parameter or input."""
    if expr is None or isinstance(expr, (Input, GetAttr)) or not expr.outputs or _is_random(expr):
        return False
    if isinstance(expr, Constant) and not isinstance(expr.outputs[0], TensorNode):
        return False
    shapes = [n.shape for n in expr.outputs]
    return all(s is not None and math.prod(int(i) for i in s) <= SMALL for s in shapes)


def _is_random(expr: Expr) -> bool:
    """Returns whether an expr draws random numbers."""
    return isinstance(expr, Apply) and "RNG" in type(expr.opdef).__name__


def _evaluate(expr: Expr, values: dict[Node, np.ndarray]) -> list[np.ndarray] | None:
    """Computes the results of ``expr``; None if its kernel refuses these sizes."""
    if reads_shape(expr):
        (source,) = expr.inputs
        shape = np.array([int(n) for n in source.shape], np.int32)
        axis = int(expr.opdef.axis)
        return [shape if axis == MAX_RANK else shape[axis : axis + 1 or None]]
    inputs = [mge.Tensor(values[n]) for n in expr.inputs]
    try:
        return [result.numpy() for result in expr.interpret(*inputs)]
    except Exception:  # MegEngine's errors are of no class of their own
        return None


_ATTRIBUTE = "open_axes"
BATCH = "N"  # the name of the batch where a file or a user gives none
_LARGEST_POWER = 64
_VISIBLE = 32  # by so much a map of one thirty-second of an input's size changes by one
# An axis of more places is a signal, whose windows may be some hundred places apart: it grows by a share.
_LONGEST_OF_MAPS, _VISIBLE_SHARE = 1024, 8


@dataclass(frozen=True)
class OpenAxis(Saved):
    """An axis of an input that may have any size.

    Attributes:
        input: the name of the input's node.
        axis: the axis.
        size: what the axis shares its size with: axes with equal texts have one size, or keep their ratio.
        name: the name in files; "" if the axis is unnamed.
    """

    input: str
    axis: int
    size: str
    name: str

    @property
    def label(self) -> str:
        """The name in files and in texts: a made one if the axis is unnamed."""
        return self.name or (BATCH if self.axis == 0 else f"{self.input}_{self.axis}")


@dataclass(frozen=True)
class FixedAxis(Saved):
    """An axis that a file leaves open, and that an op of the graph fixes.

    Attributes:
        input: the name of the input's node.
        axis: the axis.
        name: the name in the file; "" if the axis is unnamed.
        reason: which op needs the number, and why, as the end of a sentence.
    """

    input: str
    axis: int
    name: str
    reason: str

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"axis {self.axis}{name} of input {self.input} is fixed: {self.reason}"


@dataclass(frozen=True)
class OpenAxes(Saved):
    """The open axes of a graph.

    Attributes:
        axes: the open axes of the inputs, the batch among them.
        fixed: the axes that the file or the user leaves open, and that an op fixes.
    """

    axes: tuple[OpenAxis, ...]
    fixed: tuple[FixedAxis, ...] = ()

    def of(self, node: Node) -> dict[int, OpenAxis]:
        """Returns the open axes of an input of the graph by their position."""
        return {axis.axis: axis for axis in self.axes if axis.input == node.name}

    def only_batch(self) -> bool:
        """Returns whether no axis but the first one of inputs is open."""
        return all(axis.axis == 0 for axis in self.axes)


def write_open_axes(traced: TracedModule, record: OpenAxes) -> None:
    """Attaches ``record`` to ``traced``."""
    setattr(traced, _ATTRIBUTE, json.dumps(asdict(record), sort_keys=True))


def read_open_axes(traced: TracedModule) -> OpenAxes | None:
    """Returns the open axes that ``traced`` records; None if nothing is recorded.

    Axes of inputs that the graph no longer has are left out.

    Raises:
        GraphError: when the record is damaged.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    if text is None:
        return None
    with parsing("the open axes that the model carries are", "import or trace it again"):
        record = from_json(OpenAxes, text)
    ranks = {n.name: len(n.shape or ()) for n in traced.graph.inputs if isinstance(n, TensorNode)}
    known = tuple(a for a in record.axes if 0 <= a.axis < ranks.get(a.input, 0))
    return OpenAxes(known, tuple(a for a in record.fixed if a.input in ranks))


def repeat_to(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns an array of ``shape`` that repeats the values of ``array``, or cuts them off."""
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size), axis=axis, mode="wrap")
    return array


def power_of_two(size: int) -> int:
    """Returns the largest power of two that divides a size, up to 64: a network halves it so often."""
    return min(size & -size, _LARGEST_POWER)


def growth(size: int) -> int:
    """Returns by how much a size grows to another one at which a network still runs, and computes otherwise.

    It is a multiple of the largest power of two that divides the size, up to 64, so that a network which
    halves the size as often still runs. It is at least 32, half of a small size, or an eighth of a long
    signal. A smaller growth would not change the size of a coarse map or the number of a signal's windows.
    That would pass for one that does not depend on the input.
    """
    power = power_of_two(size)
    visible = size // _VISIBLE_SHARE if size > _LONGEST_OF_MAPS else min(_VISIBLE, size // 2)
    return power * max(1, -(-visible // power))


def resize_axes(
    shapes: Mapping[str, Sequence[int]], axes: Sequence[OpenAxis], resize: Callable[[int, int | None], int]
) -> dict[str, tuple[int, ...]]:
    """Returns shapes at other sizes of some open axes.

    Axes that share their size keep their ratio: each is a whole multiple of a common unit.

    Args:
        shapes: input -> its shape.
        axes: the open axes.
        resize: returns another unit for a unit and its number; the number of a batch is None.
    """
    units: dict[str, int] = {}
    for axis in axes:
        units[axis.size] = math.gcd(units.get(axis.size, 0), int(shapes[axis.input][axis.axis]))
    batches = {axis.size for axis in axes if axis.axis == 0}
    order = [size for size in units if size not in batches]
    others = {name: list(shape) for name, shape in shapes.items()}
    for axis in axes:
        unit, size = units[axis.size], others[axis.input][axis.axis]
        number = None if axis.size in batches else order.index(axis.size)
        others[axis.input][axis.axis] = size // unit * resize(unit, number)
    return {name: tuple(shape) for name, shape in others.items()}


def other_sizes(
    shapes: Mapping[str, Sequence[int]], axes: Sequence[OpenAxis], count: int = 2, distinct: bool = True
) -> list[dict[str, tuple[int, ...]]]:
    """Returns shapes of inputs at other sizes of their open axes.

    A size grows by multiples of its `growth`. The batch, the first axis, grows by one.

    Args:
        shapes: input -> its shape.
        axes: the open axes.
        count: how many shapes to return for each input.
        distinct: whether each open size grows by another multiple.
    """

    def grow(times: int, unit: int, number: int | None) -> int:
        return unit + (times if number is None else growth(unit) * (times + number * distinct))

    return [resize_axes(shapes, axes, partial(grow, times)) for times in range(1, count + 1)]


Shape = tuple[int | str, ...]
"""The sizes of a tensor; an open one is its name, or -1 where it is computed from open sizes."""

_COMPUTED = -1
_LARGER_BATCH = 8  # by how much the second batch is larger than the recorded one


def infer_types(traced: TracedModule, shapes: Mapping[str, Sequence[int]]) -> dict[Node, TensorType | None]:
    """Infers the types of all tensors of a flat graph from the shapes of its inputs.

    Args:
        traced: the graph.
        shapes: name of an input -> its shape.

    Raises:
        OpError: when an op cannot run at these shapes.
    """
    return SizedTypes(traced).infer(shapes)


class SizedTypes:
    """Infers the types of a flat graph at several sizes; what does not depend on them is inferred once.

    Args:
        traced: the graph, which is not changed meanwhile.
    """

    def __init__(self, traced: TracedModule) -> None:
        self.traced = traced
        self._inference = TypeInference(traced)
        self._fixed: dict[Node, object] = {}
        self._types: dict[tuple[tuple[str, tuple[int, ...]], ...], dict[Node, TensorType | None]] = {}

    def infer(self, shapes: Mapping[str, Sequence[int]]) -> dict[Node, TensorType | None]:
        """Infers the types of all tensors, see `infer_types`."""
        key = tuple((name, tuple(int(n) for n in shape)) for name, shape in sorted(shapes.items()))
        if key not in self._types:
            self._types[key] = self._infer(dict(key))
        return self._types[key]

    def at_other_sizes(self, axes: Sequence[OpenAxis]) -> list[dict[Node, TensorType | None]]:
        """Infers the types of all tensors at up to three other sizes of some open axes.

        Two sizes are enough where only batches are open, as one of them is larger than what an op may cut a
        batch to. A size at which an op cannot run is left out: a file may leave an axis open of which few
        sizes run.
        """
        types = []
        inputs = _input_shapes(self.traced)
        batches = all(axis.axis == 0 for axis in axes)
        sizes = other_sizes(inputs, axes, _LARGER_BATCH if batches else 3)
        for shapes in (sizes[0], sizes[-1]) if batches else sizes:
            with contextlib.suppress(OpError):
                types.append(self.infer(shapes))
        return types

    def _infer(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[Node, TensorType | None]:
        graph = self.traced.graph
        fixed: dict[Node, object] = self._fixed or {graph.inputs[0]: self.traced}
        values = dict(fixed)
        for node in graph.inputs[1:]:
            kind = recorded_type(node) if isinstance(node, TensorNode) else None
            values[node] = None if kind is None else TensorType(shapes[str(node.name)], kind.dtype)
        for expr in exprs(self.traced):
            if expr.outputs and all(node in values for node in expr.outputs):
                continue
            results = self._inference.results(expr, [values[n] for n in expr.inputs])
            values.update(zip(expr.outputs, results, strict=True))
            if all(node in fixed for node in expr.inputs):
                fixed.update(zip(expr.outputs, results, strict=True))
        self._fixed = fixed
        return {node: _type(value) for node, value in values.items() if isinstance(node, TensorNode)}


def _type(value: object) -> TensorType | None:
    if isinstance(value, TensorType):
        return value
    shape = getattr(value, "shape", None)
    if shape is None:
        return None
    return TensorType(tuple(int(n) for n in shape), getattr(value, "dtype", None))


def open_shapes(traced: TracedModule) -> dict[str, Shape]:
    """Returns the shapes of tensors that have open axes; none if the graph records no open axes.

    Args:
        traced: a flat graph.

    Returns:
        Name of a tensor -> its recorded shape with the name of an input's axis in the place of a size that is
        always equal to that axis, and -1 in the place of another size that depends on open ones.
    """
    record = read_open_axes(traced)
    if record is None or not record.axes:
        return {}
    types = SizedTypes(traced).at_other_sizes(record.axes)
    if not types:  # an edit of the graph has fixed an axis
        return {}
    names = _names_by_sizes(record, types)
    shapes = {}
    for node in types[0]:
        kinds = [known.get(node) for known in types]
        if node.shape is None or any(k is None or len(k.shape) != len(node.shape) for k in kinds):
            continue
        sizes = list(zip(*(kind.shape for kind in kinds if kind is not None), strict=True))
        shape = tuple(
            int(size) if set(others) == {int(size)} else names.get(others, _COMPUTED)
            for size, others in zip(node.shape, sizes, strict=True)
        )
        if shape != tuple(int(size) for size in node.shape):
            shapes[str(node.name)] = shape
    return shapes


def _names_by_sizes(
    record: OpenAxes, types: Sequence[Mapping[Node, TensorType | None]]
) -> dict[tuple[int, ...], str]:
    """Returns the sizes of an axis of an input at all types -> its name."""
    inputs = {str(node.name): node for node in types[0]}
    names: dict[tuple[int, ...], str] = {}
    for axis in record.axes:
        kinds = [known[inputs[axis.input]] for known in types]
        names.setdefault(tuple(k.shape[axis.axis] for k in kinds if k is not None), axis.label)
    return names


def _input_shapes(traced: TracedModule) -> dict[str, tuple[int, ...]]:
    nodes = (node for node in traced.graph.inputs if isinstance(node, TensorNode))
    return {str(node.name): tuple(int(n) for n in node.shape or ()) for node in nodes}


def show_shape(shape: Shape) -> str:
    """Returns a shape as text, such as ``Nx3xHx-1``."""
    return "x".join(map(str, shape)) or "scalar"


def describe_sizes(traced: TracedModule) -> list[str]:
    """Says of each input with open axes which ones these are, and why an axis of its file is fixed.

    Args:
        traced: a traced module, prepared or converted, too.
    """
    record = read_open_axes(traced)
    if record is None:
        return []
    lines = []
    for name, recorded in _input_shapes(traced).items():
        own = {axis.axis: axis.label for axis in record.axes if axis.input == name}
        if own:
            shape = tuple(own.get(axis, size) for axis, size in enumerate(recorded))
            lines.append(f"{name} is {show_shape(shape)}, recorded at {show_shape(recorded)}")
    return [*lines, *(str(axis) for axis in record.fixed)]
