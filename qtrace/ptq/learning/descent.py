"""Gradient descent on the roundings and activation scales of one block."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace.errors import CalibrationError
from qtrace.gradients.adam import Adam
from qtrace.ptq.learning.block_run import BlockData, BlockRun
from qtrace.ptq.learning.rounding import anneal

__all__ = [
    "DescentSettings",
    "Gradients",
    "LearningEngine",
    "StepGradients",
    "descend",
    "draw_mask",
    "draw_step",
]

StepGradients = Callable[[np.random.Generator, float], tuple[float, list[np.ndarray]]]
"""Draws images and masks, the latter with the share of values to leave unrounded; returns the loss and the
gradient of every parameter."""

_MIN_TRACED_STEPS = 20  # capturing and compiling a step takes as long as some eager steps


@dataclass(frozen=True)
class DescentSettings:
    """The settings of `descend`.

    Attributes:
        iterations: steps of Adam.
        batch: images in a step.
        lr: learning rate of the roundings; None for 20 / iterations (the paper has 20,000 steps of 1e-3), but
            0.1 at most.
        scale_lr: learning rate of activation scales, as a share of the scale; 0 to keep the scales.
        drop: the share of values that are not rounded in a step.
        warmup: the share of the steps without the regularizer.
        beta: the exponent of the regularizer at its start and at the end.
        strength: the factor of the regularizer's mean over all weights, beside an error that is 1 for
            rounding to nearest.
        seed: the seed of the drawn images and masks, together with the name of the block.
    """

    iterations: int
    batch: int
    lr: float | None
    scale_lr: float
    drop: float
    warmup: float
    beta: tuple[float, float]
    strength: float
    seed: int

    @property
    def rate(self) -> float:
        """The learning rate of the roundings."""
        return min(0.1, 20.0 / self.iterations) if self.lr is None else self.lr


class LearningEngine(Protocol):
    """Computes the steps of a block faster than MegEngine."""

    def gradients(
        self,
        run: BlockRun,
        data: BlockData,
        settings: DescentSettings,
        parameters: Sequence[Parameter],
        unit: float,
    ) -> StepGradients | None:
        """Returns the function that computes a step; None where MegEngine must do so.

        Args:
            run: the block with its parameters.
            data: the inputs of the block and the references of its outputs.
            settings: the settings of the descent.
            parameters: the parameters whose gradients are computed.
            unit: the mean squared error that counts as 1.
        """


def descend(
    run: BlockRun,
    data: BlockData,
    settings: DescentSettings,
    unit: float,
    engine: LearningEngine | None = None,
) -> None:
    """Optimizes the roundings and scales of ``run`` by Adam for `DescentSettings.iterations` steps.

    Args:
        run: the block with its roundings and scales.
        data: the inputs of the block and the references of its outputs.
        settings: iterations, learning rates and regularizer.
        unit: the mean squared error that counts as 1.
        engine: computes the steps where it can; None for MegEngine.

    Raises:
        CalibrationError: when the loss is not a number; it names the block.
    """
    rng = np.random.default_rng([settings.seed, zlib.crc32(run.block.name.encode())])
    weights = [state.parameter for state in run.layers]
    roundings = [Adam(state.rounding.v, settings.rate) for state in run.layers]
    learned = [scale for _, scale in run.scales.values()] if settings.scale_lr else []
    values = [scale.numpy().copy() for scale in learned]
    steppers = [Adam(v, settings.scale_lr * v.copy()) for v in values]
    parameters = [*weights, *learned]
    fast = None if engine is None else engine.gradients(run, data, settings, parameters, unit)
    gradients = fast or Gradients(run, data, settings, parameters, unit)
    strength = settings.strength / sum(state.nearest.size for state in run.layers)
    for step in range(settings.iterations):
        progress = step / settings.iterations
        for state in run.layers:
            state.parameter._reset(Parameter(state.rounding.soft()))
        loss, computed = gradients(rng, settings.drop)
        if not math.isfinite(loss):
            raise CalibrationError(
                f"the loss of {run.block.name} is {loss} in step {step + 1}: the model is left as it was; "
                "try a lower lr, and look at the calibration data."
            )
        beta = anneal(progress, settings.warmup, settings.beta)
        for state, adam, gradient in zip(run.layers, roundings, computed[: len(weights)], strict=True):
            adam.step(state.rounding.gradient(gradient, beta or 2.0, 0.0 if beta is None else strength))
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
        for scale, adam, gradient in zip(learned, steppers, computed[len(weights) :], strict=True):
            adam.step(gradient, factor)
            scale._reset(Parameter(adam.value))


def draw_step(
    data: BlockData, settings: DescentSettings, rng: np.random.Generator, drop: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draws the entries of a block for a step, of which the share ``drop`` is exact, and the references."""
    drawn, n = data.draw(rng, settings.batch), data.entries
    entries, references = drawn[:n], drawn[2 * n :]
    if settings.drop:
        entries = [
            np.where(rng.random(r.shape, np.float32) < drop, e, r)
            for r, e in zip(entries, drawn[n : 2 * n], strict=True)
        ]
    return entries, references


