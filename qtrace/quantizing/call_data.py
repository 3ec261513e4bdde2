"""The data of a call: what it calibrates on, and what the verdict is measured on."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.config import Preprocess, QConfig
from qtrace.data import Batch, DataSource, SizedSource, open_data
from qtrace.data.base import batch_length
from qtrace.data.batches import (
    ENOUGH_SAMPLES,
    HELD_EVERY,
    MOST_VALUES,
    as_arguments,
    check_run,
    find_values,
    refuse_nan,
)
from qtrace.data.opening import (
    Recut,
    SampleRange,
    cut_batch,
    find_labels,
    names_labels,
    recut,
    shares_samples,
    without_labels,
)
from qtrace.errors import CalibrationError, QtraceError
from qtrace.graph.interface import argument_names, read_inputs
from qtrace.graph.types import TracedModule
from qtrace.importing import is_torch_module
from qtrace.importing.onnx import declared_inputs
from qtrace.preparation.faithfulness import are_samples_apart, cut_call, holds_infinite_data
from qtrace.quantizing.options import DataReading
from qtrace.quantizing.reporting import LogReporter, Reporter, StageTimes
from qtrace.quantizing.sources import takes_batch, takes_single, traced_batch
from qtrace.sensitivity.diagnosis.inputs import find_single_numbers

__all__ = [
    "MOST_VALUES",
    "CallData",
    "DataOpener",
    "EvaluationData",
    "SampleRange",
    "check_values",
    "count_samples",
    "count_values",
    "estimate_samples",
    "first_batches",
    "labels_of",
    "note_pixels",
    "select_samples",
    "shorten",
    "split_data",
    "usual_size",
]


# The samples that a verdict is measured on: other data, what is held back, or the calibration's.

_BATCHES = 2  # of `ENOUGH_SAMPLES`, which a verdict reads at most: the graph runs slowly


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
                    f"{find_values(arguments, np.isinf, number)}: repair the data, or leave the sample out."
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
    if total < ENOUGH_SAMPLES or -(-total // unit) < HELD_EVERY:
        return 0
    most = ENOUGH_SAMPLES * max(1, min(total // (2 * HELD_EVERY * ENOUGH_SAMPLES), _BATCHES))
    held = min(total // HELD_EVERY, most)
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
        if samples >= HELD_EVERY * ENOUGH_SAMPLES:
            break
    return batches


# The data of the one call: batches without labels, some of which are held back for the verdict.

_SAMPLES = 2  # on which a module runs to tell inputs from labels
Values = Mapping[str, np.ndarray]


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
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True)
class DataOpener:
    """Opens the data of a call, in batches that are the same whatever batches the user has made.

    The last bits of kernels, algorithms that read rows, and what is held back follow the batches.

    Attributes:
        source: the network as it was given, which says what is a label; None for data without labels.
        data: the data as they were given.
        evaluation: other data for the verdict as they were given; None for a part of ``data``.
        reading: how they are read.
        config: the config, whose preprocessing images take.
        reporter: takes notes and warnings.
    """

    source: Any
    data: Any
    evaluation: Any
    reading: DataReading
    config: QConfig
    reporter: Reporter

    @cached_property
    def given(self) -> DataSource:
        """The data without labels, in the batches of the user; arrays without the limit of batches."""
        opened = self._open(self.data, self.reading.batch_size, self.reporter)
        if not opened.cut:  # what comes after the limit may be no batch
            opened.max_batches = self.reading.max_batches
        labels = labels_of(self.source, next(iter(opened)))
        note_pixels(opened, self.config.preprocess, self.reporter)
        if labels:
            shown = ", ".join(f"value {label}" if isinstance(label, int) else label for label in labels)
            self.reporter.warn(f"{opened.source}: taken for labels and left out of each batch: {shown}")
        return without_labels(opened, labels)

    @cached_property
    def first(self) -> Batch:
        """The first batch of the user."""
        return next(iter(self.given))

    def open(self, read: Callable[[DataSource], TracedModule]) -> tuple[TracedModule, CallData]:
        """Reads the network, opens the data in batches that it takes, and holds samples back.

        Args:
            read: reads the network, for which it may trace the first batch of data.

        Raises:
            CalibrationError: when a batch of the verdict does not fit the model, or holds NaN or infinity.
        """
        size = usual_size(self.first) if shares_samples(self.first) else None
        try:
            traced = read(self._recut(self.given, size))
        except QtraceError:
            if size is None or size == batch_length(self.first):
                raise
            size = batch_length(self.first)  # which is the one batch that a module takes
            traced = read(self.given)
        taken, whole = self._choose_size(traced, size)
        if taken != size and not isinstance(self.source, (str, os.PathLike, TracedModule)):
            traced = read(self._recut(self.given, taken))
        data = self._split(taken, whole)
        if not data.evaluation.seen:
            data.evaluation.check(traced, data.calibration)  # before the calibration, which takes time
        return traced, data

    def _open(self, data: Any, batch_size: int, reporter: Reporter) -> DataSource:
        source = open_source(data, reporter, self.config, replace(self.reading, batch_size=batch_size))
        source.max_batches = None
        return source

    def _recut(self, source: DataSource, size: int | None, whole: bool = False) -> Recut:
        """Returns batches of ``size`` samples; cut from arrays, if they are."""
        if source.cut and size not in (None, self.reading.batch_size):
            data = self.data if source is self.given else self.evaluation
            source = self._unlimited(data, source, size)
        return recut(source, size, whole)

    def _choose_size(self, traced: TracedModule, size: int | None) -> tuple[int | None, bool]:
        """Returns the number of samples of a batch, and whether the network takes no others.

        Args:
            traced: the network.
            size: the usual number; None for batches as they are. So is the result where samples depend on
                each other.
        """
        own = batch_length(self.first)
        if size is None:
            return size, False
        for count in dict.fromkeys((size, traced_batch(traced) or size, own)):
            batch = next(iter(self._recut(self.given, count)))
            if takes_batch(traced, batch):
                break
        else:  # which is said where the batch is read
            return own, False
        if count != size or not takes_single(traced, batch):
            return batch_length(batch), True
        if self.given.cut or size == own or (size == 1 and not takes_batch(traced, self.first)):
            return size, False
        return (size if are_samples_apart(traced, self.first if size == 1 else batch) else None), False

    def _split(self, size: int | None, whole: bool) -> CallData:
        """Opens the data in batches of ``size`` samples, and holds samples back."""
        own, limit = batch_length(self.first), self.reading.max_batches
        source = self._recut(self.given, size, whole)
        self._note(source)
        calibration: DataSource = source
        later = None
        if limit is not None and self.given.cut:
            limit *= self.reading.batch_size
            limit = max(limit - limit % size, size) if whole and size else limit  # as of a list
            if sum(source.lengths) > limit:
                calibration, later = SampleRange(source, 0, limit), SampleRange(source, limit, None)
        elif limit is not None:
            everything = self._unlimited(self.data, self.given)
            if isinstance(everything, SizedSource) and len(everything) > limit:
                later = SampleRange(recut(everything, size, whole), sum(source.lengths), None)
        other = None
        if self.evaluation is not None:  # it may have labels where the data have none
            other = self._open(self.evaluation, self.reading.batch_size, LogReporter())
            first = next(iter(other), None)
            other = without_labels(other, () if first is None else labels_of(self.source, first))
            other = self._recut(other, size, whole)
            self._note(other)
        unit = size or own if whole or size is None else 1
        return CallData(*split_data(calibration, later, other, unit))

    def _unlimited(self, data: Any, like: DataSource, size: int | None = None) -> DataSource:
        """Opens data once more, without the labels that a source of them is without."""
        opened = self._open(data, size or self.reading.batch_size, LogReporter())
        return without_labels(opened, getattr(like, "labels", ()))

    def _note(self, source: Recut) -> None:
        """Notes what the network takes at once, and what is left out."""
        if source.whole:
            shown = "one sample" if source.size == 1 else f"{source.size} samples"
            self.reporter.note(f"a batch has {shown}, as the network takes no others")
        if left := source.left_out:
            several = "sample is" if left == 1 else f"{left} samples are"
            self.reporter.note(f"{source.source}: the last {several} left out")


def open_source(data: Any, reporter: Reporter, qconfig: QConfig, reading: DataReading) -> DataSource:
    """Opens data with the recipe's preprocess, and notes which arrays are left out."""
    source = open_data(
        data,
        preprocess=qconfig.preprocess,
        batch_size=reading.batch_size,
        max_batches=reading.max_batches,
        skip_bad=reading.skip_bad,
    )
    if source.skipped:
        label = data if isinstance(data, (str, os.PathLike)) else source.source
        reporter.note(f"{label}: taken for labels and left out: {', '.join(source.skipped)}")
    return source


