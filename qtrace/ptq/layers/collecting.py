"""Collects the statistics of layers in one run of the float graph and one of the quantized graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.graph.stepping import Stepper, as_array
from qtrace.graph.tensors import PART_BYTES, read_array
from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import exprs, get_module
from qtrace.ops import OpCall
from qtrace.process.together import Together
from qtrace.ptq.base import CalibratedTask
from qtrace.ptq.layers.held_back import held_back
from qtrace.ptq.layers.positions import draw_positions, products, read_rows, result_rows
from qtrace.ptq.layers.quantized import QuantizedLayer, call_groups
from qtrace.ptq.layers.second_order import MAX_JOINT_INPUTS, grouped
from qtrace.ptq.layers.statistics import LayerStatistics, fold_of

__all__ = ["StatisticsCollector"]

# Bytes of the float outputs of a batch, and of the rows of all batches, up to which layers share a run.
_MAX_OUTPUT_BYTES = 512 << 20
_MAX_ROW_BYTES = 256 << 20

# Rows of all samples for each input that is rounded jointly, and for a layer. More of them told nothing on
# samples that were not seen: 4, 8 and 16 gave what all gave, within what other draws of rows differ by.
_ROWS_OF_AN_INPUT, _LEAST_ROWS = 8, 2048

# Inputs of a row up to which more positions count.
_LONG_ROW = 256


@dataclass(frozen=True)
class _Reference:
    """The float output of a call at some positions of one batch, and how many positions each stands for."""

    positions: np.ndarray
    rows: np.ndarray
    weight: float


class StatisticsCollector:
    """Goes through both graphs once and collects the statistics of each layer before it changes.

    The float graph shows the outputs of many layers in one run. The quantized graph stops before each layer,
    since what the layers after it read depends on its change.

    Args:
        task: the model, the reference and the batches.
        layers: the layers, in the order of `quantized_layers`.
        places: the most positions of each sample that count.
        supported: the kinds of layers whose inputs count; of others the outputs do.
        together: the threads that compute.
    """

    def __init__(
        self,
        task: CalibratedTask,
        layers: Sequence[QuantizedLayer],
        places: int,
        supported: Sequence[str],
        together: Together,
    ) -> None:
        twin = {n.name: e for e in exprs(task.reference) for n in e.outputs}
        self._twin = {call.expr: twin[call.out.name] for layer in layers for call in layer.calls}
        groups = call_groups(layers)
        self.model, self._places, self._supported = task.model, places, supported
        self._together = together
        self.quantized = Stepper(task.model, task.batches, groups, task.engine)
        self.float = Stepper(
            task.reference, task.batches, [[self._twin[e] for e in g] for g in groups], task.engine
        )
        self.count = self.quantized.count
        self.held = held_back(self.count)
        self._samples: dict[Expr, int] = {}  # of the first batch: samples of a shorter last one weigh no more
        self._waiting = list(layers)
        self._references: dict[tuple[Expr, int], _Reference] = {}

    def collect(self, layer: QuantizedLayer) -> LayerStatistics:
        """Collects the statistics of the next layer."""
        if (layer.call.expr, 0) not in self._references:
            self._run_float(self._next_run(layer))
        self.quantized.advance(layer.call.expr)
        weight = grouped(read_array(get_module(self.model, layer.weight)).astype(np.float32, copy=False))
        reads = layer.call.kind in self._supported
        statistics = LayerStatistics(layer, weight.shape[-1] if reads else 0)
        for call in layer.calls:
            self._collect_call(statistics, call, weight, reads)
        statistics.finish(self._together)
        return statistics

    def _collect_call(
        self, statistics: LayerStatistics, call: OpCall, weight: np.ndarray, reads: bool
    ) -> None:
        """Adds the rows of all batches, the rows of each fold next to the others'.

        Args:
            statistics: what the rows are added to.
            call: a call of the layer.
            weight: the weight of the layer (G, O, D).
            reads: whether the inputs of the layer count.
        """
        batches = range(self.count)
        references = [self._references.pop((call.expr, batch)) for batch in batches]
        values = [self._value(call, batch, reads) for batch in batches]
        biases = [self._bias(call, batch) if reads else None for batch in batches]
        shape, axis = self._shape(statistics.layer), statistics.layer.axis

        def add(batch: int) -> None:
            reference, x = references[batch], as_array(values[batch])
            if reads:
                read, missed = _read(x, call, shape, reference, weight, biases[batch])
            else:
                rows = result_rows(x, axis, 1, reference.positions)
                read, missed = np.empty((*rows.shape[:2], 0), np.float32), reference.rows - rows
            self._add(statistics, batch, read, missed, reference)

        def add_all(batches: Iterable[int]) -> None:
            for batch in batches:
                add(batch)

        if not all(isinstance(value, np.ndarray) for value in values):  # MegEngine's, only for this thread
            add_all(batches)
            return
        folds: dict[int, list[int]] = {}
        for batch in batches:
            folds.setdefault(fold_of(batch, self.count, self.held), []).append(batch)
        if self.count > 1:
            for fold in folds:
                statistics.open(fold)  # in the order of the batches
        self._together.map(add_all, folds.values())

    def _value(self, call: OpCall, batch: int, reads: bool) -> Any:
        """Returns what a call reads in a batch; what it gives if its inputs do not count."""
        if reads:
            return self.quantized.value(call.inputs[0], batch)
        return self.quantized.outputs(call.expr, batch, range(self.count))[0]

    def _bias(self, call: OpCall, batch: int) -> np.ndarray | None:
        return None if call.bias is None else as_array(self.quantized.value(call.bias, batch))

    def _add(
        self,
        statistics: LayerStatistics,
        batch: int,
        read: np.ndarray,
        missed: np.ndarray,
        reference: _Reference,
    ) -> None:
        """Adds the rows of a batch to its fold; a single batch is halved."""
        halves = [(fold_of(batch, self.count, self.held), slice(None))]
        if self.count == 1 and missed.shape[1] > 1:
            middle = (missed.shape[1] + 1) // 2
            halves = [(0, slice(0, middle)), (1, slice(middle, None))]
        for fold, part in halves:
            rows = reference.rows[:, part]
            statistics.add(fold, batch, read[:, part], missed[:, part], rows, reference.weight)

    def _shape(self, layer: QuantizedLayer) -> tuple[int, ...]:
        return tuple(int(n) for n in get_module(self.model, layer.weight).shape)

    def _count_places(self, shape: tuple[int, ...]) -> int:
        """Returns the most positions that count: more where rows, of all groups, are short."""
        return self._places * max(1, _LONG_ROW // max(_inputs(shape), 1))

    def _enough(self, shape: tuple[int, ...], samples: int) -> int:
        """Returns the positions of each sample beyond which the rows of all tell nothing new.

        Args:
            shape: the shape of the weight.
            samples: the samples of a batch, the same number for all batches.
        """
        rows = max(_ROWS_OF_AN_INPUT * min(_inputs(shape), MAX_JOINT_INPUTS), _LEAST_ROWS)
        return -(-rows // (self.count * samples))

    def _next_run(self, first: QuantizedLayer) -> list[QuantizedLayer]:
        """Returns the layers from ``first`` on whose float outputs are computed in one run."""
        start, sizes, weights = self._waiting.index(first), [0.0, 0.0], 0.0
        for stop, layer in enumerate(self._waiting[start:], start):
            shape = self._shape(layer)
            for call in layer.calls:
                size = 4 * float(np.prod(call.out.shape))
                rows = min(self._count_places(shape) / max(float(np.prod(call.out.shape[2:])), 1.0), 1.0)
                sizes = [sizes[0] + size, sizes[1] + size * rows * self.count]
            weights += 4 * float(np.prod(shape))
            full = sizes[0] > _MAX_OUTPUT_BYTES or sizes[1] > _MAX_ROW_BYTES or weights > PART_BYTES
            if stop > start and full:
                return self._waiting[start:stop]
        return self._waiting[start:]

    def _run_float(self, layers: Sequence[QuantizedLayer]) -> None:
        """Computes the float outputs of some layers, and keeps some positions of them."""
        calls = [(layer, call) for layer in layers for call in layer.calls]
        shapes = [self._shape(layer) for layer, _ in calls]

        def reference(batch: int, number: int, value: np.ndarray) -> _Reference:
            (layer, call), shape = calls[number], shapes[number]
            axes = value.shape[1:-1] if layer.axis == -1 else value.shape[2:]
            size = int(np.prod(axes))
            samples = self._samples.setdefault(call.expr, len(value))
            places = min(self._count_places(shape), self._enough(shape, samples))
            positions = draw_positions(size, places, (batch, number))
            groups = shape[0] if call.kind in self._supported and len(shape) == 5 else 1
            rows = result_rows(value, layer.axis, groups, positions)
            weight = spacing(size, positions) if len(layer.calls) > 1 else 1
            return _Reference(positions, rows, weight)

        def sample(batch: int, values: list[np.ndarray]) -> None:
            sampled = self._together.map(lambda item: reference(batch, *item), enumerate(values))
            pairs = zip(calls, sampled, strict=True)
            self._references.update({(call.expr, batch): rows for (_, call), rows in pairs})

        nodes: list[TensorNode] = [self._twin[call.expr].outputs[0] for _, call in calls]
        last = max((self._twin[call.expr] for _, call in calls), key=self.float.position)
        self.float.watch(last, nodes, sample)


def _inputs(shape: tuple[int, ...]) -> int:
    """Returns the inputs of a row of a weight, of all groups together."""
    return int(np.prod(shape)) // (shape[1] if len(shape) == 5 else shape[0])


def _read(
    x: np.ndarray,
    call: OpCall,
    shape: tuple[int, ...],
    reference: _Reference,
    weight: np.ndarray,
    bias: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a call reads, and what it misses with its weight (G, O, D) and its bias."""
    read = read_rows(x, call, shape, reference.positions)
    missed: np.ndarray = reference.rows - products(read, weight)
    if bias is not None:
        missed -= bias.reshape(reference.rows.shape[0], 1, -1)
    return read, missed


def spacing(size: int, positions: np.ndarray) -> float:
    """Returns for how many positions of a map each drawn one stands: in a large map it counts for more."""
    return size / len(positions)