def draw_mask(rng: np.random.Generator, shape: Sequence[int], drop: float) -> np.ndarray:
    """Draws a mask: 0 for the share ``drop`` of values, which stay unrounded, else 1."""
    return (rng.random(tuple(int(n) for n in shape), np.float32) >= drop).astype(np.float32)


class Gradients:
    """Computes loss and gradients of one step, under ``jit.trace`` if all steps have the same shapes.

    Args:
        run: the block with its parameters.
        data: the inputs of the block and the references of its outputs.
        settings: the settings of the descent.
        parameters: the parameters whose gradients are computed.
        unit: the mean squared error that counts as 1.
        traced: whether the steps may run under ``jit.trace``.
    """

    def __init__(
        self,
        run: BlockRun,
        data: BlockData,
        settings: DescentSettings,
        parameters: Sequence[Parameter],
        unit: float,
        traced: bool = True,
    ) -> None:
        self.run, self.data, self.settings = run, data, settings
        self.parameters, self.unit = list(parameters), unit
        self.shapes: list[tuple[int, ...]] = []
        self.traced: Any = None
        if traced and data.whole is not None and settings.iterations >= _MIN_TRACED_STEPS:
            self.traced = trace(self._compute, symbolic=False)
            drawn = data.draw(np.random.default_rng(0), settings.batch)[: data.entries]
            run.forward([Tensor(value) for value in drawn], self._record_shape)

    def __call__(self, rng: np.random.Generator, drop: float) -> tuple[float, list[np.ndarray]]:
        """Draws images and masks; returns the loss and the gradient of every parameter."""
        entries, references = draw_step(self.data, self.settings, rng, drop)
        tensors = [Tensor(value) for value in (*entries, *references)]
        if self.traced is None:
            loss, *gradients = self._compute(*tensors, draw=lambda x: Tensor(draw_mask(rng, x.shape, drop)))
        else:
            shapes = self.shapes if self.settings.drop else []
            masks = [Tensor(draw_mask(rng, shape, drop)) for shape in shapes]
            loss, *gradients = self.traced(*tensors, *masks)
        return float(loss.numpy()), [gradient.numpy() for gradient in gradients]

    def _compute(self, *inputs: Tensor, draw: Any = None) -> tuple[Tensor, ...]:
        """Computes loss and gradients; ``inputs`` are entries, references of the exits, and masks.

        Without masks in ``inputs``, ``draw`` gives them.
        """
        n = self.data.entries
        entries, references = inputs[:n], inputs[n:][: len(self.run.block.exits)]
        masks = iter(inputs[n + len(references) :])
        next_mask = None if not self.settings.drop else draw or (lambda x: next(masks))
        manager = GradManager().attach(self.parameters)
        with manager:
            exits = self.run.forward(entries, next_mask)
            errors = [F.sum((value - r) ** 2) for value, r in zip(exits, references, strict=True)]
            size = sum(math.prod(int(length) for length in r._tuple_shape) for r in references)
            loss = sum(errors[1:], errors[0]) / (self.unit * size)
            manager.backward(loss)
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return (loss, *gradients)

    def _record_shape(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(int(n) for n in x.shape))
        return Tensor(1.0)
