"""The float graph on a few samples, which all measurements of `prepare` share: it runs once for them.

Nodes that are kept as in the file have gradients by slopes: without any, nothing before them would seem to
make noise. MegEngine's CPU kernel of ``roi_align`` takes regions on trust. It reads memory at the number of
the image in the first column of a region, whatever that number is. Its gradient is added to memory that
nothing has cleared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor

from qtrace.comparing.groups import LEAST_VALUES, ColumnGroup, find_groups
from qtrace.comparing.selections import SORTS, find_selecting, read_places
from qtrace.comparing.sums import noise_weight
from qtrace.data.batches import count_samples, evaluating, translate_errors
from qtrace.errors import GraphError
from qtrace.graph.interpreter import Interpreter, evaluate_fixed, fixed_nodes, needed_nodes, static_nodes
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.opaque import OpaqueOp, divides_by_inputs, opaque_calls
from qtrace.graph.stepping import SegmentEngine, finish_whole
from qtrace.graph.types import CallFunction, Expr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner, reads_shape, tensor_inputs
from qtrace.numerics import EXACT_INTEGERS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_SYNTHETIC_BATCHES = 2


def _nothing() -> None:
    """Shows no progress."""


class MeasuredRun:
    """The batches on which a float graph is measured, and what one run on them tells.

    Nothing runs before the first question. The run then reads the ranges of all values that depend on an
    input of the graph, so that later questions are answered without another run.

    Args:
        model: a flat, expanded float graph; it is not changed.
        samples: a few small batches as arguments of a call. None for random inputs of the traced shapes with
            the spectrum of natural images and variance 1. They are a stand-in, which may be far off if the
            network was trained on other inputs.
        seed: seed of the random inputs.
        advance: is called after each run of a batch, by whoever runs one.
        ranges: whether ranges will be asked for.
        engine: computes whole graphs where it can; None for MegEngine.

    Attributes:
        outputs: the nodes that stand for the outputs; without the scores of sorts, which are judged by rows.
        ends: the nodes at which noise is measured: these, the scores by which rows are selected, and what
            nodes without a gradient read.
    """

    def __init__(
        self,
        model: TracedModule,
        samples: Sequence[Arguments] | None,
        seed: int = 0,
        advance: Callable[[], object] = _nothing,
        ranges: bool = True,
        engine: SegmentEngine | None = None,
    ) -> None:
        self.model, self.samples, self.advance, self._reads_ranges = model, samples, advance, ranges
        self._engine = engine
        ends, scores = find_ends(model), find_scores(model)
        self.ends = tuple(dict.fromkeys((*ends, *scores, *find_unseen(model))))
        self.outputs = tuple(e for e in ends if e not in scores or e in model.graph.outputs) or ends
        self._generator = np.random.default_rng(seed)
        self._ranges: dict[Node, tuple[float, float]] = {}
        self._exact: list[dict[Node, np.ndarray]] = []

    @property
    def synthetic(self) -> bool:
        """Whether the batches are random inputs instead of data."""
        return self.samples is None

    @cached_property
    def batches(self) -> list[Sequence[Any]]:
        """The values of the graph's inputs for each batch: the module itself, then its tensors."""
        if self.samples is None:
            return [_synthetic_inputs(self.model, self._generator) for _ in range(_SYNTHETIC_BATCHES)]
        binder = Interpreter(self.model)
        return [binder.bind(args, kwargs)[1] for args, kwargs in self.samples]

    @property
    def counts(self) -> list[int]:
        """The number of samples of each batch."""
        return [count_samples((tuple(inputs[1:]), {})) for inputs in self.batches]

    def columns_are_known(self, node: TensorNode) -> bool:
        """Returns whether the columns of a layer's result may have enough values to have known ranges."""
        shape = node.shape
        few = shape is not None and len(shape) == 2 and _SYNTHETIC_BATCHES * int(shape[0]) < LEAST_VALUES
        return not (self.synthetic and few)

    def generator(self) -> np.random.Generator:
        """Returns a new generator of random numbers, in the state after the batches' own."""
        assert self.batches is not None
        return copy.deepcopy(self._generator)

    def ranges(self, nodes: Iterable[Node]) -> dict[Node, tuple[float, float]]:
        """Returns the smallest and largest value of each of ``nodes`` that has values.

        Raises:
            CalibrationError: when the graph does not run on the samples.
        """
        nodes = list(nodes)
        self._run(())
        self._read_fixed([n for n in nodes if n not in self._ranges])
        return {node: self._ranges[node] for node in nodes if node in self._ranges}

    def exact(self, nodes: Sequence[Node] = ()) -> Sequence[Mapping[Node, np.ndarray]]:
        """Returns for each batch the values of the ends and of ``nodes``, which are kept from now on.

        Raises:
            CalibrationError: when the graph does not run on the samples.
        """
        self._run(nodes)
        return self._exact

    def compute(self, graph: TracedModule, nodes: Collection[Node]) -> list[dict[Node, np.ndarray]] | None:
        """Returns for each batch the values of nodes of a graph; None where the engine does not compute them.

        Args:
            graph: a flat graph with the inputs of the float graph, in its present phases.
            nodes: nodes of the graph; only its outputs are computed at once.
        """
        ends = graph.graph.outputs
        if self._engine is None or self.samples is None or not set(nodes) <= set(ends):
            return None
        with evaluating(graph), quiet_engine(graph):
            values = finish_whole(graph, self.samples, self._engine)
        return None if values is None else [dict(zip(ends, own, strict=True)) for own in values]

    @cached_property
    def groups(self) -> tuple[EndGroup, ...]:
        """The groups of columns of like range of the ends."""
        # Random inputs tell nothing of what differs between samples.
        counts = [0] * len(self.batches) if self.synthetic else self.counts
        return find_end_groups(self.model, self.ends, self.exact(), counts)

    @cached_property
    def _fixed(self) -> set[Node]:
        return fixed_nodes(self.model)

    def _run(self, columns: Sequence[Node]) -> None:
        """Runs the graph on every batch, unless that tells nothing new; an error names the batch."""
        measured = tuple(dict.fromkeys((*self.ends, *columns)))
        if self._exact and all(node in self._exact[0] for node in measured):
            return
        if not self._reads_ranges and (computed := self.compute(self.model, measured)) is not None:
            self._exact = computed
            return
        graph = self.model.graph
        nodes = [*graph.inputs, *(node for expr in exprs(self.model) for node in expr.outputs)]
        values = frozenset(n for n in nodes if is_float_tensor(n) and n not in self._fixed)
        values = values if self._reads_ranges else frozenset()
        with evaluating(self.model), quiet_engine(self.model):
            statistics = RangeStatistics(self.model, measured, values)
            for index, inputs in enumerate(self.batches):
                with translate_errors(self.model, (tuple(inputs[1:]), {}), index):
                    statistics.execute(inputs)
                self.advance()
        self._ranges.update(statistics.ranges)
        self._exact = statistics.exact

    def _read_fixed(self, nodes: Sequence[Node]) -> None:
        """Reads the ranges of those of ``nodes`` that depend only on parameters and constants."""
        fixed = [node for node in nodes if node in self._fixed and is_float_tensor(node)]
        with evaluating(self.model), quiet_engine(self.model):
            values = evaluate_fixed(self.model, fixed) if fixed else {}
        for node, value in values.items():
            if value.size:
                array = value.numpy()
                self._ranges[node] = float(array.min()), float(array.max())


