"""Shapes with the names of open axes, by inference of a graph's types at other sizes of its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from megengine.traced_module import TracedModule
from megengine.traced_module.node import Node, TensorNode

from qtrace.graph.inference import OpError, TensorType, TypeInference, recorded_type
from qtrace.graph.open_axes import OpenAxes, OpenAxis, other_sizes, read_open_axes
from qtrace.graph.walk import exprs

__all__ = [
    "Shape",
    "SizedTypes",
    "describe_sizes",
    "infer_types",
    "open_shapes",
    "show_shape",
]

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
        sizes = (
            other_sizes(inputs, axes, _LARGER_BATCH)[:: _LARGER_BATCH - 1]
            if batches
            else other_sizes(inputs, axes, 3)
        )
        for shapes in sizes:
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
