"""Which axes a file declares open, and under which names, by inference of a graph's shapes at other sizes.

Which axes of a graph's inputs and outputs are open, by inference of its shapes at other batch sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from qtrace.export.converted import ConvertedGraph
from qtrace.graph.inference import OpError, TensorType
from qtrace.graph.interface import read_interface
from qtrace.graph.open_axes import (
    BATCH,
    OpenAxes,
    OpenAxis,
    SizedTypes,
    infer_types,
    other_sizes,
    read_open_axes,
)
from qtrace.graph.renewal import write_type
from qtrace.graph.types import Node, TensorNode

_LOG = logging.getLogger("qtrace")

Types = Mapping[Node, TensorType | None]
Problem = Callable[[Types], str]


@dataclass(frozen=True)
class DeclaredAxes:
    """The open axes of a file.

    Attributes:
        inputs: input -> its open axes -> their names.
        outputs: output -> its open axes -> their names; None for the name of the output and the axis.
    """

    inputs: Mapping[Node, Mapping[int, str]] = field(default_factory=dict)
    outputs: Mapping[Node, Mapping[int, str | None]] = field(default_factory=dict)


def find_declared_axes(graph: ConvertedGraph, problem_at: Problem, keeps_batch: bool = True) -> DeclaredAxes:
    """Infers the shapes of ``graph`` at other sizes of the open axes that it records.

    An axis at which an op cannot run, or cannot be written, is fixed; the logger ``qtrace`` says why. A graph
    that records no open axes has an open batch, if it can run at other batch sizes. One of an ONNX file that
    fixes the batch keeps that size.

    Args:
        graph: the graph.
        problem_at: says why the graph cannot be written for types at other sizes; "" if it can.
        keeps_batch: whether a batch that an ONNX file fixes stays fixed.
    """
    record = read_open_axes(graph.module)
    if record is None or not record.axes:
        if keeps_batch and _fixes_batch(graph):
            return DeclaredAxes()
        batch = find_open_batch(graph)
        if batch.inputs and (problem := problem_at(batch.types)):
            for node in graph.inputs:
                if node in batch.inputs:
                    _warn(node.name, 0, "", problem)
            return DeclaredAxes()
        outputs = {
            node: {axis: BATCH if is_batch else None for axis, is_batch in axes.items()}
            for node, axes in batch.outputs.items()
        }
        return DeclaredAxes({node: {0: BATCH} for node in batch.inputs}, outputs)
    sized = SizedTypes(graph.module)
    axes = _writable(graph, sized, record, problem_at)
    if not axes:
        return DeclaredAxes()
    names = {node: {a.axis: a.label for a in axes if a.input == node.name} for node in graph.inputs}
    inputs = {node: own for node, own in names.items() if own}
    types = sized.at_other_sizes(axes)
    sizes: dict[tuple[int, ...], str] = {}
    for node, own in inputs.items():
        for axis, name in own.items():
            sizes.setdefault(_sizes(node, axis, types), name)
    outputs = {node: _output_axes(node, types, sizes) for node in graph.outputs}
    return DeclaredAxes(inputs, outputs)


def _fixes_batch(graph: ConvertedGraph) -> bool:
    """Whether a graph comes from an ONNX file whose inputs have a number for their first axis."""
    interface = read_interface(graph.module)
    sizes = [] if interface is None else [tensor.sizes for tensor in interface.inputs]
    return bool(sizes) and all(own is not None and (not own or own[0] is not None) for own in sizes)


class SharedAxes:
    """The open axes of several files of one network, which are found in the first one that is written.

    The graphs have inputs of the same names, and outputs in the same order.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, Mapping[int, str]] = {}
        self._outputs: list[Mapping[int, str | None]] | None = None

    def find(self, graph: ConvertedGraph, problem_at: Problem) -> DeclaredAxes:
        """Returns the open axes of a file; see `find_declared_axes` for the arguments."""
        if self._outputs is None:
            # Files that are thrown away may run on batches of any size.
            axes = find_declared_axes(graph, problem_at, keeps_batch=False)
            self._inputs = {node.name: own for node, own in axes.inputs.items()}
            self._outputs = [axes.outputs.get(node, {}) for node in graph.outputs]
            return axes
        inputs = {node: self._inputs[node.name] for node in graph.inputs if node.name in self._inputs}
        return DeclaredAxes(inputs, dict(zip(graph.outputs, self._outputs, strict=True)))


