"""The exprs that compute one node of a graph from values that the graph and a runtime share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import first_samples
from qtrace.errors import QtraceError
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.numerics import dequantize
from qtrace.scheme import QParams

__all__ = ["Arguments", "Recording", "RuntimeValues", "Segment", "Split"]

_NO_AXIS = -1
# What MegEngine and the interpreter raise for values of other shapes than a graph allows.
_REFUSALS = (QtraceError, AssertionError, TypeError, RuntimeError, ValueError)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RuntimeValues:
    """The integers that a runtime gave for a batch, as floats, by the names of the graph's nodes.

    Attributes:
        names: node -> the name under which the runtime gives its integers.
        integers: name -> integers.
        qparams: node -> the parameters of its integers.
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
        count: how many samples.
        axes: id of a node -> the axis of its samples; None where its value is the same for all.
    """

    count: int
    axes: Mapping[Node, int | None]

    def sample(self, value: np.ndarray, node: int, number: int) -> np.ndarray:
        """One sample of the value of a node."""
        axis = self.axes[node]
        return value if axis is None else np.split(value, self.count, axis)[number]

    def joins(self, node: int) -> bool:
        """Whether the values of single samples make up that of the batch."""
        return self.axes[node] != _NO_AXIS

    def join(self, values: Sequence[np.ndarray], node: int) -> np.ndarray:
        """The value of a batch from those of its samples."""
        axis = self.axes[node]
        return values[0] if axis is None else np.concatenate(values, axis)


@dataclass(frozen=True)
class Segment:
    """The exprs that compute one node from values that graph and runtime share.

    Attributes:
        model: the converted module.
        target: the node.
        exprs: the exprs, in graph order.
        given: the nodes that they read from outside.
    """

    model: TracedModule
    target: TensorNode
    exprs: tuple[Expr, ...]
    given: tuple[TensorNode, ...]

    @classmethod
    def ending_at(cls, model: TracedModule, name: str, values: RuntimeValues) -> Segment:
        """The segment that computes the node ``name``."""
        inputs, order = {node: node for node in model.graph.inputs}, exprs(model)
        target = next(n for n in (*(n for e in order for n in e.outputs), *inputs.values()) if n.name == name)
        needed, segment, given = {target}, [], {}
        for expr in reversed(order):
            if not any(node in needed for node in expr.outputs):
                continue
            segment.append(expr)
            for node in expr.inputs:
                if isinstance(node, TensorNode) and (node in inputs or node.name in values):
                    given[node] = node
                else:
                    needed.add(node)
        if not segment:
            given = {target: target}
        return cls(model, target, tuple(reversed(segment)), tuple(given.values()))

    def given_values(self, arguments: Arguments, values: RuntimeValues) -> dict[Node, np.ndarray]:
        """The values of the nodes that are read from outside, by id of the node."""
        _, bound = Interpreter(self.model).bind(*arguments)
        inputs = dict(zip(self.model.graph.inputs, bound, strict=True))
        return {
            node: values[node.name] if node.name in values else inputs[node].numpy() for node in self.given
        }

    def split(self, arguments: Arguments, given: Mapping[Node, np.ndarray]) -> Split | None:
        """How the batch falls into samples; None where it does not, or the graph takes no single sample."""
        first = first_samples(arguments, 1)
        if first is None:
            return None
        _, (_, leading, *_) = Interpreter(self.model).bind(*arguments)
        count, shapes = int(leading.shape[0]), _Shapes(self.model)
        try:
            shapes.run(*first[0], **first[1])
            whole = {key: value.shape for key, value in {**given, **self.evaluate(given)}.items()}
        except _REFUSALS:
            return None
        known = {node: node.name for node in (*self.given, *self.computed)}
        axes = {key: _sample_axis(shape, shapes.found[known[key]], count) for key, shape in whole.items()}
        split = Split(count, axes)
        return split if all(split.joins(node) for node in (*self.given, self.target)) else None

    @property
    def computed(self) -> tuple[TensorNode, ...]:
        """The tensors that the exprs compute, in graph order."""
        return tuple(n for e in self.exprs for n in e.outputs if isinstance(n, TensorNode))

    def evaluate(self, given: Mapping[Node, np.ndarray]) -> dict[Node, np.ndarray]:
        """The values that MegEngine computes, by id of the node."""
        values: dict[Node, Any] = {key: Tensor(value) for key, value in given.items()}
        values[self.model.graph.inputs[0]] = self.model
        for expr in self.exprs:
            results = interpret(expr, [values[node] for node in expr.inputs]) or ()
            fresh = zip(expr.outputs, results, strict=True)
            values.update((node, value) for node, value in fresh if node not in given)
        return {node: values[node].numpy() for node in self.computed if node not in given}


class _Shapes(Interpreter):
    """Notes the shape of every tensor."""

    def __init__(self, model: TracedModule) -> None:
        super().__init__(model)
        self.found: dict[str, tuple[int, ...]] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Notes the shape of ``value``."""
        if isinstance(node, TensorNode):
            self.found[node.name] = tuple(int(n) for n in value.shape)
        return value


def _sample_axis(whole: Sequence[int], one: Sequence[int], count: int) -> int | None:
    """The axis along which ``count`` values of shape ``one`` make up ``whole``.

    Returns:
        The axis; None where both shapes are the same, `_NO_AXIS` where there is no such axis.
    """
    if tuple(whole) == tuple(one):
        return None
    apart = [i for i, (a, b) in enumerate(zip(whole, one, strict=False)) if a != b]
    fits = len(whole) == len(one) and len(apart) == 1 and whole[apart[0]] == count * one[apart[0]]
    return apart[0] if fits else _NO_AXIS


class Recording(Interpreter):
    """Runs the whole graph on the runtime's integers and keeps what a segment computes.

    A kernel that is wrong for some memory layouts is seen here only: alone, an op may read another layout.
    """

    def __init__(self, segment: Segment, values: RuntimeValues) -> None:
        super().__init__(segment.model)
        self.values, self.wanted = values, set(segment.computed)
        self.kept: dict[Node, Any] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the value of a node of the segment; replaces the graph's integers by the runtime's."""
        if node in self.wanted:
            self.kept[node] = value
        return type(value)(self.values[node.name]) if node.name in self.values else value

    def record(self, arguments: Arguments) -> dict[Node, np.ndarray]:
        """The values that the graph computes for the batch, by id of the node."""
        self.run(*arguments[0], **arguments[1])
        return {key: value.numpy() for key, value in self.kept.items()}
