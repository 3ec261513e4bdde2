"""Which axes of a graph's inputs and outputs are open, by inference of its shapes at other batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qtrace.export.converted.graph import ConvertedGraph
from qtrace.graph.inference import OpError, TensorType
from qtrace.graph.open_shapes import SizedTypes, infer_types
from qtrace.graph.types import Node, TensorNode

__all__ = ["OpenBatch", "find_open_batch", "find_sample_axes", "grown_axes"]

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
