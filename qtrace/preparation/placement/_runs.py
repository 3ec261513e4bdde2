"""The runs of a graph that measure: ranges, the values of ends, and probes by gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.core.autodiff.grad import Grad

from qtrace.gradients import conv2d
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import CallFunction, Expr, Node, TracedModule
from qtrace.graph.walk import owner
from qtrace.metrics import inner
from qtrace.numerics import fake_quantize
from qtrace.preparation.placement._groups import EndGroup
from qtrace.preparation.placement._regions import is_roi_align
from qtrace.preparation.placement._slopes import with_slopes
from qtrace.scheme import QParams

__all__ = ["Probe", "RangeStatistics", "Run", "Totals"]


class Run(Interpreter):
    """Runs a graph on the values of its inputs.

    Attributes:
        ends: the nodes at which noise is measured.
        values: end -> its value in the last run.
    """

    def __init__(self, model: TracedModule, ends: Collection[Node]) -> None:
        super().__init__(model)
        self.ends = frozenset(ends)
        self.values: dict[Node, Any] = {}

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph once."""
        self.values.clear()
        self._execute(self.traced.graph, list(inputs), None)

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the values of ends."""
        if node in self.ends:
            self.values[node] = value
        return value


class RangeStatistics(Run):
    """Collects the ranges of values, and the values of the ends in each batch.

    Args:
        model: the graph.
        ends: the nodes whose values are kept.
        nodes: the nodes whose ranges are collected.

    Attributes:
        ranges: node -> smallest and largest value.
        exact: for each batch, end -> its values.
    """

    def __init__(self, model: TracedModule, ends: Collection[Node], nodes: Collection[Node]) -> None:
        super().__init__(model, ends)
        self.nodes = nodes
        self.ranges: dict[Node, tuple[float, float]] = {}
        self.exact: list[dict[Node, np.ndarray]] = []

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph once, and keeps the values of the ends."""
        super().execute(inputs)
        self.exact.append({node: value.numpy() for node, value in self.values.items()})

    def on_node(self, node: Node, value: Any) -> Any:
        """Updates the statistics of ``node``."""
        if node in self.nodes and value.size:
            exact = value.numpy()
            low, high = float(exact.min()), float(exact.max())
            known = self.ranges.get(node, (low, high))
            self.ranges[node] = (float(np.minimum(known[0], low)), float(np.maximum(known[1], high)))
        return super().on_node(node, value)


@dataclass
class Totals:
    """Sums over batches and probes of the squared products of gradients and errors.

    Attributes:
        whole: node -> sum over samples of the squares of whole products.
        channels: node -> sum over samples and channels of the squares of each channel's products.
    """

    whole: dict[Node, float] = field(default_factory=dict)
    channels: dict[Node, float] = field(default_factory=dict)

    def add(self, node: Node, gradient: np.ndarray, error: np.ndarray) -> None:
        """Adds the products of one node in one probe of one batch."""
        samples, channels = (*gradient.shape[:2], 1, 1)[:2]
        rows = gradient.reshape(samples * channels, -1)
        products = np.einsum("ij,ij->i", rows, error.reshape(rows.shape)).astype(np.float64)
        sums = products.reshape(samples, channels).sum(axis=1)
        self.channels[node] = self.channels.get(node, 0.0) + inner(products, products)
        self.whole[node] = self.whole.get(node, 0.0) + inner(sums, sums)

    def powers(self) -> dict[Node, float]:
        """Returns the geometric mean of both sums of each node where they are finite."""
        means = {node: math.sqrt(self.whole[node] * self.channels[node]) for node in self.whole}
        return {node: mean for node, mean in means.items() if math.isfinite(mean)}


class Probe(Run):
    """Runs a float graph with random vectors at the ends, and adds products with their gradients to totals.

    Args:
        model: the graph.
        groups: the groups of columns to measure at.
        qparams: node -> what its value is rounded by.
        weights: expr of a layer -> the node of its weight, and the rounded weight.
        rng: the generator of the random vectors.

    Attributes:
        totals: the sums of the values, and of the results of layers with rounded weights.
    """

    def __init__(
        self,
        model: TracedModule,
        groups: Sequence[EndGroup],
        qparams: Mapping[Node, QParams],
        weights: Mapping[Expr, tuple[Node, Tensor]],
        rng: np.random.Generator,
    ) -> None:
        super().__init__(model, {group.end for group in groups})
        self.groups, self.qparams, self.weights, self.rng = groups, qparams, weights, rng
        self.totals = (Totals(), Totals())
        self.errors: dict[Node, np.ndarray] = {}
        self.tape: Grad | None = None

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph forwards and backwards."""
        self.errors.clear()
        with Grad() as self.tape:
            super().execute(inputs)
            # A backward pass calls nothing for the tensors that it begins at: it begins at copies.
            ends = {group.end: F.copy(self.values[group.end]) for group in self.groups}
            self.tape(list(ends.values()), [self._draw(node, value) for node, value in ends.items()])

    def on_node(self, node: Node, value: Any) -> Any:
        """Attaches a callback for the gradient of ``node``."""
        if node in self.qparams or node in self.errors:
            value = F.copy(value)  # two nodes may share a tensor, and the graph's inputs are the caller's
            assert self.tape is not None
            exact = value.numpy() if node in self.qparams else None
            self.tape.wrt(value, callback=lambda gradient: self._take(node, exact, gradient.numpy()))
        return super().on_node(node, value)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``, and what its rounded weight changes."""
        results = self._run_differentiably(expr, inputs)
        if expr in self.weights and results:
            node, rounded = self.weights[expr]
            others = [rounded if n is node else v for n, v in zip(expr.inputs, inputs, strict=True)]
            changed = self._run_differentiably(expr, _detached(others))
            assert changed is not None
            self.errors[expr.outputs[0]] = changed[0].numpy() - results[0].numpy()
        return results

    def _run_differentiably(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes convolutions by a function with faster gradients."""
        if isinstance(expr, CallFunction) and expr.func is F.conv2d:
            args, kwargs = expr.unflatten_args(inputs)
            return (conv2d(*args, **kwargs),)
        if is_roi_align(expr):
            # Its gradient is added to memory that nothing has cleared.
            return interpret(expr, _detached(inputs))
        if isinstance(op := owner(expr), OpaqueOp):
            # It has no gradient, of which it would warn as if parameters were to learn.
            results = interpret(expr, _detached(inputs))
            if results is None:
                return None
            return with_slopes(op, inputs, results, lambda others: interpret(expr, _detached(others)) or ())
        return interpret(expr, inputs)

    def _draw(self, node: Node, value: Any) -> Tensor:
        """Draws signs, which give the estimate less variance than numbers of a normal distribution.

        Each group of columns counts relative to its own power; columns without power do not count.
        """
        sizes = np.zeros(value.shape, np.float32)
        for group in self.groups:
            if group.end is node:
                group.fill(sizes, 1.0 / math.sqrt(group.power))
        return Tensor(np.where(self.rng.random(value.shape, np.float32) < 0.5, -sizes, sizes))

    def _take(self, node: Node, exact: np.ndarray | None, gradient: np.ndarray) -> None:
        values, weights = self.totals
        if exact is not None:
            values.add(node, gradient, fake_quantize(exact, self.qparams[node]) - exact)
        if node in self.errors:
            weights.add(node, gradient, self.errors[node])


def _detached(inputs: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in inputs]
