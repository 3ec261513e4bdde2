"""The samples that a verdict is measured on: other data, what is held back, or the calibration's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from qtrace.data.base import Batch, DataSource, SizedSource, batch_length
from qtrace.data.batches import as_arguments, check_run, find_values, refuse_nan
from qtrace.data.opening import Recut, SampleRange, cut_batch
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.samples import cut_call, holds_infinite_data
from qtrace.sensitivity.diagnosis.inputs import find_single_numbers
from qtrace.sensitivity.diagnosis.verdict import ENOUGH_SAMPLES

__all__ = [
    "MOST_VALUES",
    "EvaluationData",
    "SampleRange",
    "check_values",
    "count_samples",
    "count_values",
    "estimate_samples",
    "first_batches",
    "select_samples",
    "shorten",
    "split_data",
    "usual_size",
]

MOST_VALUES = 32 * 3 * 224 * 224
"""Values of the inputs that run at once, or that a file is judged on: 32 usual images."""
_BATCHES = 2  # of `ENOUGH_SAMPLES`, which a verdict reads at most: the graph runs slowly
_QUARTER = 4  # of the data is held back at most: ranges need the rest


@dataclass(frozen=True)
class EvaluationData:
    """The samples of a verdict.

    Attributes:
        source: the batches of these samples.
        measured_on: what these samples are, in words.
        more_data: whether the data of calibration has more batches than the user lets through.
        other_data: whether these are other data than the calibration's.
        seen: whether these are samples of the calibration.
        kept: the batches with their numbers, once they were read, unless they are large.
    """

    source: DataSource
    measured_on: str
    more_data: bool = False
    other_data: bool = False
    seen: bool = False
    kept: list[tuple[int, Batch]] = field(default_factory=list, repr=False, compare=False)

    def read(self, model: TracedModule) -> list[Batch]:
        """Reads the samples for ``model``.

        Raises:
            CalibrationError: for a batch that does not fit the model, or holds NaN; it has its number.
        """
        return [batch for _, batch in self._numbered(model)]

    def unread(self, calibration: DataSource, judged: Sequence[Batch]) -> Iterator[Batch]:
        """Yields the batches of the calibration that the verdict does not use.

        Args:
            calibration: the data of the calibration.
            judged: the batches of the verdict.
        """
        return (b for _, b in calibration.numbered(lambda number: not self.seen or number >= len(judged)))

    def check(self, model: TracedModule, calibration: DataSource) -> None:
        """Refuses samples that the verdict could not be measured on, before the calibration takes its time.

        Raises:
            CalibrationError: for a batch that does not fit the model, or holds NaN, or infinity among other
                numbers where the data of the calibration have none. For other data than those also where the
                network fails on them.
        """
        first = next(iter(calibration))
        if holds_infinite_data(as_arguments(first, model)):
            return
        known = set()
        for number, batch in self._numbered(model):
            arguments = as_arguments(batch, model, number)
            shapes = tuple(v.shape for v in (batch.values() if isinstance(batch, dict) else batch))
            if self.other_data and shapes not in known:
                known.add(shapes)
                check_run(model, arguments, number)
            if holds_infinite_data(arguments):
                raise CalibrationError(
                    f"{self.source.source}, batch {number} holds infinity among other numbers, first in "
                    f"{find_values(arguments, np.isinf)}: repair the data, or leave the sample out."
                )

    def _numbered(self, model: TracedModule) -> Iterator[tuple[int, Batch]]:
        batches = self.kept or list(_select(self.source.numbered(), model))
        if sum(count_values(batch) for _, batch in batches) <= MOST_VALUES:
            self.kept[:] = batches
        for number, batch in batches:
            refuse_nan(as_arguments(batch, model, number), number, model, self.source.source)
            yield number, batch


def split_data(
    source: DataSource, later: DataSource | None, evaluation: DataSource | None, unit: int
) -> tuple[DataSource, EvaluationData]:
    """Splits data into samples to calibrate on and others for the verdict, held back if it can be.

    Args:
        source: the data that the user lets through.
        later: what comes after the limit of batches; None for nothing.
        evaluation: other data to judge on; None for none.
        unit: samples are held back in multiples of this number.
    """
    more = later is not None
    if evaluation is not None:
        return source, EvaluationData(evaluation, "samples of the evaluation data", more, True)
    if later is not None:
        return source, EvaluationData(later, "samples after the limit of batches", more)
    total = sum(source.lengths) if isinstance(source, Recut) and isinstance(source, SizedSource) else 0
    if not isinstance(source, Recut) or (held := _count_held(total, unit)) == 0:
        return source, EvaluationData(source, "samples of the calibration", seen=True)
    held_back = SampleRange(source, total - held, total)
    return SampleRange(source, 0, total - held), EvaluationData(held_back, "held-back samples")


def _count_held(total: int, unit: int) -> int:
    """Returns how many samples are held back: enough ones, twice as many of many; 0 of too few.

    Args:
        total: the number of samples.
        unit: the result ends with a multiple of this number of samples.
    """
    if total < ENOUGH_SAMPLES or -(-total // unit) < _QUARTER:
        return 0
    most = ENOUGH_SAMPLES * max(1, min(total // (2 * _QUARTER * ENOUGH_SAMPLES), _BATCHES))
    held = min(total // _QUARTER, most)
    return total - (total - held) // unit * unit


def check_values(source: DataSource) -> None:
    """Refuses data in which each input is one number everywhere: no range of a network follows from them.

    Reads the data up to the first value that differs. Outputs of a graph that was calibrated on zeros are
    exact for zeros, so that no verdict would show it.

    Args:
        source: the data, without labels.

    Raises:
        CalibrationError: when no value differs.
    """
    numbers = find_single_numbers(source)
    if not numbers:
        return
    single = len(numbers) == 1
    shown = (f"{'the input' if single else f'input {key}'} is {n:g}" for key, n in numbers.items())
    raise CalibrationError(
        f"nothing was written, as {', '.join(shown)} everywhere in {source.source}: look at what reads the "
        f"data, or write the file all the same with allow_broken=True."
    )


def select_samples(batches: Iterable[Batch], model: TracedModule) -> list[Batch]:
    """Returns the first samples, at most `ENOUGH_SAMPLES` of a batch if ``model`` runs on so few."""
    return [batch for _, batch in _select(enumerate(batches), model)]


def _select(numbered: Iterable[tuple[int, Batch]], model: TracedModule) -> Iterator[tuple[int, Batch]]:
    """Yields the first batches with their numbers, cut as `select_samples` says."""
    samples = 0
    for count, (number, batch) in enumerate(numbered, 1):
        selected = shorten(batch, model, number)
        yield number, selected
        samples += batch_length(selected)
        # As many batches are enough of fewer samples, such as large images.
        if samples >= _BATCHES * ENOUGH_SAMPLES or count == ENOUGH_SAMPLES:
            break


def count_values(batch: Batch) -> int:
    """Returns the number of values of all inputs of a batch."""
    return sum(array.size for array in (batch.values() if isinstance(batch, dict) else batch))


def usual_size(batch: Batch) -> int:
    """Returns how many samples run at once: enough ones for a verdict, fewer if they are large.

    Args:
        batch: any batch of such samples.
    """
    values = max(count_values(batch) // batch_length(batch), 1)
    return max(1, min(ENOUGH_SAMPLES, MOST_VALUES // values))


def shorten(batch: Batch, model: TracedModule, index: int, samples: int = ENOUGH_SAMPLES) -> Batch:
    """Cuts a batch to its first ``samples``; a model whose batch is fixed gets all of it."""
    if cut_call(as_arguments(batch, model, index), samples, model) is None:
        return batch
    return cut_batch(batch, 0, samples)


def count_samples(source: DataSource) -> int | None:
    """Returns the number of samples of the last iteration over a source; None if there was none.

    All batches of a loader without a length count like its first one.
    """
    given = source.given  # before it is read again
    if hasattr(source, "__len__"):
        return sum(map(batch_length, source))
    first = next(iter(source), None)
    return given * batch_length(first) if given and first is not None else None


def estimate_samples(source: DataSource) -> int | None:
    """Returns the number of samples of data, if all batches are like the first; None without a length."""
    batches = len(source) if hasattr(source, "__len__") else None
    return None if batches is None else batches * batch_length(next(iter(source), ()))


def first_batches(source: DataSource) -> list[Batch]:
    """Returns the first batches of the data, of samples whose means tell another preparation of inputs."""
    batches, samples = [], 0
    for batch in source:
        batches.append(batch)
        samples += batch_length(batch)
        if samples >= _QUARTER * ENOUGH_SAMPLES:
            break
    return batches
