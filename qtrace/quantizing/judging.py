"""The verdict on a calibrated graph: the samples that it is measured on, and what it finds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.base import Batch, DataSource, batch_length
from qtrace.data.batches import as_arguments
from qtrace.errors import CalibrationError, QtraceError
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import float_twin, late_algorithms
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.samples import cut_call
from qtrace.quantizing.folder import CURE, VERDICT
from qtrace.quantizing.reporting import Reporter
from qtrace.sensitivity.diagnosis import Calibrated, Diagnosis, diagnose, measure_inputs
from qtrace.sensitivity.diagnosis.verdict import Verdict

__all__ = [
    "Acceptance",
    "EvaluationData",
    "Judgement",
    "check_values",
    "choose_evaluation",
    "conclude",
    "copy_float",
    "estimate_samples",
    "select_samples",
    "shorten",
]

_BATCHES = 2
_SAMPLES = 8  # of a batch
_MOST_BATCHES = 8
_LEAST_BATCHES = 4  # from which one is held back
_MANY_BATCHES = 16  # from which two are held back
_INPUT_SAMPLES = 32
_LEAST_VALUES = 16  # of all inputs, which should differ


@dataclass(frozen=True)
class EvaluationData:
    """The samples of a verdict.

    Attributes:
        source: the data.
        first: the number of the first batch that is used.
        measured_on: what these samples are, in words.
        max_batches: the most batches to calibrate on, less those that are held back.
        more_data: whether the data of calibration has more batches than the user lets through.
        other_data: whether these are other data than those of calibration.
        seen: whether these are samples of the calibration.
    """

    source: DataSource
    first: int
    measured_on: str
    max_batches: int | None
    more_data: bool = False
    other_data: bool = False
    seen: bool = False

    def read(self, model: TracedModule) -> list[Batch]:
        """Reads the samples for ``model``."""
        return select_samples(
            (batch for _, batch in self.source.numbered(lambda number: number >= self.first)), model
        )


@dataclass(frozen=True)
class Acceptance:
    """What the user asks of a calibrated graph.

    Attributes:
        metric: a function of the graph that returns a number, more is better; None for none.
        at_least: the smallest value of the metric, or of the SQNR in dB without one; None for none.
    """

    metric: Callable[[Any], float] | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Judgement:
    """What was found about a calibrated graph.

    Attributes:
        diagnosis: the diagnosis; None if the graph could not be judged.
        cure: the recipe that removes the causes; "" for none.
    """

    diagnosis: Diagnosis | None = field(default=None, repr=False)
    cure: str = field(default="", repr=False)

    @property
    def passed(self) -> bool:
        """Whether the user's limit is reached, if there is one."""
        return self.diagnosis is None or self.diagnosis.verdict.passed

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None if the graph could not be judged."""
        return None if self.diagnosis is None else self.diagnosis.verdict

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict and causes as plain data, in which numbers that JSON does not know are None."""
        if self.diagnosis is None:
            return {}
        causes = [_finite(asdict(cause)) for cause in self.diagnosis.causes]
        return {"verdict": _finite(asdict(self.diagnosis.verdict)), "causes": causes}

    def write(self, folder: Path, figures: dict[str, Any]) -> None:
        """Writes the verdict with its causes and ``figures``, and the cure, into an unfinished folder."""
        if self.diagnosis is None:
            return
        text = json.dumps({**self.to_dict(), "figures": figures}, indent=2, allow_nan=False)
        (folder / VERDICT).write_text(text + "\n", encoding="utf-8")
        if self.cure:
            (folder / CURE).write_text(self.cure, encoding="utf-8")


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Replaces numbers that JSON does not know by None, in nested data, too."""
    return {key: _finite_value(value) for key, value in figures.items()}


def _finite_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _finite(value)
    if isinstance(value, (list, tuple)):
        return [_finite_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def choose_evaluation(
    source: DataSource,
    reopen: Callable[[], DataSource],
    evaluation: DataSource | None,
    spell: Callable[[str], str],
) -> EvaluationData:
    """Chooses the batches of the verdict; holds some of the calibration data back if there are enough.

    Args:
        source: the calibration data.
        reopen: opens the same data without a limit on the number of batches.
        evaluation: other data to judge on; None for none.
        spell: writes the names of options, see `qtrace.storage.outputs.flag`.
    """
    count = len(source) if hasattr(source, "__len__") else None
    whole = source if count is None else reopen()
    limit, more = source.max_batches, count is not None and len(whole) > count  # type: ignore[arg-type]
    if evaluation is not None:
        words = f"samples of {spell('evaluation')}"
        return EvaluationData(evaluation, 0, words, limit, more, other_data=True)
    if more:
        return EvaluationData(whole, count or 0, f"samples behind {spell('max_batches')}", limit, more)
    if count is not None and count >= _LEAST_BATCHES:
        first = count - (2 if count >= _MANY_BATCHES else 1)
        return EvaluationData(whole, first, "samples that were held back", first)
    words = f"samples of the calibration data; {spell('evaluation')} gives others"
    return EvaluationData(whole, 0, words, limit, seen=True)


def check_values(source: DataSource, spell: Callable[[str], str]) -> None:
    """Refuses data in which each input is one number everywhere: no range of a network follows from them.

    Reads the data up to the first value that differs. Outputs of a graph that was calibrated on zeros are
    exact for zeros, so that no verdict would show it.

    Args:
        source: the data, without labels.
        spell: writes the names of options, see `qtrace.storage.outputs.argument`.

    Raises:
        CalibrationError: when no value differs.
    """
    numbers: dict[int | str, float] = {}
    count = 0
    for batch in source:
        for key, array in batch.items() if isinstance(batch, dict) else enumerate(batch):
            first = array.flat[0]
            if numbers.setdefault(key, first) != first or not np.all(array == first):
                return
            count += array.size
    if count < _LEAST_VALUES:
        return
    single = len(numbers) == 1
    shown = (f"{'the input' if single else f'input {key}'} is {n:g}" for key, n in numbers.items())
    raise CalibrationError(
        f"nothing was written, as {', '.join(shown)} everywhere in {source.source}: look at what reads the "
        f"data, or write the file all the same with {spell('allow_broken')}."
    )


def copy_float(prepared: TracedModule) -> TracedModule | None:
    """Copies the float graph if an algorithm of the recipe is going to change its weights; else None."""
    view = QuantizedModel(prepared)
    return float_twin(view) if late_algorithms(view.config) else None


def conclude(
    prepared: TracedModule,
    evaluation: EvaluationData,
    acceptance: Acceptance,
    reporter: Reporter,
    *,
    twin: TracedModule | None,
    samples: int | None,
    calibration: DataSource,
    importing: str | None = None,
) -> Judgement:
    """Judges a calibrated graph.

    Args:
        prepared: the calibrated graph.
        evaluation: the samples to judge on.
        acceptance: what the user asks for.
        reporter: takes a warning if the graph cannot be judged.
        twin: the float graph as it was before algorithms of the recipe changed weights, from `copy_float`.
        samples: the number of samples of the calibration; None if it is not known.
        calibration: the data of the calibration.
        importing: the recipe, as the cure names it; None for a cure that imports none.

    Raises:
        QtraceError: when the graph cannot be judged, and there is a limit.
    """
    try:
        if evaluation.seen:
            samples = _count_samples(calibration)
        batches = evaluation.read(prepared)
        inputs = measure_inputs(_first_batches(calibration)) if evaluation.other_data else ()
        diagnosis = diagnose(
            prepared,
            batches,
            twin=twin,
            calibrated=Calibrated(samples, inputs, evaluation.seen),
            metric=acceptance.metric,
            measured_on=evaluation.measured_on,
            at_least=acceptance.at_least,
            progress=reporter.progress,
        )
    except QtraceError as error:
        if acceptance.at_least is not None:
            raise
        reporter.warn(f"there is no verdict: {error}")
        return Judgement()
    return Judgement(diagnosis, diagnosis.recipe(importing))


def select_samples(batches: Iterable[Batch], model: TracedModule) -> list[Batch]:
    """Returns the first samples of the data, at most `_SAMPLES` of a batch if ``model`` runs on so few."""
    selected, samples = [], 0
    for index, batch in enumerate(batches):
        selected.append(shorten(batch, model, index))
        samples += batch_length(selected[-1])
        if samples >= _BATCHES * _SAMPLES or len(selected) == _MOST_BATCHES:
            break
    return selected


def shorten(batch: Batch, model: TracedModule, index: int, samples: int = _SAMPLES) -> Batch:
    """Cuts a batch to its first ``samples``; a model whose batch is fixed gets all of it."""
    if cut_call(as_arguments(batch, model, index), samples, model) is None:
        return batch
    if isinstance(batch, dict):
        return {key: value[:samples] for key, value in batch.items()}
    return tuple(value[:samples] for value in batch)


def _count_samples(source: DataSource) -> int | None:
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


def _first_batches(source: DataSource) -> list[Batch]:
    """Returns the first batches of the data, of about `_INPUT_SAMPLES` samples."""
    batches, samples = [], 0
    for batch in source:
        batches.append(batch)
        samples += batch_length(batch)
        if samples >= _INPUT_SAMPLES:
            break
    return batches
