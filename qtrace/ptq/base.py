"""The base classes of post-training algorithms, their tasks and reports."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from megengine import Tensor
from pydantic import Field

from qtrace.comparing.sums import ErrorSums, finite_or_none
from qtrace.config.checking import Algorithm
from qtrace.data.batches import as_arguments
from qtrace.errors import CalibrationError
from qtrace.graph.stepping import SegmentEngine
from qtrace.graph.types import TracedModule
from qtrace.plugins.options import Int
from qtrace.preparation.passes.base import FloatTask, Left, PassResult, Report, SiteNoise
from qtrace.storage.checkpoints import Checkpoint

__all__ = [
    "Batches",
    "CalibratedAlgorithm",
    "CalibratedTask",
    "FloatAlgorithm",
    "FloatTask",
    "Left",
    "Noise",
    "Report",
    "SiteNoise",
    "report_of",
]


class Batches:
    """Calibration data that can be read repeatedly, as arguments of the model.

    Args:
        source: the user's batches; not an iterator.
        model: the module that will be called.
        count: the most batches to read.
        chosen: the numbers of the batches to read, in order; None for the first ``count``.
    """

    def __init__(
        self, source: Iterable[Any], model: TracedModule, count: int, chosen: Sequence[int] | None = None
    ) -> None:
        self.source, self.model = source, model
        self.chosen = range(count) if chosen is None else chosen

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        chosen, last, empty = frozenset(self.chosen), self.chosen[-1], True
        for index, batch in enumerate(self.source):
            empty = False
            if index in chosen:
                yield as_arguments(batch, self.model, index)
            if index >= last:
                return
        if empty:
            raise CalibrationError(
                "the data give no batch when they are read again: give a list, or an object whose __iter__ "
                "begins anew."
            )

    def __len__(self) -> int:
        return len(self.chosen)

    def spread(self, samples: int) -> Batches:
        """Selects batches of about ``samples`` samples, evenly spread since data may be sorted; at least one.

        Args:
            samples: number of samples along the first axis of the inputs, counted in the first batch.
        """
        args, kwargs = next(iter(self))
        shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        size = next((int(shape[0]) for shape in shapes if len(shape)), 1)
        count, selected = len(self), max(1, samples // max(1, size))
        if selected >= count:
            return self
        chosen = [self.chosen[i * count // selected] for i in range(selected)]
        return Batches(self.source, self.model, count, chosen)


@dataclass(frozen=True)
class CalibratedTask:
    """The model and data of an algorithm of the calibrated stage.

    Attributes:
        model: the calibrated graph in the phase ``quantize`` and in eval mode. An algorithm changes it in
            place; its caller restores it after an error.
        reference: a copy of the graph in the phase ``float``, from before the first algorithm.
        batches: the calibration data.
        progress: whether to show progress bars.
        checkpoint: the storage of finished blocks, for an interrupted run; None to store none.
        engine: computes the inputs and outputs of layers faster than MegEngine, where it can; None for
            MegEngine.
        learning: computes the steps of what is learned faster than MegEngine, where it can (a
            `qtrace.learning.LearningEngine`); None for MegEngine.
        threads: number of threads that compute; None for all cores.
    """

    model: TracedModule
    reference: TracedModule
    batches: Batches
    progress: bool = False
    checkpoint: Checkpoint | None = None
    engine: SegmentEngine | None = None
    learning: Any = None
    threads: int | None = None


class FloatAlgorithm(Algorithm):
    """Abstract base of the algorithms that change the float graph in ``prepare``."""

    stage: ClassVar[Literal["float", "calibrated"]] = "float"

    @abc.abstractmethod
    def apply(self, task: FloatTask) -> Report:
        """Changes ``task.model`` and reports the changes."""


class CalibratedAlgorithm(Algorithm):
    """Abstract base of the algorithms that work with data at the end of ``calibrate``.

    Attributes:
        samples: approximate number of samples that are read, in whole batches that are evenly spread over the
            calibration data. The inputs of a layer are in memory for all of them.
    """

    stage: ClassVar[Literal["float", "calibrated"]] = "calibrated"

    samples: Annotated[Int, Field(ge=1)] = 128

    @abc.abstractmethod
    def apply(self, task: CalibratedTask) -> Report:
        """Changes parameters of ``task.model`` and reports the changes.

        Raises:
            CalibrationError: when a value is NaN or infinite; it names the site.
        """


class Noise(ErrorSums):
    """Sums the error of one site over batches."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def add(self, reference: np.ndarray, test: np.ndarray, *, classes: bool = False) -> None:
        """Adds the values of a batch, both of the same shape.

        Raises:
            CalibrationError: when a value is not finite.
        """
        if not (np.isfinite(reference).all() and np.isfinite(test).all()):
            raise CalibrationError(
                f"{self.site} has values that are NaN or infinite, and the model is unchanged: check the "
                "calibration data and the layers before this one."
            )
        super().add(reference, test, classes=classes)

    @property
    def decibels(self) -> float | None:
        """The signal to quantization noise ratio in dB; None without noise or signal."""
        return finite_or_none(self.sqnr_db)


def report_of(result: PassResult, reason: str) -> Report:
    """Builds the report of a pass.

    Args:
        result: the result of the pass.
        reason: why the pass changed nothing, if it neither changed nor left anything.
    """
    left = result.left if result.changed or result.left else (Left("", reason),)
    return Report(result.changed, left)