def note_pixels(source: DataSource, preprocess: Preprocess | None, reporter: Reporter) -> None:
    """Notes how images or pixels become inputs: what a network was not trained with spoils its ranges."""
    if preprocess is not None and source.pixels:
        reporter.note(f"{source.source}: inputs are {preprocess.describe()}")
        if preprocess.scale == 1 and max(preprocess.std) < 1:
            reporter.warn(
                f"{source.source}: pixels are 0 to 255, and a std below 1 is for pixels of 0 to 1: give "
                "--scale 1/255 (preprocess.scale)."
            )


def labels_of(source: Any, batch: Batch) -> tuple[int | str, ...]:
    """Returns what a batch holds besides the inputs of a network and looks like labels.

    An argument of a module that may be left out, such as a mask, is an input if the batch has it by name. One
    that adds a result, as labels add a loss, is none. One whose name is one of labels is an input only if the
    results depend on it. The module runs on two samples to tell.

    Args:
        source: the network, as for `read_network`; of an .mge file the inputs are not known yet.
        batch: the first batch.

    Raises:
        ImportingError: when an ONNX file is missing, damaged or hostile.
    """
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix.lower() == ".onnx":
        return find_labels(batch, list(declared_inputs(source)))
    if isinstance(source, TracedModule):
        declared = list(read_inputs(source))
        names = argument_names(source)
        return find_labels(batch, declared or names) or find_labels(batch, names)
    if isinstance(source, Module) or is_torch_module(source):
        inputs = _find_inputs(source, batch)
        return find_labels(batch, inputs) if inputs else ()
    return ()