@contextmanager
def resized(types: Types) -> Iterator[None]:
    """Gives nodes other types, and theirs back in the end."""
    known = {node: (node._shape, node._dtype) for node in types if isinstance(node, TensorNode)}
    try:
        for node, kind in types.items():
            if isinstance(node, TensorNode) and kind is not None:
                write_type(node, kind)
        yield
    finally:
        for node, (shape, dtype) in known.items():
            node._shape, node._dtype = shape, dtype


def open_axes_of(graph: ConvertedGraph) -> tuple[OpenAxis, ...]:
    """Returns the open axes that ``graph`` records and can run at other sizes of; the logger names others."""
    record = read_open_axes(graph.module)
    return (
        ()
        if record is None or not record.axes
        else _writable(graph, SizedTypes(graph.module), record, lambda types: "")
    )


def _writable(
    graph: ConvertedGraph, sized: SizedTypes, record: OpenAxes, problem_at: Problem
) -> tuple[OpenAxis, ...]:
    """Returns the axes that can stay open; the logger says which ones cannot."""
    axes = record.axes
    problem = _problem(graph, sized, axes, problem_at)
    if not problem:
        return axes
    problems: dict[str, str] = {}
    sizes = list(dict.fromkeys(axis.size for axis in axes))
    for size in sizes:
        problems[size] = _problem(graph, sized, [a for a in axes if a.size == size], problem_at)
    remaining = [axis for axis in axes if not problems[axis.size]]
    if len(remaining) == len(axes) or (remaining and _problem(graph, sized, remaining, problem_at)):
        problems, remaining = dict.fromkeys(sizes, problem), []
    for axis in axes:
        if axis not in remaining:
            _warn(axis.input, axis.axis, axis.name, problems[axis.size])
    return tuple(remaining)


def _warn(source: str, axis: int, name: str, problem: str) -> None:
    shown = f" ({name})" if name else ""
    _LOG.warning("the file fixes axis %d%s of input %s: %s", axis, shown, source, problem)


def _problem(graph: ConvertedGraph, sized: SizedTypes, axes: Sequence[OpenAxis], problem_at: Problem) -> str:
    (shapes,) = other_sizes(_shapes(graph), axes, 1)
    try:
        types = sized.infer(shapes)
    except OpError as error:
        return str(error).rstrip(".")
    return problem_at(types)


def _shapes(graph: ConvertedGraph) -> dict[str, tuple[int, ...]]:
    return {str(n.name): tuple(int(s) for s in n.shape or ()) for n in graph.inputs}


def _sizes(node: Node, axis: int, types: Sequence[Types]) -> tuple[int, ...]:
    kinds = [kind for known in types if (kind := known[node]) is not None]
    return tuple(kind.shape[axis] for kind in kinds)


def _output_axes(
    node: TensorNode, types: Sequence[Types], sizes: Mapping[tuple[int, ...], str]
) -> dict[int, str | None]:
    """Returns the axes of an output whose sizes change, with the name of an input's axis of these sizes."""
    recorded = tuple(int(n) for n in node.shape or ())
    kinds = [known[node] for known in types]
    if any(kind is None or len(kind.shape) != len(recorded) for kind in kinds):  # values decide the shape
        return dict.fromkeys(range(len(recorded)))
    opened = (a for a, n in enumerate(recorded) if any(s != n for s in _sizes(node, a, types)))
    return {axis: sizes.get(_sizes(node, axis, types)) for axis in opened}


_MORE = (1, 2)  # samples more than traced: no number of a graph fits both by chance


@dataclass(frozen=True)
class OpenBatch:
    """The open axes of a graph.

    Attributes:
        inputs: the inputs whose first axis is the batch; none if the graph runs at one size only.
        outputs: output -> its open axes -> whether the size of the axis is the batch itself.
        types: the types of all tensors at another batch.
    """

    inputs: frozenset[Node] = frozenset()
    outputs: Mapping[Node, Mapping[int, bool]] = field(default_factory=dict)
    types: Mapping[Node, TensorType | None] = field(default_factory=dict)

    @property
    def is_leading(self) -> bool:
        """Whether no axis but the first one is open in any output."""
        return all(set(axes) <= {0} for axes in self.outputs.values())


