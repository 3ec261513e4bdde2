"""A graph for one sample: its shapes, the axes along which samples lie, and what depends only on shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import megengine as mge
import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, ConvertedOp
from qtrace.export.open_axes import grown_axes, resized
from qtrace.graph.inference import OpError, TensorType
from qtrace.graph.interpreter import interpret
from qtrace.graph.open_axes import infer_types
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall

__all__ = ["SampleAxes", "fold", "one_sample", "shapes_of_one_sample"]


_RESHAPES = ("reshape", "flatten", "expand_dims", "squeeze")
# Ops that read only the shape of their input.
_SHAPED = ("shape", "full_like")


@dataclass(frozen=True)
class SampleAxes:
    """Where the samples of a batch are.

    Attributes:
        axes: node -> its axes whose sizes grow with the number of samples; none if only one sample runs.
        inside: node -> how many values of such an axis lie around each sample, where samples do not lie
            around all others of the axis.
    """

    axes: Mapping[Node, frozenset[int]] = field(default_factory=dict)
    inside: dict[Node, int] = field(default_factory=dict)

    def holds(self, node: Node, axis: int) -> bool:
        """Returns whether an axis of a node grows with the number of samples."""
        return axis in self.axes.get(node, ())

    def follow(self, call: OpCall) -> None:
        """Notes where the samples are after an op.

        Raises:
            ExportError: when the op mixes samples, so that it gives something else for one of them.
        """
        source = next((node for node in call.inputs if self.axes.get(node)), None)
        if source is None:
            return
        around = self._around(source)
        for node in call.outputs:
            own = self.axes.get(node, frozenset())
            before = prod(int(n) for n in node.shape[: min(own)]) if own else 0
            inside = self.inside.get(source, 1)
            if call.kind in _RESHAPES and before:
                inside = around // before if around % before == 0 else 0
            if len(own) != 1 or not inside or int(node.shape[min(own)]) % inside:
                raise ExportError(
                    "it mixes samples of the batch, and ncnn computes sample by sample: leave one axis "
                    "to the batch"
                )
            if inside > 1:
                self.inside[node] = inside

    def _around(self, node: Node) -> int:
        """Returns how many values lie around the samples of a node."""
        assert isinstance(node, TensorNode)
        return prod(int(n) for n in node.shape[: min(self.axes[node])]) * self.inside.get(node, 1)


@contextmanager
def one_sample(graph: ConvertedGraph) -> Iterator[SampleAxes]:
    """Gives the nodes of a graph the shapes that they have for one sample, and theirs back in the end.

    Raises:
        ExportError: when the inputs lack an axis of samples, or the graph does not run on one sample.
    """
    batch = _batch(graph)
    single = _types(graph, 1)
    if single is None:
        raise ExportError(
            f"the graph has numbers of its batch of {batch}, and ncnn runs one sample: trace it with one, "
            "or reshape with -1 for the batch"
        )
    several = _types(graph, batch if batch > 1 else 2) or {}
    with resized(single):
        yield SampleAxes(grown_axes(single, several))


def shapes_of_one_sample(graph: ConvertedGraph, nodes: Sequence[Node]) -> list[tuple[int, ...]] | None:
    """Returns the shapes of some nodes for one sample; None if it is the first axis of each of them.

    Blobs then have the same axes in ncnn: the axes of a sample, at most 4. One number for a
    sample is without an axis in the graph, and has one in ncnn.
    """
    with one_sample(graph) as samples:
        shapes = [tuple(int(n) for n in node.shape or ()) for node in nodes if isinstance(node, TensorNode)]
    leading = (samples.axes.get(node, frozenset()) == {0} for node in nodes)
    same = all(shape[:1] == (1,) and 2 <= len(shape) <= 5 for shape in shapes)
    return None if all(leading) and same else shapes


def _batch(graph: ConvertedGraph) -> int:
    first = next(iter(graph.inputs), None)
    batch = int(first.shape[0]) if first is not None and first.shape else 1
    for node in graph.inputs:
        shape = tuple(int(n) for n in node.shape or ())
        if len(shape) < 2 or shape[0] != batch:
            raise ExportError(
                f"{node.name} has shape {shape}, and ncnn computes sample by sample: leave axis 0 to the "
                f"batch of {batch}"
            )
    return batch


def _types(graph: ConvertedGraph, samples: int) -> dict[Node, TensorType | None] | None:
    """Returns the types for a number of samples; None if the graph does not run on so many."""
    shapes = {str(node.name): (samples, *(int(n) for n in node.shape[1:])) for node in graph.inputs}
    try:
        return infer_types(graph.module, shapes)
    except OpError:
        return None


def fold(op: ConvertedOp, values: Mapping[Node, np.ndarray]) -> tuple[np.ndarray, ...] | None:
    """Computes an op that depends only on shapes, parameters and constants.

    Args:
        op: the op, in a graph whose nodes have the shapes for one sample.
        values: node -> its value, for nodes that depend on nothing else.

    Returns:
        The values of its outputs; None if it depends on an input of the graph.
    """
    expr, call = op.expr, op.call
    if call is None:
        return None
    inputs = []
    for node in expr.inputs:
        if not isinstance(node, TensorNode):
            inputs.append(owner(expr))
        elif node in values:
            inputs.append(mge.Tensor(values[node]))
        elif call.kind in _SHAPED and node.shape is not None:
            inputs.append(mge.Tensor(np.zeros([int(n) for n in node.shape], np.dtype(node.dtype))))
        else:
            return None
    results = interpret(expr, inputs)
    return None if results is None else tuple(np.asarray(result.numpy()) for result in results)
