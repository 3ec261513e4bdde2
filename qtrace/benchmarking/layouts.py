"""Where onnxruntime changes the layout of a tensor between kernels.

Float convolutions run in blocks of channels, integer convolutions with the channels last. A few ops follow
the layout of what they read, all others want the plain layout of ONNX.
"""

from __future__ import annotations

from collections.abc import Iterator

from qtrace.benchmarking.onnx_ops import OnnxGraph, TimedNode
from qtrace.costs import FLOAT, INTEGER, LOOKUP
from qtrace.onnxfile.kernel_layouts import STEM_CHANNELS, stays_blocked

__all__ = ["LayoutChanges"]

PLAIN, BLOCKED, LAST = "plain", "blocked", "channels last"

_SENSITIVE = (
    "Reshape Flatten Squeeze Unsqueeze MatMul Gemm Softmax ConvTranspose LayerNormalization Transpose"
)

Change = tuple[tuple[int, ...], str]


class LayoutChanges:
    """Follows the layout of every tensor through a graph, node by node."""

    def __init__(self, graph: OnnxGraph) -> None:
        self._graph = graph
        self._layouts = {name: {PLAIN} for name in graph.inputs}

    def is_last(self, name: str) -> bool:
        """Returns whether a tensor of a node before has the channels last."""
        return LAST in self._layouts.get(name, ())

    def enter(self, node: TimedNode, form: str, gated: bool = False) -> Iterator[Change]:
        """Yields the changes before a node, as the shape and the form of a ``reorder``.

        Args:
            node: the next node of the graph.
            form: the form that it is computed in.
            gated: whether it is the end of x * sigmoid(x), which lacks a kernel for blocks.
        """
        sources = [self._layouts.get(name, {PLAIN}) for name in node.data]
        layout = PLAIN if gated else self._layout(node, form, sources)
        for name, has in zip(node.data, sources, strict=True):
            shape = self._graph.shapes.get(name, ())
            needed = PLAIN if self._is_stem(node, layout, shape) else layout
            if needed not in has and len(shape) == 4:
                has.add(needed)
                yield from _changes(has, shape, needed)
        for name in node.outputs:
            self._layouts[name] = {layout}

    def leave(self) -> Iterator[Change]:
        """Yields the changes before the outputs of the graph."""
        for name in self._graph.outputs:
            has, shape = self._layouts.get(name, {PLAIN}), self._graph.shapes.get(name, ())
            if PLAIN not in has and len(shape) == 4:
                yield from _changes(has, shape, PLAIN)

    @staticmethod
    def _is_stem(node: TimedNode, layout: str, shape: tuple[int, ...]) -> bool:
        return node.op == "Conv" and layout == BLOCKED and len(shape) == 4 and shape[1] < STEM_CHANNELS

    def _layout(self, node: TimedNode, form: str, sources: list[set[str]]) -> str:
        if node.op == "Conv":
            return LAST if form in (INTEGER, LOOKUP) else BLOCKED
        has = set().union(*sources) if sources else {PLAIN}
        if node.op in _SENSITIVE.split() or not has - {PLAIN}:
            return PLAIN
        if LAST in has:
            return LAST
        return BLOCKED if form == "fused" or self._stays_blocked(node, sources) else PLAIN

    def _stays_blocked(self, node: TimedNode, sources: list[set[str]]) -> bool:
        """Whether a float op has a kernel for blocks: if all that it reads is in blocks of one shape."""
        producer = self._graph.producers.get(node.data[0])
        after_conv = producer is not None and producer.op == "Conv"
        shapes = {self._graph.shapes.get(name) for name in node.data}
        return stays_blocked(
            node.op,
            blocked=all(BLOCKED in has for has in sources),
            after_conv=after_conv and len(self._graph.readers[node.data[0]]) == 1,
            equal_shapes=len(shapes) == 1 and not node.stored,
        )


def _changes(has: set[str], shape: tuple[int, ...], needed: str) -> Iterator[Change]:
    """Yields one change for each step between the layouts that a tensor has and the one that is needed."""
    if LAST in has or needed == LAST:
        yield shape, INTEGER
    if (BLOCKED in has and needed == PLAIN) or needed == BLOCKED or (BLOCKED in has and needed == LAST):
        yield shape, FLOAT
