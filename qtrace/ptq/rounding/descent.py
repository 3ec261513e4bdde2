"""Gradient descent on the roundings and activation scales of one block."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace.errors import CalibrationError
from qtrace.learning.adam import Adam
from qtrace.learning.engine import LearningEngine, UnsupportedError
from qtrace.learning.loop import descend
from qtrace.plugins import load_object
from qtrace.ptq.rounding.block_run import BlockData, BlockRun
from qtrace.ptq.rounding.gradients import BlockGradients, DescentSettings, MegEngineGradients
from qtrace.ptq.rounding.soft_rounding import anneal

__all__ = ["learn_block"]

# Both engines agree on a step if the loss differs by no more than this share, and no gradient by more than
# this share of its length: a value that lies between two integers may be rounded either way.
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 0.01, 0.1
_LOG = logging.getLogger("qtrace")


def _choose_gradients(
    engine: LearningEngine | None, run: BlockRun, data: BlockData, settings: DescentSettings, unit: float
) -> BlockGradients:
    """Takes torch for a block on whose first step both engines agree, else MegEngine."""
    if engine is None:
        return MegEngineGradients(run, data, settings, unit)
    slow = MegEngineGradients(run, data, settings, unit, traced=False)
    fast: BlockGradients = load_object("qtrace.block_gradients", engine.name, type)(
        engine, run, data, settings, unit
    )
    try:
        reason = _find_difference(*(g(np.random.default_rng(0), settings.drop) for g in (slow, fast)))
    except UnsupportedError as error:
        reason = str(error)
    if not reason:
        return fast
    _LOG.info(f"MegEngine learns {run.block.name}: in torch {reason}")
    return MegEngineGradients(run, data, settings, unit)


def _find_difference(slow: tuple[float, list[np.ndarray]], fast: tuple[float, list[np.ndarray]]) -> str:
    """Says in a clause what differs between a step of both engines; "" if they agree."""
    if not abs(slow[0] - fast[0]) <= _LOSS_TOLERANCE * abs(slow[0]):
        return f"its first loss is {fast[0]:.6g}, not {slow[0]:.6g}"
    for index, (a, b) in enumerate(zip(slow[1], fast[1], strict=True)):
        if not np.linalg.norm(a - b) <= _GRADIENT_TOLERANCE * np.linalg.norm(a):
            return f"the gradient of parameter {index} differs in the first step"
    return ""


class _BlockDescent:
    """The descent of a block; see `qtrace.learning.loop.Descent`."""

    def __init__(
        self,
        run: BlockRun,
        data: BlockData,
        settings: DescentSettings,
        unit: float,
        engine: LearningEngine | None,
    ) -> None:
        self.run, self.settings = run, settings
        self.rng = np.random.default_rng([settings.seed, zlib.crc32(run.block.name.encode())])
        self.roundings = [Adam(state.rounding.v, settings.rate) for state in run.layers]
        self.scales = [scale for _, scale in run.scales.values()] if settings.scale_lr else []
        values = [scale.numpy().copy() for scale in self.scales]
        self.steppers = [Adam(value, settings.scale_lr * value.copy()) for value in values]
        self.gradients = _choose_gradients(engine, run, data, settings, unit)
        self.strength = settings.strength / sum(state.nearest.size for state in run.layers)

    def compute(self, step: int) -> tuple[list[float], list[np.ndarray]]:
        for state in self.run.layers:
            state.parameter._reset(Parameter(state.rounding.soft()))
        loss, gradients = self.gradients(self.rng, self.settings.drop)
        return [loss], gradients

    def move(self, step: int, losses: list[float], gradients: Sequence[Any]) -> None:
        layers, progress = self.run.layers, step / self.settings.iterations
        beta = anneal(progress, self.settings.warmup, self.settings.beta)
        for state, adam, gradient in zip(layers, self.roundings, gradients[: len(layers)], strict=True):
            strength = 0.0 if beta is None else self.strength
            adam.step(state.rounding.gradient(gradient, beta or 2.0, strength))
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
        for scale, adam, gradient in zip(self.scales, self.steppers, gradients[len(layers) :], strict=True):
            adam.step(gradient, factor)
            scale._reset(Parameter(adam.value))

    def fail(self, loss: float, step: int) -> CalibrationError:
        return CalibrationError(
            f"the loss of {self.run.block.name} is {loss} in step {step + 1}: the model is left as it was; "
            "try a lower lr, and look at the calibration data."
        )


def learn_block(
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
    descend(_BlockDescent(run, data, settings, unit, engine), range(settings.iterations))
