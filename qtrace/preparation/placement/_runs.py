"""The runs of a graph that measure: its ends, ranges, the values of ends, and probes by gradients.

Nodes that are kept as in the file have gradients by slopes: without any, nothing before them would seem to
make noise. MegEngine's CPU kernel of ``roi_align`` takes regions on trust. It reads memory at the number of
the image in the first column of a region, whatever that number is. Its gradient is added to memory that
nothing has cleared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.core.autodiff.grad import Grad

from qtrace.comparing.groups import ColumnGroup, find_groups
from qtrace.comparing.selections import SORTS, find_selecting, read_places
from qtrace.comparing.sums import inner, noise_weight
from qtrace.gradients import conv2d
from qtrace.graph.dataflow import needed_nodes, static_nodes
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.opaque import OpaqueOp, opaque_calls
from qtrace.graph.types import CallFunction, Expr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner, reads_shape, tensor_inputs
from qtrace.numerics import fake_quantize
from qtrace.scheme import QParams

__all__ = [
    "EndGroup",
    "Probe",
    "RangeStatistics",
    "Run",
    "find_end_groups",
    "find_ends",
    "find_scores",
    "find_unseen",
    "make_regions",
    "region_inputs",
]


@dataclass(frozen=True)
class EndGroup:
    """Columns of like range of one end.

    Attributes:
        end: the node at which noise is measured.
        columns: its columns.
        power: the sum of their squares in all batches, neither 0 nor infinite, divided by ``weight``.
        weight: how much the noise counts: more than 1 if the values hardly differ between samples; see
            `qtrace.comparing.sums.noise_weight`.
    """

    end: Node
    columns: ColumnGroup
    power: float
    weight: float

    def fill(self, values: np.ndarray, number: float) -> None:
        """Sets the columns of an array that has the end's shape."""
        index: list[Any] = [slice(None)] * values.ndim
        if self.columns.axis is not None:
            index[self.columns.axis] = self.columns.columns
        values[tuple(index)] = number

    def noise(self, exact: np.ndarray, changed: np.ndarray) -> float:
        """Returns the noise of one batch relative to the power of all; infinite for other rows."""
        if exact.shape != changed.shape:
            return math.inf
        error = self.columns.select(changed).astype(np.float64) - self.columns.select(exact)
        return float(np.square(error).sum()) / self.power


def find_end_groups(
    model: TracedModule,
    ends: Sequence[Node],
    exact: Sequence[Mapping[Node, np.ndarray]],
    counts: Sequence[int],
    every_column: bool = False,
) -> tuple[EndGroup, ...]:
    """Finds the groups of all ends whose values are neither 0 everywhere nor infinite.

    Args:
        model: the graph.
        ends: the nodes at which noise is measured.
        exact: for each batch the values of the ends.
        counts: the number of samples of each batch.
        every_column: whether columns that tell nothing count like others.
    """
    values = [[batch[end] for end in ends] for batch in exact]
    groups = []
    for columns in find_groups(model, values, ends=ends, every_column=every_column):
        end = ends[columns.output]
        parts = [columns.select(batch[end]) for batch in exact]
        power = sum(float(np.square(part, dtype=np.float64).sum()) for part in parts)
        if 0 < power < math.inf:
            weight = noise_weight(parts, counts)
            groups.append(EndGroup(end, columns, power / weight, weight))
    return tuple(groups)


_RESIZING = ("Resize", "Upsample")
# Each value of their results is a value of an input, or a constant.
_MOVING = ("ScatterND", "ScatterElements", "Scatter", "GatherND", "MaxUnpool", "ReverseSequence", "Compress")
_EXACT = 1 << 23  # float32 holds whole numbers up to twice that


def has_slopes(op: object) -> bool:
    """Returns whether the result of a node that is kept gets a gradient by `with_slopes`."""
    return isinstance(op, OpaqueOp) and op.operators in (*_RESIZING, *_MOVING)


def with_slopes(
    op: OpaqueOp, inputs: Sequence[Any], results: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]
) -> Sequence[Any]:
    """Gives the result of a node that resizes images or moves values a gradient.

    Args:
        op: the node.
        inputs: the module and the node's inputs.
        results: what the node gives for them.
        run: runs the node on other inputs.
    """
    if len(results) != 1 or not isinstance(results[0], Tensor):
        return results
    near = None
    if op.operators in _RESIZING:
        near = _resized(inputs[1], results[0])
    elif op.operators in _MOVING:
        near = _moved(inputs, results[0], run)
    return results if near is None else (near + (results[0] - near).detach(),)


