"""Statistics of quantized layers, by which the error of any weight and bias is algebra; their collection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from qtrace.errors import CalibrationError
from qtrace.graph.kernels import PART_BYTES, STAGE_BYTES, read_array
from qtrace.graph.stepping import Stepper, as_array
from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import exprs, get_module
from qtrace.ops import OpCall
from qtrace.process import Together
from qtrace.ptq.base import CalibratedTask
from qtrace.ptq.layers.held_back import OutputErrors, held_back
from qtrace.ptq.layers.quantized import QuantizedLayer, call_groups
from qtrace.ptq.layers.second_order import MAX_JOINT_INPUTS, SecondMoments, added, grouped, parts

# One of as many positions in the padding is set to 0 by itself; more of them with all others.
_FEW = 24


def draw_positions(size: int, places: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws one position of each of ``places`` equal parts of a feature map; all if there are so few.

    Equal distances would meet the same columns in each row of a map whose width they divide.

    Args:
        size: number of positions.
        places: the most positions that are drawn.
        seed: integers that decide, from the batch and the layer, so that every run draws the same.
    """
    if size <= places:
        return np.arange(size)
    edges = np.arange(places + 1) * size // places
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:])


def read_rows(x: np.ndarray, call: OpCall, shape: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
    """Returns what a layer reads for some positions of its output: (G, N * P, D) of G groups and D inputs.

    Args:
        x: the input of the layer, (N, C, H, W) for a convolution, (N, ..., C) for a linear layer.
        call: the layer.
        shape: the shape of its weight.
        positions: indices of the positions of a sample.
    """
    if call.kind == "linear":
        rows = x.reshape(len(x), -1, x.shape[-1])[:, positions]
        return rows.reshape(1, -1, x.shape[-1])
    (top, left), stride, dilation = (call.attrs[n] for n in ("padding", "stride", "dilation"))
    samples, channels, height, width = x.shape
    columns = (width + 2 * left - dilation[1] * (shape[-1] - 1) - 1) // stride[1] + 1
    down = np.arange(shape[-2])[:, None] * dilation[0] + positions // columns * stride[0] - top
    across = np.arange(shape[-1])[:, None] * dilation[1] + positions % columns * stride[1] - left
    inside = ((down >= 0) & (down < height))[:, None] & ((across >= 0) & (across < width))
    down, across = np.clip(down, 0, height - 1), np.clip(across, 0, width - 1)
    index = (down[:, None] * width + across).reshape(-1)
    maps, outside = x.reshape(samples, channels, -1), np.flatnonzero(~inside)
    windows = _take(maps, index) if len(outside) else _picked(maps, index)
    if _FEW * len(outside) > len(index):
        windows *= inside.reshape(-1)
    elif len(outside):
        windows[:, :, outside] *= False
    return _rows(windows.reshape(samples, channels, -1, len(positions)), shape[0] if len(shape) == 5 else 1)


def result_rows(y: np.ndarray, axis: int, groups: int, positions: np.ndarray) -> np.ndarray:
    """Returns the output of a layer at some positions: (G, N * P, O).

    Args:
        y: the output.
        axis: its axis that counts channels: 1, or -1 where it is the last.
        groups: number of groups.
        positions: indices of the positions of a sample.
    """
    if axis == -1:
        return y.reshape(len(y), -1, y.shape[-1])[:, positions].reshape(1, -1, y.shape[-1])
    rows = _picked(y.reshape(len(y), y.shape[1], -1), positions)
    return _rows(rows.reshape(len(y), y.shape[1], 1, len(positions)), groups)


def _rows(values: np.ndarray, groups: int) -> np.ndarray:
    """Turns (N, C, K, P) into the rows of each of G groups, (G, N * P, C / G * K), a view of the reverse."""
    samples, channels, kernel, count = values.shape
    split = values.reshape(samples, groups, channels // groups, kernel, count).transpose(1, 2, 3, 0, 4)
    return split.reshape(groups, channels // groups * kernel, samples * count).transpose(0, 2, 1)


def products(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiplies rows (G, P, D) by weights (G, O, D): (G, P, O), in the order of the rows in memory."""
    if rows.strides[2] > rows.strides[1]:
        return np.asarray((weight @ rows.transpose(0, 2, 1)).transpose(0, 2, 1))
    return np.asarray(rows @ weight.transpose(0, 2, 1))


def _picked(maps: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns positions of maps (N, C, P), or the maps themselves if these are all in their order."""
    size = maps.shape[2]
    return maps if np.array_equal(positions, np.arange(size)) else _take(maps, positions)


def _take(maps: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns positions of maps (N, C, P), all of which exist: numpy is faster if it checks none."""
    return np.take(maps, positions, axis=2, mode="clip")


HELD = 2
"""The fold of the samples that are held back; 0 and 1 are the halves of all others."""

_FOLDS = (0, 1, HELD)

# Rows that are multiplied at once: sums in float32 stay exact enough, and more rows take no less time.
_PRODUCT_ROWS = 1024


def fold_of(number: int, count: int, held: Sequence[int]) -> int:
    """Returns the fold of a batch of ``count``."""
    return HELD if number in held else 2 * number // count


@dataclass(frozen=True)
class _Rows:
    """What a layer reads, misses and should give in one batch: (G, P, D), (G, P, O); and their weight."""

    read: np.ndarray
    missed: np.ndarray
    weight: float


@dataclass
class RowSums:
    """Sums over the rows of one fold.

    Attributes:
        inputs: number of inputs D of a group.
        moments: the moments of each of the `parts` of the inputs.
        square: the sum of the squares of what is missed.
        signal: the sum of the squared references.
        batches: the rows of each batch, where they are kept.
        keep: whether they are kept.
    """

    inputs: int
    keep: bool
    moments: list[SecondMoments] = field(default_factory=list)
    square: float = 0.0
    signal: float = 0.0
    batches: dict[int, list[_Rows]] = field(default_factory=dict)
    _waiting: list[_Rows] = field(default_factory=list)
    _size: int = 0

    def add(
        self, batch: int, read: np.ndarray, missed: np.ndarray, reference: np.ndarray, weight: float
    ) -> None:
        """Adds the rows of a batch: inputs (G, P, D), what is missed and the reference, both (G, P, O)."""
        rows = _Rows(read, missed, weight)
        self.square += weight * _squared(missed)
        self.signal += weight * _squared(reference)
        if self.keep:
            self.batches.setdefault(batch, []).append(rows)
        if self._waiting and (
            weight != self._waiting[0].weight or self._size + read.shape[1] > _PRODUCT_ROWS
        ):
            self.flush()
        self._waiting.append(rows)
        self._size += read.shape[1]

    def flush(self) -> None:
        """Adds up the rows that wait to be multiplied together."""
        if not self._waiting:
            return
        weight = self._waiting[0].weight
        read, missed = (
            part[0] if len(part) == 1 else np.concatenate(part, axis=1)
            for part in ([rows.read for rows in self._waiting], [rows.missed for rows in self._waiting])
        )
        split = parts(self.inputs)
        whole = len(split) == 1
        for start in range(0, read.shape[1], _PRODUCT_ROWS):
            piece = slice(start, start + _PRODUCT_ROWS)
            crossed = missed[:, piece] if whole else missed[:, piece, :0]
            rows = [read[:, piece, p] for p in split]
            if self.moments:
                pairs = zip(self.moments, rows, strict=True)
                self.moments = [moments.with_rows(row, crossed, weight) for moments, row in pairs]
            else:
                sums = [SecondMoments.of(row, crossed) for row in rows]
                self.moments = sums if weight == 1 else [weight * m for m in sums]
        self._waiting, self._size = [], 0


@dataclass
class LayerStatistics:
    """The sums of one layer in each fold.

    Attributes:
        layer: the layer.
        folds: fold -> its sums, for those that have samples.
        wide: whether the inputs are more than are rounded jointly; rows then take the place of moments.
    """

    layer: QuantizedLayer
    inputs: int
    folds: dict[int, RowSums] = field(default_factory=dict)

    @property
    def wide(self) -> bool:
        return len(parts(self.inputs)) > 1

    @property
    def held(self) -> bool:
        """Whether samples are held back."""
        return HELD in self.folds

    def add(
        self,
        fold: int,
        batch: int,
        read: np.ndarray,
        missed: np.ndarray,
        reference: np.ndarray,
        weight: float,
    ) -> None:
        """Adds the rows of a batch to a fold; see `RowSums.add`."""
        self.open(fold).add(batch, read, missed, reference, weight)

    def open(self, fold: int) -> RowSums:
        """Returns the sums of a fold, which has samples."""
        if fold not in self.folds:
            self.folds[fold] = RowSums(self.inputs, self.wide or fold == HELD)
        return self.folds[fold]

    def finish(self, together: Together) -> None:
        """Adds up what waits.

        Args:
            together: the threads that compute.

        Raises:
            CalibrationError: when a value is not finite.
        """
        together.map(RowSums.flush, self.folds.values())
        for sums in self.folds.values():
            if not np.isfinite(sums.square + sums.signal):
                raise CalibrationError(
                    f"{self.layer.name} has values that are NaN or infinite, and the model is unchanged: "
                    "check the calibration data and the layers before this one."
                )

    def moments(self, folds: Sequence[int]) -> list[SecondMoments]:
        """Returns the moments of some folds, which are not to be changed; [] without samples."""
        return self._whole if tuple(folds) == _FOLDS else self._moments(folds)

    @cached_property
    def _whole(self) -> list[SecondMoments]:
        return self._moments(_FOLDS)

    def _moments(self, folds: Sequence[int]) -> list[SecondMoments]:
        total: list[SecondMoments] = []
        for fold in folds:
            if fold in self.folds:
                total = added(total, self.folds[fold].moments)
        return total


class WeightErrors:
    """The errors of a layer's output with its weight changed, each of which is computed once.

    Attributes:
        change: as the argument.

    Args:
        statistics: the sums of the layer.
        change: the change of the weight, (G, O, D), which stays as it is meanwhile; None for none.
    """

    def __init__(self, statistics: LayerStatistics, change: np.ndarray | None) -> None:
        self._statistics, self.change = statistics, change
        self._rows: dict[int, dict[int, OutputErrors]] = {}
        self._total: OutputErrors | None = None

    @property
    def total(self) -> OutputErrors:
        """The errors in all samples."""
        if self._total is None:  # no cached_property, whose lock all objects share
            self._total = self._sum()
        return self._total

    def compute(self, whole: bool = True) -> WeightErrors:
        """Computes the errors before they are asked for; returns this object.

        Args:
            whole: whether to compute ``total``, too, next to ``held``.
        """
        if whole:
            self._total = self._sum()
        if self._statistics.held:
            self._in_batches(HELD)
        return self

    def _sum(self) -> OutputErrors:
        folds = [fold for fold in _FOLDS if fold in self._statistics.folds]
        if self._by_rows:
            return _total([e for fold in folds for e in self._in_batches(fold).values()])
        sums = [self._statistics.folds[fold] for fold in folds]
        square, signal = (sum(getattr(s, name) for s in sums) for name in ("square", "signal"))
        missed, count = self._missed(_FOLDS)
        if self.change is not None:
            moments = self._statistics.moments(_FOLDS)[0]
            crossed = np.einsum("god,gdo->", self.change, moments.cross)
            bent = np.einsum("god,god->", self.change @ moments.square, self.change)
            square = float(square - 2 * crossed + bent)
        return OutputErrors(count, missed, square, signal)

    @property
    def fitted_mean(self) -> np.ndarray:
        """The mean error of each channel in the samples that are not held back, (C,)."""
        if self._by_rows:
            folds = [fold for fold in (0, 1) if fold in self._statistics.folds]
            return _total([e for fold in folds for e in self._in_batches(fold).values()]).mean
        missed, count = self._missed((0, 1))
        return missed / max(count, 1)

    @property
    def held(self) -> dict[int, OutputErrors]:
        """The errors in each batch that is held back."""
        return self._in_batches(HELD) if self._statistics.held else {}

    @property
    def _by_rows(self) -> bool:
        return self.change is not None and self._statistics.wide

    def _in_batches(self, fold: int) -> dict[int, OutputErrors]:
        if fold not in self._rows:
            self._rows[fold] = _errors_by_rows(self._statistics.folds[fold], self.change)
        return self._rows[fold]

    def _missed(self, folds: Sequence[int]) -> tuple[np.ndarray, float]:
        """Returns the sums of what each channel misses, (C,), and the number of positions."""
        moments = self._statistics.moments(folds)
        first, count = moments[0], moments[0].count
        if not first.missed.size:  # of a wide layer, or of one whose inputs do not count
            sums = [self._statistics.folds[fold] for fold in folds if fold in self._statistics.folds]
            rows = [r for s in sums for batch in s.batches.values() for r in batch]
            totals = [r.weight * r.missed.sum(axis=1, dtype=np.float64) for r in rows]
            return np.sum(totals, axis=0).reshape(-1), count
        total = sum((m.missed for m in moments[1:]), first.missed)
        if self.change is not None:
            total = total - np.einsum("god,gd->go", self.change, first.read)
        return total.reshape(-1), count


def _total(errors: Sequence[OutputErrors]) -> OutputErrors:
    first, *others = errors
    return sum(others, first)


def _errors_by_rows(sums: RowSums, change: np.ndarray | None) -> dict[int, OutputErrors]:
    weight = None if change is None else change.astype(np.float32)
    share = sums.signal / max(len(sums.batches), 1)
    result: dict[int, OutputErrors] = {}
    for batch, several in sums.batches.items():
        each = []
        for rows in several:
            error = rows.missed if weight is None else rows.missed - products(rows.read, weight)
            total = rows.weight * error.sum(axis=1, dtype=np.float64).reshape(-1)
            count = rows.weight * error.shape[1]
            each.append(OutputErrors(count, total, rows.weight * _squared(error), share / len(several)))
        result[batch] = _total(each)
    return result


def _squared(values: np.ndarray) -> float:
    """Sums the squares of float32 values: those side by side in memory in float32, their sums in float64."""
    rows = values.transpose(0, 2, 1) if values.strides[2] > values.strides[1] else values
    return float(np.einsum("gpo,gpo->gp", rows, rows).sum(dtype=np.float64))


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
        joint = min(_inputs(shape) // (shape[0] if len(shape) == 5 else 1), MAX_JOINT_INPUTS)
        rows = max(_ROWS_OF_AN_INPUT * joint, _LEAST_ROWS)
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
            full = sizes[0] > STAGE_BYTES or sizes[1] > STAGE_BYTES or weights > PART_BYTES
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