def _find_inputs(module: Any, batch: Batch) -> list[str]:
    """Returns the arguments of forward that are inputs; none if it can be called without any."""
    parameters = inspect.signature(module.forward).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [n for n, p in parameters.items() if p.kind in positional and p.default is p.empty]
    given = [n for n in parameters if isinstance(batch, dict) and n in batch and n not in required]
    if not given:
        return required
    by_name = [*required, *(name for name in given if not names_labels(name))]
    assert isinstance(batch, dict)
    if any(name not in batch for name in required):
        return by_name
    return _find_by_results(_Runner(module), batch, required, given) or by_name


def _find_by_results(run: _Runner, batch: Values, required: Sequence[str], given: Sequence[str]) -> list[str]:
    """Returns the inputs by what the module gives with each argument and without; none if it does not run."""
    inputs = [*required, *(name for name in given if not names_labels(name))]
    known = run(batch, inputs)
    if known is None:
        return []
    for name in given:
        with_it, without = (*inputs, name), [n for n in inputs if n != name]
        if name in inputs:
            fewer = run(batch, without)
            if fewer is not None and (
                _shapes(fewer) != _shapes(known) or _is_idle(batch[name], fewer, known)
            ):
                inputs, known = without, fewer
        else:
            more = run(batch, with_it)
            if more is not None and _shapes(more) == _shapes(known) and not _are_equal(more, known):
                inputs, known = list(with_it), more
    return inputs


def _is_idle(value: np.ndarray, without: Sequence[np.ndarray], with_it: Sequence[np.ndarray]) -> bool:
    """Whether a number for each sample changes no result, as a class does where no loss is computed."""
    return value.ndim == 1 and value.dtype.kind in "iub" and _are_equal(without, with_it)


def _shapes(results: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    return [value.shape for value in results]


def _are_equal(results: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(results, others, strict=True)
    )


class _Runner:
    """Runs a copy of a module, in eval mode, on the first samples of a batch.

    Args:
        module: a module of MegEngine or torch; it is not changed.
    """

    def __init__(self, module: Any) -> None:
        self.of_torch = not isinstance(module, Module)
        self.module = copy.deepcopy(module)
        self.module.eval()

    def __call__(self, batch: Values, names: Sequence[str]) -> list[np.ndarray] | None:
        """Returns the tensors that the module gives for some of its arguments; None if it fails."""
        arguments = {name: _first(batch[name]) for name in names}
        try:
            if not self.of_torch:
                return _tensors(self.module(**{n: Tensor(v) for n, v in arguments.items()}))
            import torch

            with torch.no_grad():
                return _tensors(self.module(**{n: torch.from_numpy(v) for n, v in arguments.items()}))
        except Exception:  # the user's code, which says why where it is traced
            return None


def _first(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value[:_SAMPLES]) if np.ndim(value) else np.asarray(value)


def _tensors(result: Any) -> list[np.ndarray]:
    """Returns the tensors in a result as arrays; other values are left out."""
    if hasattr(result, "numpy"):
        return [np.asarray(result.numpy())]
    if isinstance(result, Mapping):
        result = result.values()
    elif not isinstance(result, (list, tuple)):
        return []
    return [array for value in result for array in _tensors(value)]
