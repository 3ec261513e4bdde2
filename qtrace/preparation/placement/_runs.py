"""The runs of a graph that measure noise: ranges, rounding errors, probes by gradients, and real rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.core.autodiff.grad import Grad

from qtrace.errors import SchemeError
from qtrace.gradients import conv2d
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import CallFunction, Expr, Node, TracedModule
from qtrace.graph.walk import owner
from qtrace.metrics import inner
from qtrace.numerics import choose
from qtrace.preparation.placement._groups import EndGroup
from qtrace.preparation.placement._regions import is_roi_align
from qtrace.preparation.placement._sites import Sites
from qtrace.preparation.placement._slopes import with_slopes
from qtrace.scheme import QParams, QScheme

__all__ = [
    "Probe",
    "RangeStatistics",
    "RoundedRun",
    "RoundingError",
    "RoundingErrors",
    "Run",
    "Totals",
    "choose_qparams",
]

_CACHED_VALUES = 1 << 14  # float32 values of a part that is rounded and multiplied while it is in a cache


class Run(Interpreter):
    """Runs a graph on the values of its inputs.

    Attributes:
        ends: the nodes at which noise is measured -> their values in the last run.
    """

    def __init__(self, model: TracedModule, sites: Sites) -> None:
        super().__init__(model)
        self.sites = sites
        self.ends: dict[Node, Any] = {}

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph once."""
        self.ends.clear()
        self._execute(self.traced.graph, list(inputs), None)

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the values of ends."""
        if node in self.sites.ends:
            self.ends[node] = value
        return value


class RangeStatistics(Run):
    """Collects the ranges of values, and the values of the ends in each batch.

    Attributes:
        ranges: node -> smallest and largest value.
        exact: for each batch, end -> its values.
    """

    def __init__(self, model: TracedModule, sites: Sites) -> None:
        super().__init__(model, sites)
        self.ranges: dict[Node, tuple[float, float]] = {}
        self.exact: list[dict[Node, np.ndarray]] = []

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph once, and keeps the values of the ends."""
        super().execute(inputs)
        self.exact.append({node: value.numpy() for node, value in self.ends.items()})

    def on_node(self, node: Node, value: Any) -> Any:
        """Updates the statistics of ``node``."""
        if node in self.sites.values and value.size:
            exact = value.numpy()
            low, high = float(exact.min()), float(exact.max())
            known = self.ranges.get(node, (low, high))
            self.ranges[node] = (float(np.minimum(known[0], low)), float(np.maximum(known[1], high)))
        return super().on_node(node, value)


def choose_qparams(
    ranges: Mapping[Node, tuple[float, float]], schemes: Mapping[Node, QScheme]
) -> dict[Node, QParams]:
    """Returns the parameters of each node whose range its scheme, read as one per tensor, can cover.

    Args:
        ranges: node -> its smallest and largest value.
        schemes: node -> its scheme.
    """
    covered = {}
    for node, (low, high) in ranges.items():
        try:
            covered[node] = choose(low, high, schemes[node].replace(axis=None))
        except SchemeError:  # a range that is not finite, or too wide
            continue
    return covered