def _synthetic_inputs(model: TracedModule, rng: np.random.Generator) -> list[Any]:
    """Generates a batch of the traced shapes, after the module itself, which is the graph's first input."""
    tensors = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    regions = region_inputs(model)
    integer = int(divides_by_inputs(model))
    return [model, *(make_regions(n, rng) if n in regions else _synthetic(n, rng, integer) for n in tensors)]


def _synthetic(node: TensorNode, rng: np.random.Generator, integer: int) -> Tensor:
    """Generates a tensor; an image has amplitudes that fall with the frequency f as 1/f, and variance 1.

    Field 1987, "Relations between the statistics of natural images and the response properties of cortical
    cells", finds this spectrum. Integers are ``integer``: 0, a valid index of any table, or 1 where the graph
    divides by some.
    """
    if node.shape is None or node.dtype is None:
        raise GraphError(
            f"input {node.name} lacks a recorded shape or type, so noise cannot be measured on generated "
            "values: give prepare(samples=), or set placement to fastest or everything."
        )
    shape, dtype = tuple(int(n) for n in node.shape), np.dtype(node.dtype)
    if dtype.kind != "f":
        return Tensor(np.full(shape, integer, dtype))
    value = rng.standard_normal(shape)
    if len(shape) == 4:
        frequency = np.hypot(np.fft.fftfreq(shape[2])[:, None], np.fft.fftfreq(shape[3])[None, :])
        spectrum = np.fft.fft2(value) / np.maximum(frequency, 1.0 / max(shape[2:]))
        value = np.fft.ifft2(spectrum).real
        value /= max(float(value.std()), 1e-6)
    return Tensor(value.astype(dtype))


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
    if not 0 < 2 * total < EXACT_INTEGERS or not _is_float(result):
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
