"""The data of the one call: batches without labels, some of which are held back for the verdict."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.config import QConfig
from qtrace.data import Batch, DataSource
from qtrace.data.base import batch_length
from qtrace.data.opening import find_labels, names_labels, without_labels
from qtrace.data.whole import describe_left_out, whole_batches
from qtrace.graph.interface import read_inputs
from qtrace.graph.signature import argument_names
from qtrace.graph.types import TracedModule
from qtrace.importing.foreign import is_torch_module
from qtrace.importing.onnx import declared_inputs
from qtrace.quantizing.evaluation import EvaluationData, choose_evaluation, hold_back_samples
from qtrace.quantizing.options import DataReading
from qtrace.quantizing.reporting import LogReporter, Reporter, StageTimes
from qtrace.quantizing.sources import fixed_batch, only_batch
from qtrace.quantizing.stage import note_pixels, open_source

__all__ = ["CallData", "DataOpener", "labels_of"]

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
    """

    source: Any
    data: Any
    evaluation: Any
    reading: DataReading
    config: QConfig
    reporter: Reporter

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

        chosen = choose_evaluation(calibration, whole, other)
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


def labels_of(source: Any, batch: Batch) -> tuple[int | str, ...]:
    """Returns what a batch holds beside the inputs of a network and looks like labels.

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
