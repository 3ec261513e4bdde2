"""A calibrated graph with some of its layers in float, without preparing it anew."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qtrace.calibration.choice import choose_segments
from qtrace.comparing.groups import find_groups
from qtrace.comparing.runs import begin_outputs, outputs_of, rows_of
from qtrace.comparing.selections import SelectedShares, SelectionTape
from qtrace.comparing.sums import EQUAL_DB, Outputs
from qtrace.data.batches import as_arguments, check_batches, evaluating
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from qtrace.process import Together, prefetch
from qtrace.sensitivity.layers import FloatValues, RaisableLayer, active_groups, find_layers
from qtrace.sensitivity.metrics import DetectionLoss, Metric, Parts, agreement, sqnr

_PREFETCHED_RUNS = 2  # each has its own copy of the weights that one part of the graph reads


@dataclass(frozen=True)
class Answer:
    """The metric with a given set of layers in float.

    Attributes:
        value: the metric.
        parts: the losses of a `DetectionLoss` by level; empty for any other metric.
    """

    value: float
    parts: Parts = ()


class Simulation:
    """Runs a prepared graph with any set of layers in float, and measures its outputs.

    The batches run once in float, and then once for each set of layers. Phases decide what is in float, so a
    set costs one pass over the data and nothing else.

    Attributes:
        groups: the column groups of the outputs.
        selected: the selections before the outputs; their rows are compared with the same rows.

    Args:
        prepared: a calibrated prepared module, or its view; the module is left as it is.
        batches: inputs as for ``qtrace.calibrate``; they are kept in a list and run for each set.
        metric: compares outputs; None for `sqnr`.
        own: the user's metric, which runs the graph itself; ``metric`` is then unused.
        twin: the float network with the graph's nodes (`qtrace.inspection.twin`), which errors are measured
            against, and which raised layers have their weights from; None for the graph itself in float.
        network: the network as traced, whose outputs are the reference where they are not the twin's: where
            ``equalize`` has made a ReLU of a ReLU6, say.
        weights, activations: whether raising a layer puts its weight, and what it reads and gives, in float.
        engine: what runs the graph, as for ``qtrace.calibrate``: ``auto``, ``megengine`` or ``onnxruntime``.
        ran: called after each measurement, to show progress.

    Raises:
        CalibrationError: when the module is not calibrated, or there are no batches.
        ConfigError: for an unknown engine, and a `DetectionLoss` with outputs that the graph does not have.
    """

    def __init__(
        self,
        prepared: TracedModule | QuantizedModel,
        batches: Iterable[Any],
        metric: Metric | None = None,
        own: Callable[[TracedModule], float] | None = None,
        twin: TracedModule | None = None,
        network: TracedModule | None = None,
        *,
        weights: bool = True,
        activations: bool = True,
        engine: str = "auto",
        ran: Callable[[], object] = lambda: None,
    ) -> None:
        self._model = QuantizedModel.of(prepared, "prepared")
        self.prepared, self.own, self._ran = self._model.module, own, ran
        self.weights, self.activations, self.network = weights, activations, network
        annotation = self._model.annotation
        for fq in self._model.fake_quants.values():
            fq.qparams()  # raises an error if it is not calibrated
        weights_by_group = {s.group: s.node for s in self._model.sites if s.sort == "weight"}
        sizes = {g: math.prod(int(n) for n in node.shape or ()) for g, node in weights_by_group.items()}
        self.layers: tuple[RaisableLayer, ...] = find_layers(annotation, sizes)
        check_batches(batches)
        self.batches = list(batches)
        if not self.batches:
            raise CalibrationError("there are no batches to measure on: give at least one.")
        first = as_arguments(self.batches[0], self.prepared, 0)
        self._engine = choose_segments(self._model, engine, len(self.batches), None, first)
        self._folds = {f"{fold.layer}_bn": fold.layer for fold in annotation.folds}
        twin = self._twin = self.prepared if twin is None else twin
        self.selected = SelectedShares.of(self.prepared)
        self._values = FloatValues(self.prepared, twin, annotation, self.layers)
        with in_phase(twin, "float"):
            self.reference = outputs_of(twin, self.batches, self._engine)
        if network is not None:
            outputs = outputs_of(network, self.batches)
            if sqnr(outputs, self.reference) < EQUAL_DB:
                self.reference = outputs
        self.groups = find_groups(twin, self.reference)
        self.metric = self._bind(metric)

    def _bind(self, metric: Metric | None) -> Metric:
        """Returns the metric with what it must know about the graph's outputs."""
        if isinstance(metric, DetectionLoss):
            return metric.of(self._model)
        return sqnr if metric is None else metric

    def _sqnr(self, reference: Outputs, outputs: Outputs, selected: SelectedShares) -> float:
        """Returns the SQNR of equal rows in dB, or the lost rows' SQNR if it is lower."""
        return min(sqnr(reference, outputs, self.groups), selected.lost_db())

    def value(self, raised: Collection[str] = ()) -> float:
        """Returns the metric with some layers in float.

        Args:
            raised: names of layers.
        """
        return self.answer(raised).value

    def answer(self, raised: Collection[str] = ()) -> Answer:
        """Returns the metric with the layers ``raised`` in float, and its parts if it has any."""
        return self._ask(self._active(raised), raised if self.weights else ())

    def in_float(self) -> float:
        """Returns the metric with all layers in float; the user's own metric runs the network if given."""
        if self.own is not None and self.network is not None:
            with evaluating(self.network):
                return self.own(self.network)
        return self._ask(frozenset(), [layer.name for layer in self.layers]).value

    def only(self, layer: RaisableLayer) -> Answer:
        """Returns the metric with all layers but ``layer`` in float."""
        return self._ask(active_groups([layer], ()), self._others(layer))

    def only_group(self, group: str) -> float:
        """Returns the metric with all sites except ``group``'s in float."""
        return self._ask(frozenset({group}), [layer.name for layer in self.layers]).value

    def only_groups(self, groups: Iterable[str]) -> Iterator[float]:
        """Yields what `only_group` returns for each of ``groups``; an engine runs the next ones meanwhile."""
        raised = [layer.name for layer in self.layers]
        with Together(1 + _PREFETCHED_RUNS) as together:

            def begin(group: str) -> tuple[str, Callable[[], Outputs | None] | None]:
                run = self._begin(frozenset({group}), raised)
                return group, None if run is None else together.begin(run)

            yield from itertools.starmap(self._end, prefetch(groups, begin, _PREFETCHED_RUNS))

    def _begin(self, active: Collection[str], raised: Collection[str]) -> Callable[[], Outputs | None] | None:
        """Begins a run with some sites active; returns None where one engine does not run the whole graph."""
        if self._engine is None or self.own is not None or self.selected:
            return None
        with in_phase(self.prepared, "float"), self._values.of(raised):
            self._activate(active, raised)
            return begin_outputs(self.prepared, self.batches, self._engine)

    def _end(self, group: str, finish: Callable[[], Outputs | None] | None) -> float:
        """Returns the metric of a run that `_begin` has begun, or runs now what was not begun."""
        outputs = None if finish is None else finish()
        if outputs is None:
            return self.only_group(group)
        self._ran()
        return self._answer(self.reference, outputs, self.selected).value

    def noise(self, layer: RaisableLayer | None = None) -> float:
        """Returns the power of the noise relative to the signal's, in the worst column group.

        After a selection, the share of rows that float does not select is noise, too: the larger one counts.

        Args:
            layer: the layer whose noise is measured, from those of its roundings that raising removes, with
                all else in float; None for all layers.
        """
        if layer is None:
            measured = self._outputs(self._active(()), ())
        else:
            parts = active_groups([layer], ()) - active_groups([layer], [layer.name], **self._sides())
            measured = self._outputs(parts, self._others(layer))
        return float(10 ** (-self._sqnr(*measured) / 10))

    def _others(self, layer: RaisableLayer) -> list[str]:
        return [other.name for other in self.layers if other.name != layer.name]

    def _sides(self) -> dict[str, bool]:
        return {"weights": self.weights, "activations": self.activations}

    def _active(self, raised: Collection[str]) -> frozenset[str]:
        return active_groups(self.layers, raised, **self._sides())

    def _ask(self, active: Collection[str], raised: Collection[str]) -> Answer:
        if self.own is not None:
            with in_phase(self.prepared, "float"), evaluating(self.prepared), self._values.of(raised):
                self._activate(active, raised)
                answer = Answer(self.own(self.prepared))
            self._ran()
            return answer
        counted = self.metric in (sqnr, agreement)  # their lost rows count by their share
        return self._answer(*self._outputs(active, raised, both=counted))

    def _answer(self, reference: Outputs, outputs: Outputs, selected: SelectedShares) -> Answer:
        """Returns the metric of outputs next to float's, of the same rows, and its parts if it has any."""
        if self.metric is sqnr:
            return Answer(self._sqnr(reference, outputs, selected))
        if self.metric is agreement:
            return Answer(min(agreement(reference, outputs), 100.0 * (1.0 - selected.lost(0))))
        if not isinstance(self.metric, DetectionLoss):
            return Answer(self.metric(reference, outputs))
        parts = self.metric.parts(reference, outputs)
        return Answer(self.metric.total(parts), parts)

    def _outputs(
        self, active: Collection[str], raised: Collection[str], both: bool = True
    ) -> tuple[Outputs, Outputs, SelectedShares]:
        """Returns float's outputs and those with some sites active, of the same rows, and their shares."""
        with in_phase(self.prepared, "float"), self._values.of(raised):
            self._activate(active, raised)
            if self.selected:
                outputs, tapes = rows_of(self.prepared, self.batches)
            else:
                outputs = outputs_of(self.prepared, self.batches, self._engine)
        self._ran()
        if self.selected:
            return self._same_rows(outputs, tapes, both)
        return self.reference, outputs, self.selected

    def quantized(self) -> tuple[Outputs, Outputs, SelectedShares]:
        """Returns the outputs of float and of the quantized graph, of the same rows, and their shares."""
        with in_phase(self.prepared, "quantize"):
            if self.selected:
                return self._same_rows(*rows_of(self.prepared, self.batches))
            return self.reference, outputs_of(self.prepared, self.batches), self.selected

    def _same_rows(
        self, outputs: Outputs, tapes: Sequence[SelectionTape], both: bool = True
    ) -> tuple[Outputs, Outputs, SelectedShares]:
        """Returns float's outputs for what ``outputs`` select, and both without the rows that float does not.

        Args:
            outputs: the outputs of each batch.
            tapes: the selections of each batch.
            both: whether to take wrong rows from float's outputs, too; if not, they count as errors there.
        """
        with in_phase(self._twin, "float"):
            reference, replays = rows_of(self._twin, self.batches, [tape.places for tape in tapes])
        selected = SelectedShares.of(self.prepared)
        for replay in replays:
            selected.add(replay.shares)

        def blank(side: Outputs) -> Outputs:
            return [selected.blank(batch, r.shares) for batch, r in zip(side, replays, strict=True)]

        return blank(reference) if both else reference, blank(outputs), selected

    def _activate(self, active: Collection[str], raised: Collection[str]) -> None:
        for name in (*active, *(name for name, layer in self._folds.items() if layer not in raised)):
            self._model.rounding(name).phase = "quantize"
