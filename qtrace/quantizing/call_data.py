"""The data of the one call: batches without labels, some of which are held back for the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qtrace.config import QConfig
from qtrace.data import DataSource
from qtrace.data.base import batch_length
from qtrace.data.opening import without_labels
from qtrace.data.whole import describe_left_out, whole_batches
from qtrace.graph.types import TracedModule
from qtrace.quantizing.evaluation import EvaluationData, choose_evaluation, hold_back_samples
from qtrace.quantizing.labels import labels_of
from qtrace.quantizing.reporting import LogReporter, Reporter
from qtrace.quantizing.sources import fixed_batch, only_batch
from qtrace.quantizing.stage import DataReading, note_pixels, open_source
from qtrace.quantizing.stages import StageTimes

__all__ = ["CallData", "DataOpener"]


@dataclass(frozen=True)
class CallData:
    """The data of a call, for calibration, judgement and verification, and the times of its stages.

    Attributes:
        calibration: the batches to calibrate on.
        evaluation: the batches of the verdict.
        times: takes the time of each stage.
    """

    calibration: DataSource
    evaluation: EvaluationData
    times: StageTimes

    def with_samples_held_back(self, model: TracedModule) -> CallData:
        """Holds samples back where no batch could be, and checks those of the verdict.

        Raises:
            CalibrationError: when a batch of the verdict does not fit the model, or holds NaN or infinity.
        """
        data = self
        if self.evaluation.seen and (parts := hold_back_samples(self.calibration, model)) is not None:
            data = replace(self, calibration=parts[0], evaluation=parts[1])
        if not data.evaluation.seen:
            data.evaluation.check(model, data.calibration)
        return data


@dataclass(frozen=True)
class DataOpener:
    """Opens the data of a call.

    Attributes:
        source: the network as it was given, which says what is a label.
        data: the data as they were given.
        evaluation: other data for the verdict as they were given; None for a part of ``data``.
        reading: how they are read.
        config: the config, whose preprocessing images take.
        reporter: takes notes and warnings.
        spell: writes the names of options in messages.
    """

    source: Any
    data: Any
    evaluation: Any
    reading: DataReading
    config: QConfig
    reporter: Reporter
    spell: Callable[[str], str]

    def open(self, size: int | None = None) -> CallData:
        """Opens the data without labels, and holds batches back for the verdict.

        Args:
            size: the number of samples that a batch must have; the others are left out. Batches of the user's
                own of which already the first one has another number stay, to be refused as they are.
        """
        opened = open_source(self.data, self.reporter, self.config, self.reading)
        labels = labels_of(self.source, next(iter(opened)))
        note_pixels(opened, self.config.preprocess, self.reporter)
        if labels:
            shown = ", ".join(f"value {label}" if isinstance(label, int) else label for label in labels)
            self.reporter.warn(f"{opened.source}: taken for labels and left out of each batch: {shown}")

        def reopen(values: Any) -> DataSource:
            return open_source(values, LogReporter(), self.config, self.reading.whole)

        calibration = without_labels(opened, labels)
        if size is not None and not calibration.cut and batch_length(next(iter(calibration))) != size:
            size = None
        calibration = _in_whole_batches(calibration, size, self.reporter)
        other = None
        if self.evaluation is not None:  # it may have labels where the data have none
            other = reopen(self.evaluation)
            first = next(iter(other), None)
            other = without_labels(other, () if first is None else labels_of(self.source, first))
            other = _in_whole_batches(other, size, self.reporter)

        def whole() -> DataSource:
            return whole_batches(without_labels(reopen(self.data), labels), size)

        chosen = choose_evaluation(calibration, whole, other, self.spell)
        calibration.max_batches = chosen.max_batches
        return CallData(calibration, chosen, StageTimes())

    def open_for(self, traced: TracedModule, opened: CallData) -> CallData:
        """Opens the data anew if the network takes batches of one size alone, and holds samples back.

        Args:
            traced: the network.
            opened: the data as they are, whatever the network takes.

        Raises:
            CalibrationError: when a batch of the verdict does not fit the model, or holds NaN or infinity.
        """
        opener, size = self, fixed_batch(traced, next(iter(opened.calibration)))
        if size is not None:
            opener = replace(self, reading=replace(self.reading, batch_size=size))
        else:
            size = only_batch(traced, opened.calibration, opened.evaluation.source)
        if size is not None:
            opened = replace(opener.open(size), times=opened.times)
            shown = "one sample" if size == 1 else f"{size} samples"
            self.reporter.note(f"a batch has {shown}, as the network takes no others")
        return opened.with_samples_held_back(traced)


def _in_whole_batches(source: DataSource, size: int | None, reporter: Reporter) -> DataSource:
    """Leaves out the batches that have other than ``size`` samples, with a note; none if it is None."""
    if words := describe_left_out(source, size):
        reporter.note(f"{source.source}: {words}")
    return whole_batches(source, size)
