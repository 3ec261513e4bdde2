"""What every post-training algorithm is given, and what it reports."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from megengine import Tensor
from pydantic import Field

from qtrace.config.algorithm import Algorithm
from qtrace.data.batches import as_arguments
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.metrics import ErrorSums, finite_or_none
from qtrace.plugins.options import Int
from qtrace.preparation.float_stage import FloatTask, Report, SiteNoise
from qtrace.preparation.passes.base import Left, PassResult
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
    """Calibration data that can be read again and again, as arguments of the model.

    Args:
        source: what the user gave; not an iterator.
        model: the module that will be called.
        count: how many batches to take at most.
        chosen: which of them, by number, in order; None for all.
    """

    def __init__(
        self, source: Iterable[Any], model: TracedModule, count: int, chosen: Sequence[int] | None = None
    ) -> None:
        self.source, self.model = source, model
        self.chosen = range(count) if chosen is None else chosen

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        wanted, last = frozenset(self.chosen), self.chosen[-1]
        for index, batch in enumerate(self.source):
            if index in wanted:
                yield as_arguments(batch, self.model, index)
            if index >= last:
                return

    def __len__(self) -> int:
        return len(self.chosen)

    def spread(self, samples: int) -> Batches:
        """Batches of about so many samples, one at least, evenly spread: data may come in some order.

        Args:
            samples: along the first axis of the inputs, as the first batch has them.
        """
        args, kwargs = next(iter(self))
        shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        size = next((int(shape[0]) for shape in shapes if len(shape)), 1)
        count, kept = len(self), max(1, samples // max(1, size))
        if kept >= count:
            return self
        return Batches(self.source, self.model, count, [self.chosen[i * count // kept] for i in range(kept)])


@dataclass(frozen=True)
class CalibratedTask:
    """What an algorithm of the calibrated stage works on.

    Attributes:
        model: the calibrated graph in the phase ``quantize`` and in eval mode; it is changed in place, and
            put back by the one who runs the algorithm if that fails.
        reference: a copy of it in the phase ``float``, from before the first algorithm.
        batches: the calibration data.
        progress: whether to show progress bars.
        checkpoint: keeps what is done, for an interrupted run; None for none.
    """

    model: TracedModule
    reference: TracedModule
    batches: Batches
    progress: bool = False
    checkpoint: Checkpoint | None = None


class FloatAlgorithm(Algorithm):
    """Abstract base of the algorithms that change the float graph in ``prepare``."""

    stage: ClassVar[Literal["float", "calibrated"]] = "float"

    @abc.abstractmethod
    def apply(self, task: FloatTask) -> Report:
        """Changes ``task.model`` and says what was done."""


class CalibratedAlgorithm(Algorithm):
    """Abstract base of the algorithms that work with data at the end of ``calibrate``.

    Attributes:
        samples: about how many samples of the calibration data are read, in whole batches that are evenly
            spread over it. What a layer reads of all of them is held in memory.
    """

    stage: ClassVar[Literal["float", "calibrated"]] = "calibrated"

    samples: Annotated[Int, Field(ge=1)] = 128

    @abc.abstractmethod
    def apply(self, task: CalibratedTask) -> Report:
        """Changes parameters of ``task.model`` and says what was done.

        Raises:
            CalibrationError: when a value is NaN or infinite, naming the site.
        """


class Noise(ErrorSums):
    """Sums up the error of one site over batches."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def add(self, reference: np.ndarray, test: np.ndarray, *, classes: bool = False) -> None:
        """Counts values of a batch, of equal shapes.

        Raises:
            CalibrationError: when one of them is not finite.
        """
        if not (np.isfinite(reference).all() and np.isfinite(test).all()):
            raise CalibrationError(
                f"{self.site} has values that are NaN or infinite: the model is left as it was; look at the "
                "calibration data and at the layers before this one."
            )
        super().add(reference, test, classes=classes)

    @property
    def decibels(self) -> float | None:
        """The signal to quantization noise ratio in dB; None without noise or signal."""
        return finite_or_none(self.sqnr_db)


def report_of(result: PassResult, nothing: str) -> Report:
    """The report of a pass.

    Args:
        result: what the pass returned.
        nothing: why there was nothing to do, if there was nothing.
    """
    left = result.left if result.changed or result.left else (Left("", nothing),)
    return Report(result.changed, left)
