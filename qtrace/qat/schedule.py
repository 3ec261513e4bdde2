"""Schedules for a training loop: freezing BatchNorm's statistics and the ranges."""

from __future__ import annotations

import math

from megengine.module import Module
from megengine.module.batchnorm import _BatchNorm

from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel

__all__ = ["Schedule", "cosine", "freeze_batchnorm", "freeze_ranges"]


def freeze_batchnorm(module: Module, frozen: bool = True) -> int:
    """Stops (or resumes) the batch statistics of every BatchNorm that was kept; weights go on learning.

    A layer with its BatchNorm then computes what ``convert`` writes: folded weights. ``module.train()``
    resumes them all: freeze after it, or use `Schedule`.

    Args:
        module: a module made by ``qtrace.prepare``, or any other.
        frozen: False resumes.

    Returns:
        The number of BatchNorms.
    """
    norms = [child for child in module.modules() if isinstance(child, _BatchNorm)]
    for norm in norms:
        norm.training = not frozen
    return len(norms)


def freeze_ranges(prepared: TracedModule, frozen: bool = True) -> None:
    """Stops (or resumes) the learning of ranges; values are rounded as before, weights go on learning.

    Optimizers skip parameters without a gradient, momentum included. A ``jit.trace`` captured before must be
    captured again.

    Args:
        prepared: a module made by ``qtrace.prepare``, in the phase ``train``.
        frozen: False resumes.

    Raises:
        GraphError: when the module is not prepared.
        ConfigError: when it is not being trained.
    """
    _set_ranges(QuantizedModel(prepared, "prepared"), frozen)


def _set_ranges(prepared: QuantizedModel, frozen: bool) -> None:
    for fake in prepared.fake_quants.values():
        if fake.phase not in ("quantize", "train"):
            raise ConfigError(
                f"the module is in the phase {fake.phase!r}: call qtrace.set_phase(prepared, 'train') first."
            )
        fake.phase = "quantize" if frozen else "train"


class Schedule:
    """Freezes BatchNorm's statistics and the ranges after fractions of a training; one call for each step.

    ``schedule = Schedule(prepared, steps=1000, freeze_bn=0.5, freeze_ranges=0.8)`` before the loop and
    ``schedule.step()`` in it, before the forward pass. What was frozen stays so when the loop calls
    ``prepared.train()`` again.

    Args:
        prepared: a module made by ``qtrace.prepare``, in the phase ``train``.
        steps: the number of steps of the training.
        freeze_bn: the fraction after which BatchNorm's statistics stay; None for the recipe's value
            (``qat: {bn: {freeze_after: ...}}``), never if it lacks one.
        freeze_ranges: the fraction after which ranges stay; None for never.
        done: the number of steps before a resumption.

    Raises:
        GraphError: when the module is not prepared.
        ConfigError: when a number is out of bounds.
    """

    def __init__(
        self,
        prepared: TracedModule,
        steps: int,
        *,
        freeze_bn: float | None = None,
        freeze_ranges: float | None = None,
        done: int = 0,
    ) -> None:
        self._model = QuantizedModel(prepared, "prepared")
        recipe = self._model.record.qconfig
        if freeze_bn is None:
            freeze_bn = ((recipe.get("qat") or {}).get("bn") or {}).get("freeze_after")
        for name, count, minimum in (("steps", steps, 1), ("done", done, 0)):
            if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
                raise ConfigError(f"Schedule: {name} is {count!r}: give a whole number from {minimum} on.")
        for name, value in (("freeze_bn", freeze_bn), ("freeze_ranges", freeze_ranges)):
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 1):
                raise ConfigError(f"Schedule: {name} is {value!r}: give a fraction from 0 to 1, or None.")
        self.prepared, self.steps, self.done = prepared, steps, done
        self.freeze_bn, self.freeze_ranges = freeze_bn, freeze_ranges

    @property
    def fraction(self) -> float:
        """The completed share of the training, 0 to 1, for `cosine`."""
        return min(self.done / self.steps, 1.0)

    @property
    def frozen(self) -> tuple[bool, bool]:
        """Whether BatchNorm's statistics and the ranges are to be frozen at the present step."""
        ends = (self.freeze_bn, self.freeze_ranges)
        bn, ranges = (end is not None and self.done >= end * self.steps for end in ends)
        return bn, ranges

    def step(self) -> tuple[bool, bool]:
        """Freezes BatchNorms and ranges that are due, counts a step, and returns `frozen` of that step.

        Raises:
            ConfigError: when the module is not being trained.
        """
        bn, ranges = self.frozen
        if bn:
            freeze_batchnorm(self.prepared)
        if ranges:
            _set_ranges(self._model, True)
        self.done += 1
        return bn, ranges


def cosine(fraction: float, start: float, end: float) -> float:
    """Half a cosine from `start` (at fraction 0) to `end` (at 1), for rates and for `Dampening`.

    Args:
        fraction: the completed share of the training.
        start: the value at the beginning.
        end: the value at the end.
    """
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))