def find_open_batch(graph: ConvertedGraph) -> OpenBatch:
    """Infers the shapes of ``graph`` at other batch sizes.

    The batch is the first axis of the first input, and of the others that have as many. If the graph cannot
    run at another size of all of them, it is tried with only the first input.
    """
    nodes = [node for node in graph.inputs if node.shape is not None]
    first = next(iter(graph.inputs), None)
    if first is None or not first.shape:
        return OpenBatch()
    batch = int(first.shape[0])
    alike = [node for node in nodes if node.shape and int(node.shape[0]) == batch]
    sized = SizedTypes(graph.module)
    for tried in (alike, [first]):
        types = [_types(sized, graph, tried, more) for more in _MORE]
        if (open_batch := _compare(graph, tried, batch, types)) is not None:
            return open_batch
    return OpenBatch()


def find_sample_axes(graph: ConvertedGraph) -> dict[Node, int]:
    """Returns the axis of each node that grows with the batch, for nodes of which one axis does."""
    nodes = list(graph.inputs)
    batch = int(nodes[0].shape[0]) if nodes and nodes[0].shape else 0
    shapes = {str(node.name): tuple(int(n) for n in node.shape or ()) for node in nodes}
    larger = {
        name: (batch + _MORE[0], *shape[1:]) if shape and shape[0] == batch else shape
        for name, shape in shapes.items()
    }
    try:
        known, other = (infer_types(graph.module, sizes) for sizes in (shapes, larger))
    except OpError:
        return {}
    return {node: next(iter(axes)) for node, axes in grown_axes(known, other).items() if len(axes) == 1}


def grown_axes(
    known: Mapping[Node, TensorType | None], other: Mapping[Node, TensorType | None]
) -> dict[Node, frozenset[int]]:
    """Returns the axes of each node that have another size in ``other``; no node of unknown or other rank."""
    axes = {}
    for node, kind in known.items():
        more = other.get(node)
        if kind is not None and more is not None and len(kind.shape) == len(more.shape):
            sizes = enumerate(zip(kind.shape, more.shape, strict=True))
            axes[node] = frozenset(axis for axis, (size, larger) in sizes if size != larger)
    return axes


def _compare(
    graph: ConvertedGraph,
    tried: Sequence[TensorNode],
    batch: int,
    types: Sequence[Mapping[Node, TensorType | None]],
) -> OpenBatch | None:
    """Returns the open axes by the outputs' shapes at each larger batch; None for a closed batch."""
    if not all(types):
        return None
    outputs: dict[Node, dict[int, bool]] = {}
    for node in graph.outputs:
        traced = tuple(int(n) for n in node.shape or ())
        kinds = [known[node] for known in types]
        sizes = [tuple(int(n) for n in kind.shape) for kind in kinds if kind is not None]
        if len(sizes) < len(kinds):  # values decide the shape
            outputs[node] = {0: traced[0] == batch} if traced else {}
            continue
        if any(len(other) != len(traced) for other in sizes):
            return None
        axes = {
            axis: all(other[axis] == batch + more for more, other in zip(_MORE, sizes, strict=True))
            for axis, size in enumerate(traced)
            if any(other[axis] != size for other in sizes)
        }
        if 0 not in axes and not all(axes.values()):  # the samples were joined along another axis
            return None
        outputs[node] = axes
    return OpenBatch(frozenset(tried), outputs, types[0])


def _types(
    sized: SizedTypes, graph: ConvertedGraph, opened: Sequence[TensorNode], more: int
) -> Mapping[Node, TensorType | None]:
    """Returns the types of all tensors by batches that are larger by ``more``; none if an op cannot run."""
    shapes = {str(node.name): tuple(int(n) for n in node.shape or ()) for node in graph.inputs}
    for node in opened:
        batch, *others = shapes[str(node.name)]
        shapes[str(node.name)] = (batch + more, *others)
    try:
        return sized.infer(shapes)
    except OpError:
        return {}