@dataclass(frozen=True)
class RoundingError:
    """The rounding error of a value, computed when it is asked for: to keep it takes the time of new memory.

    Attributes:
        exact: the value.
        qparams: what it is rounded by.
    """

    exact: np.ndarray
    qparams: QParams

    def compute(self) -> np.ndarray:
        """Returns rounded minus exact values."""
        return _rounding_error(self.exact, self.qparams)

    def multiply(self, rows: np.ndarray) -> np.ndarray:
        """Returns the product of each row with that row of the error, in parts that fit into a cache."""
        exact = self.exact.reshape(rows.shape)
        products = np.empty(len(rows), rows.dtype)
        step = max(1, _CACHED_VALUES // max(exact.shape[1], 1))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            error = _rounding_error(exact[part], self.qparams)
            np.einsum("ij,ij->i", rows[part], error, out=products[part])
        return products


class RoundingErrors(Run):
    """Computes the rounding errors of values, and the errors of layers' results by their rounded weights.

    Attributes:
        values: node -> error.
        weights: output node of a layer -> error.
    """

    def __init__(self, model: TracedModule, sites: Sites, qparams: Mapping[Node, QParams]) -> None:
        super().__init__(model, sites)
        self.qparams = qparams
        self.values: dict[Node, RoundingError] = {}
        self.weights: dict[Node, np.ndarray] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Rounds the value of ``node``."""
        self.add_value(node, value)
        return super().on_node(node, value)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes a layer with its rounded weight, too."""
        results = interpret(expr, inputs)
        self.add_weight(expr, inputs, results, interpret)
        return results

    def add_value(self, node: Node, value: Any) -> None:
        """Keeps a value of ``node`` for its rounding error."""
        if node in self.qparams:
            self.values[node] = RoundingError(value.numpy(), self.qparams[node])

    def add_weight(
        self, expr: Expr, inputs: Sequence[Any], results: Sequence[Any] | None, compute: Callable[..., Any]
    ) -> None:
        """Computes the error of the result of the layer ``expr`` if its weight is rounded.

        Args:
            expr: the layer.
            inputs: the values that it reads.
            results: its results.
            compute: computes the results of an expr from its inputs, as ``results`` were computed.
        """
        if expr in self.sites.weights and results:
            node, rounded = self.sites.weights[expr]
            others = [rounded if n is node else v for n, v in zip(expr.inputs, inputs, strict=True)]
            changed = compute(expr, others)
            self.weights[expr.outputs[0]] = changed[0].numpy() - results[0].numpy()


def _rounding_error(exact: np.ndarray, qparams: QParams) -> np.ndarray:
    """Computes rounded minus exact values in few passes; ties go to even, which changes no power."""
    scheme, scale, zero_point = qparams.scheme, qparams.scale, int(qparams.zero_point)
    error = np.divide(exact, scale, out=np.empty_like(exact))
    np.rint(error, out=error)
    np.clip(error, scheme.qmin - zero_point, scheme.qmax - zero_point, out=error)
    error *= scale
    error -= exact
    return error


@dataclass
class Totals:
    """Sums over batches and probes of the squared products of gradients and errors.

    Attributes:
        whole: node -> sum over samples of the squares of whole products.
        channels: node -> sum over samples and channels of the squares of each channel's products.
    """

    whole: dict[Node, float] = field(default_factory=dict)
    channels: dict[Node, float] = field(default_factory=dict)

    def add(self, node: Node, gradient: np.ndarray, error: np.ndarray | RoundingError) -> None:
        """Adds the products of one node in one probe of one batch."""
        samples, channels = (*gradient.shape[:2], 1, 1)[:2]
        rows = gradient.reshape(samples * channels, -1)
        if isinstance(error, RoundingError):
            products = error.multiply(rows).astype(np.float64)
        else:
            products = np.einsum("ij,ij->i", rows, error.reshape(rows.shape)).astype(np.float64)
        sums = products.reshape(samples, channels).sum(axis=1)
        self.channels[node] = self.channels.get(node, 0.0) + inner(products, products)
        self.whole[node] = self.whole.get(node, 0.0) + inner(sums, sums)

    def powers(self) -> dict[Node, float]:
        """Returns the geometric mean of both sums of each node where they are finite."""
        means = {node: math.sqrt(self.whole[node] * self.channels[node]) for node in self.whole}
        return {node: mean for node, mean in means.items() if math.isfinite(mean)}


class Probe(Run):
    """Runs the graph with one random vector at the ends, and adds the products with its gradients to totals.

    Args:
        model: the graph.
        sites: what is measured.
        errors: the rounding errors of the batch; the run computes them if there are none yet.
        groups: the groups of columns to measure at.
        rng: the generator of the random vector.
        totals: the sums for values and for weights.
    """

    def __init__(
        self,
        model: TracedModule,
        sites: Sites,
        errors: RoundingErrors,
        groups: Sequence[EndGroup],
        rng: np.random.Generator,
        totals: tuple[Totals, Totals],
    ) -> None:
        super().__init__(model, sites)
        self.errors, self.groups, self.rng = errors, groups, rng
        self.is_first = not errors.values and not errors.weights
        kinds: tuple[Mapping[Node, np.ndarray | RoundingError], ...] = (errors.values, errors.weights)
        self.sums = tuple(zip(totals, kinds, strict=True))
        self.tape: Grad | None = None

    def execute(self, inputs: Sequence[Any]) -> None:
        """Runs the graph forwards and backwards."""
        with Grad() as self.tape:
            super().execute(inputs)
            # A backward pass calls nothing for the tensors that it begins at: it begins at copies.
            ends = {group.end: F.copy(self.ends[group.end]) for group in self.groups}
            self.tape(list(ends.values()), [self._draw(node, value) for node, value in ends.items()])

    def on_node(self, node: Node, value: Any) -> Any:
        """Attaches a callback for the gradient of ``node``."""
        if self.is_first:
            self.errors.add_value(node, value)
        if any(node in errors for _, errors in self.sums):
            value = F.copy(value)  # two nodes may share a tensor, and the graph's inputs are the caller's
            assert self.tape is not None
            self.tape.wrt(value, callback=lambda gradient: self._take(node, gradient))
        return super().on_node(node, value)

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes ``expr``, and what its rounded weight changes."""
        results = self._run_differentiably(expr, inputs)
        if self.is_first:
            self.errors.add_weight(expr, _detached(inputs), results, self._run_differentiably)
        return results

    def _run_differentiably(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes convolutions by a function with faster gradients."""
        if isinstance(expr, CallFunction) and expr.func is F.conv2d:
            args, kwargs = expr.unflatten_args(inputs)
            return (conv2d(*args, **kwargs),)
        if is_roi_align(expr):
            # Its gradient is added to memory that nothing has cleared: what is before it is measured apart.
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

    def _take(self, node: Node, gradient: Any) -> None:
        array = gradient.numpy()
        for total, errors in self.sums:
            if node in errors:
                total.add(node, array, errors[node])


class RoundedRun(Run):
    """Runs the graph with an error added to the value of one node, and measures its noise at the ends."""

    def __init__(self, model: TracedModule, sites: Sites, node: Node, error: np.ndarray) -> None:
        super().__init__(model, sites)
        self.node, self.error = node, error

    def on_node(self, node: Node, value: Any) -> Any:
        """Adds the error."""
        return super().on_node(node, value + Tensor(self.error) if node is self.node else value)

    def noise(self, exact: Mapping[Node, Any], groups: Sequence[EndGroup]) -> float:
        """Returns the sum over the groups of their noise relative to their power; infinite for other rows.

        Args:
            exact: the values of the ends without the error.
            groups: the groups of columns to measure at.
        """
        return sum(g.noise(exact[g.end].numpy(), self.ends[g.end].numpy()) for g in groups)


def _detached(inputs: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in inputs]
