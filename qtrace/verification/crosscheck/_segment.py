"""Cuts out of a graph the exprs that compute one node from values that graph and runtime share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import first_samples
from qtrace.errors import QtraceError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.numerics import dequantize
from qtrace.scheme import QParams
from qtrace.verification.selections import FirstOfEquals

__all__ = ["Arguments", "Recording", "RuntimeValues", "Segment", "Split"]

_NO_AXIS = -1
# The exceptions of MegEngine and the interpreter for shapes that a graph does not take.
_SHAPE_ERRORS = (QtraceError, AssertionError, TypeError, RuntimeError, ValueError)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RuntimeValues:
    """The integers of a runtime for a batch, dequantized, by the names of the graph's nodes.

    Attributes:
        names: node -> the name under which the runtime returns the node's integers.
        integers: name -> integers.
        qparams: node -> the parameters of the node's integers.
    """

    names: Mapping[str, str]
    integers: Mapping[str, np.ndarray]
    qparams: Mapping[str, QParams]

    def __contains__(self, node: str) -> bool:
        return node in self.names

    def __getitem__(self, node: str) -> np.ndarray:
        return dequantize(self.integers[self.names[node]], self.qparams[node])


@dataclass(frozen=True)
class Split:
    """How the values of a batch fall into samples.

    Attributes:
        count: the number of samples.
        axes: node -> the axis of its samples; None where all samples share the value.
    """

    count: int
    axes: Mapping[Node, int | None]

    def sample(self, value: np.ndarray, node: Node, number: int) -> np.ndarray:
        """Returns sample ``number`` of the value of ``node``."""
        axis = self.axes[node]
        return value if axis is None else np.split(value, self.count, axis)[number]

    def joins(self, node: Node) -> bool:
        """Whether the value of the batch consists of the values of its samples."""
        return self.axes[node] != _NO_AXIS

    def join(self, values: Sequence[np.ndarray], node: Node) -> np.ndarray:
        """Joins the values of the samples to the value of the batch."""
        axis = self.axes[node]
        return values[0] if axis is None else np.concatenate(values, axis)


@dataclass(frozen=True)
class Segment:
    """The exprs that compute one node from values that graph and runtime share.

    Attributes:
        model: the converted module.
        target: the node.
        exprs: the exprs, in graph order.
        sources: the nodes outside of the segment that the exprs read.
    """

    model: TracedModule
    target: TensorNode
    exprs: tuple[Expr, ...]
    sources: tuple[TensorNode, ...]

    @classmethod
    def ending_at(cls, model: TracedModule, name: str, values: RuntimeValues) -> Segment:
        """Returns the segment that computes the node ``name``."""
        inputs, order = {node: node for node in model.graph.inputs}, exprs(model)
        target = next(n for n in (*(n for e in order for n in e.outputs), *inputs.values()) if n.name == name)
        needed, segment, sources = {target}, [], {}
        for expr in reversed(order):
            if not any(node in needed for node in expr.outputs):
                continue
            segment.append(expr)
            for node in expr.inputs:
                if isinstance(node, TensorNode) and (node in inputs or node.name in values):
                    sources[node] = node
                else:
                    needed.add(node)
        if not segment:
            sources = {target: target}
        return cls(model, target, tuple(reversed(segment)), tuple(sources.values()))

    def input_values(self, arguments: Arguments, values: RuntimeValues) -> dict[Node, np.ndarray]:
        """Returns the value of each source: the runtime's integers, dequantized, or an input of the graph."""
        _, bound = Interpreter(self.model).bind(*arguments)
        inputs = dict(zip(self.model.graph.inputs, bound, strict=True))
        return {
            node: values[node.name] if node.name in values else inputs[node].numpy() for node in self.sources
        }

    def split(self, arguments: Arguments, values: Mapping[Node, np.ndarray]) -> Split | None:
        """Splits the batch into samples; None if there are none, or the graph takes no single sample."""
        first = first_samples(arguments, 1)
        if first is None:
            return None
        _, (_, leading, *_) = Interpreter(self.model).bind(*arguments)
        count, shapes = int(leading.shape[0]), _Shapes(self.model)
        try:
            shapes.run(*first[0], **first[1])
            batch = {node: value.shape for node, value in {**values, **self.evaluate(values)}.items()}
        except _SHAPE_ERRORS:
            return None
        axes = {node: _sample_axis(shape, shapes.shapes[node.name], count) for node, shape in batch.items()}
        split = Split(count, axes)
        return split if all(split.joins(node) for node in (*self.sources, self.target)) else None

    @property
    def computed(self) -> tuple[TensorNode, ...]:
        """The tensors that the exprs compute, in graph order."""
        return tuple(n for e in self.exprs for n in e.outputs if isinstance(n, TensorNode))

    def evaluate(self, inputs: Mapping[Node, np.ndarray]) -> dict[Node, np.ndarray]:
        """Computes the segment in MegEngine; returns node -> value without the inputs."""
        values: dict[Node, Any] = {key: Tensor(value) for key, value in inputs.items()}
        values[self.model.graph.inputs[0]] = self.model
        ranking = FirstOfEquals(self.model)
        for expr in self.exprs:
            results = ranking.run_expr(expr, [values[node] for node in expr.inputs]) or ()
            computed = zip(expr.outputs, results, strict=True)
            values.update((node, value) for node, value in computed if node not in inputs)
        return {node: values[node].numpy() for node in self.computed if node not in inputs}


class _Shapes(Interpreter):
    """Records the shape of every tensor."""

    def __init__(self, model: TracedModule) -> None:
        super().__init__(model)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Records the shape of ``value``."""
        if isinstance(node, TensorNode):
            self.shapes[node.name] = tuple(int(n) for n in value.shape)
        return value


def _sample_axis(batch: Sequence[int], sample: Sequence[int], count: int) -> int | None:
    """Finds the axis along which ``count`` values of shape ``sample`` make up the shape ``batch``.

    Returns:
        The axis; None if both shapes are the same, `_NO_AXIS` if there is no such axis.
    """
    if tuple(batch) == tuple(sample):
        return None
    axes = [i for i, (a, b) in enumerate(zip(batch, sample, strict=False)) if a != b]
    fits = len(batch) == len(sample) and len(axes) == 1 and batch[axes[0]] == count * sample[axes[0]]
    return axes[0] if fits else _NO_AXIS


class Recording(FirstOfEquals):
    """Runs the whole graph on the runtime's integers and keeps the values of a segment.

    Only this run shows a kernel that is wrong for some memory layouts: an op by itself may read another.
    """

    def __init__(self, segment: Segment, values: RuntimeValues) -> None:
        super().__init__(segment.model)
        self.values, self.nodes = values, set(segment.computed)
        self.recorded: dict[Node, Any] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the value of a node of the segment; replaces the graph's integers by the runtime's."""
        if node in self.nodes:
            self.recorded[node] = value
        return type(value)(self.values[node.name]) if node.name in self.values else value

    def record(self, arguments: Arguments) -> dict[Node, np.ndarray]:
        """Runs the batch; returns node -> value for the nodes of the segment."""
        self.run(*arguments[0], **arguments[1])
        return {key: value.numpy() for key, value in self.recorded.items()}