def _resized(image: Any, result: Tensor) -> Tensor | None:
    """Resizes bilinearly: near enough to any resizing for an estimate."""
    if len(image.shape) != 4 or tuple(image.shape[:2]) != tuple(result.shape[:2]):
        return None
    return F.nn.interpolate(image, size=tuple(int(n) for n in result.shape[2:]), mode="bilinear")


def _moved(
    inputs: Sequence[Any], result: Tensor, run: Callable[[Sequence[Any]], Sequence[Any]]
) -> Tensor | None:
    """Takes the values of the result out of those of the inputs, whose places two runs on numbers tell."""
    places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and _is_float(value)]
    sizes = [int(np.prod(inputs[i].shape)) for i in places]
    total = sum(sizes)
    if not 0 < total < _EXACT or not _is_float(result):
        return None
    moved = []
    for first in (1, total + 1):
        numbers = np.split(np.arange(first, first + total, dtype=np.float32), np.cumsum(sizes)[:-1])
        others = list(inputs)
        for i, values in zip(places, numbers, strict=True):
            others[i] = Tensor(values.reshape(inputs[i].shape))
        moved.append(run(others)[0].numpy())
    taken = moved[1] - moved[0] == total  # the others are constants of the node
    chosen = np.where(taken, moved[0] - 1, 0).astype(np.int32).reshape(-1)
    values = F.concat([F.flatten(inputs[i]) for i in places])
    return F.reshape(values[Tensor(chosen)], result.shape) * Tensor(taken.astype(np.float32))


def _is_float(value: Any) -> bool:
    return bool(np.dtype(value.dtype).kind == "f")


_LARGEST_CORNER = 64.0  # in pixels; what lies outside of the image is pooled as 0


def is_roi_align(expr: Expr) -> bool:
    """Returns whether ``expr`` calls MegEngine's ``roi_align``."""
    return isinstance(expr, CallFunction) and expr.func is F.vision.roi_align


def region_inputs(model: TracedModule) -> set[Node]:
    """Returns the inputs of the graph from which ``roi_align`` gets its regions."""
    regions = {node for expr in exprs(model) if is_roi_align(expr) for node in expr.inputs[1:]}
    before = needed_nodes(model, shapes=True, of=regions)
    return {node for node in model.graph.inputs if node in before and len(node.shape or ()) == 2}


def make_regions(node: TensorNode, rng: np.random.Generator) -> Tensor:
    """Generates regions of the first image: its number, then two corners."""
    assert node.shape is not None
    count, columns = (int(n) for n in node.shape)
    corners = np.sort(rng.uniform(0.0, _LARGEST_CORNER, (count, 2, 2)), axis=1).reshape(count, 4)
    value = np.zeros((count, columns), np.float32)
    width = min(columns, 4)
    value[:, columns - width :] = corners[:, :width]
    return Tensor(value)


def find_ends(model: TracedModule) -> tuple[Node, ...]:
    """Returns the float outputs, and for outputs of integers the float values that they are computed from."""
    static = static_nodes(model)
    ends: dict[Node, None] = {}
    visited: set[Node] = set()
    waiting = list(model.graph.outputs)
    while waiting:
        node = waiting.pop(0)
        if node in visited or node in static or not isinstance(node, TensorNode):
            continue
        visited.add(node)
        if is_float_tensor(node):
            ends[node] = None
        elif not isinstance(node.expr, Input) and not reads_shape(node.expr):
            waiting += tensor_inputs(node.expr)
    return tuple(ends)


def find_scores(model: TracedModule) -> tuple[Node, ...]:
    """Returns the scores by which the graph sorts rows that leave it: their noise exchanges rows."""
    static, needed = static_nodes(model), needed_nodes(model)
    rankings = [(e, call) for e in find_selecting(model) if (call := read_places(e)) is not None]
    read = [e for e, call in rankings if call.kind in SORTS and not needed.isdisjoint(e.outputs)]
    scores = (n for e in read for n in tensor_inputs(e) if is_float_tensor(n) and n not in static)
    return tuple(dict.fromkeys(scores))


def find_unseen(model: TracedModule) -> tuple[Node, ...]:
    """Returns the values that nodes without a gradient read: no probe at the outputs sees their noise."""
    static, needed = static_nodes(model), needed_nodes(model)
    read = [
        expr
        for expr in opaque_calls(model)
        if not has_slopes(owner(expr)) and any(n in needed and is_float_tensor(n) for n in expr.outputs)
    ]
    values = (n for e in read for n in tensor_inputs(e) if is_float_tensor(n) and n not in static)
    return tuple(dict.fromkeys(values))


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
