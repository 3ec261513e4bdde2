"""Learns the roundings and activation scales of blocks on the float graph's outputs, by gradient descent."""

from __future__ import annotations

import abc
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from megengine import Parameter
from pydantic import AfterValidator, Field

from qtrace.display import progress_bar
from qtrace.errors import CalibrationError
from qtrace.graph.kernels import synchronous
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import get_module
from qtrace.learning import Adam, LearningEngine, UnsupportedError, descend
from qtrace.numerics import SMALLEST_NORMAL
from qtrace.plugins import load_object
from qtrace.plugins.options import Float, Int
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, Left, Noise, Report, SiteNoise
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, quantized_layers, write
from qtrace.ptq.rounding.block_run import (
    Block,
    BlockData,
    BlockGradients,
    BlockRun,
    DescentSettings,
    MegEngineGradients,
    anneal,
    single_layers,
)
from qtrace.storage.checkpoints import hash_arrays

# Learns the roundings and activation scales of blocks on the float graph's outputs, by gradient descent.

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
    """The descent of a block; see `qtrace.learning.Descent`."""

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


@dataclass(frozen=True)
class LearnedBlock:
    """The result of a block.

    Attributes:
        error: the error of the block's output, with rounding to nearest and with the chosen roundings.
        turned: layer -> number of weights that are not rounded to nearest, and of all weights.
        scales: number of learned activation scales.
        better: whether the roundings are better than rounding to nearest, which the weights keep otherwise.
    """

    error: SiteNoise
    turned: dict[str, tuple[int, int]]
    scales: int
    better: bool


def learn(
    task: CalibratedTask,
    twins: LayerTwins,
    block: Block,
    settings: DescentSettings,
    floats: Mapping[str, np.ndarray],
) -> LearnedBlock:
    """Learns the roundings of a block and writes them into the model.

    Args:
        task: the model, the float reference and the data.
        twins: the quantized and the float graph, before the block.
        block: the block to learn.
        settings: iterations, learning rates and regularizer.
        floats: path of a weight -> its float values.

    Raises:
        CalibrationError: when the loss is not a number; it names the block.
    """
    data = BlockData(twins, block)
    run = BlockRun(task, twins, block, floats)
    nearest, start = [r.nearest for r in run.layers], [r.start for r in run.layers]
    before, initial = run.noise(data, nearest), run.noise(data, start)
    weights = _learn_weights(task, run, data, settings, before)
    after = run.noise(data, weights)
    improved = after.noise < min(before.noise, initial.noise)
    if improved:
        run.store_scales()
    else:
        weights, after = (start, initial) if initial.noise < before.noise else (nearest, before)
    turned = {}
    for state, old, new in zip(run.layers, nearest, weights, strict=True):
        path, step = state.layer.weight, np.broadcast_to(state.rounding.scale, new.shape)
        turned[state.layer.name] = int(np.sum(np.abs(new - old) > 0.5 * step)), new.size
        write(task.model, path, floats[path] if weights is nearest else new)
    twins.quantized.changed()
    error = SiteNoise(block.name, before.decibels, after.decibels)
    scales = len(run.scales) if improved and settings.scale_lr else 0
    return LearnedBlock(error, turned, scales, weights is not nearest)


def _learn_weights(
    task: CalibratedTask, run: BlockRun, data: BlockData, settings: DescentSettings, before: Noise
) -> list[np.ndarray]:
    """Learns the weights and scales of ``run``, or loads them from the checkpoint; returns the weights."""
    if before.noise < SMALLEST_NORMAL * data.values:  # of a dead block, whose loss a float32 cannot hold
        return [state.nearest for state in run.layers]
    checkpoint, key = task.checkpoint, ""
    if checkpoint is not None:
        inputs = (("", np.atleast_1d(a)) for a in (*run.state(), *(a for part in data.parts for a in part)))
        options = str(settings).removeprefix("Descent")  # as in the keys of earlier releases
        key = hash_arrays(f"{options} {run.block.name}", inputs, "{dtype}{shape}")
        stored = checkpoint.load(key)
        if stored is not None:
            run.set_scales([stored[f"scale{i}"] for i in range(len(run.scales))])
            return [stored[f"weight{i}"] for i in range(len(run.layers))]
    learn_block(run, data, settings, before.noise / data.values, task.learning)
    weights = [state.rounding.hard() for state in run.layers]
    if checkpoint is not None:
        arrays = {f"weight{i}": w for i, w in enumerate(weights)}
        arrays.update((f"scale{i}", s.numpy()) for i, (_, s) in enumerate(run.scales.values()))
        checkpoint.save(key, arrays)
    return weights


def _falling(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) != 2 or not values[0] >= values[1] >= 1:
        raise ValueError("beta is two numbers, from high to low, none below 1.")
    return values


class LearnedRounding(CalibratedAlgorithm):
    """Abstract base: learns the blocks of a graph in order, each on the outputs of the blocks before.

    Attributes:
        iterations: steps for each block.
        batch: images in a step.
        lr: learning rate of the roundings; by default 20 / iterations, but 0.1 at most.
        warmup: the share of the steps before the regularizer starts.
        beta: the exponent of the regularizer at its start and at the end.
        strength: the factor of the regularizer's mean over the weights, next to a relative error.
        seed: the seed of the drawn images and masks.
        samples: see `CalibratedAlgorithm`; with fewer samples the roundings overfit.
    """

    after: ClassVar[tuple[str, ...]] = ("output_cosine",)
    reason: ClassVar[str] = "roundings are chosen once, with scales that stay"

    samples: Annotated[Int, Field(ge=1)] = 256
    iterations: Annotated[Int, Field(gt=0)] = 1000
    batch: Annotated[Int, Field(gt=0)] = 32
    lr: Annotated[Float, Field(gt=0)] | None = None
    warmup: Annotated[Float, Field(ge=0, lt=1)] = 0.2
    beta: Annotated[tuple[Float, ...], AfterValidator(_falling)] = (20.0, 2.0)
    strength: Annotated[Float, Field(ge=0)] = 20.0
    seed: Annotated[Int, Field(ge=0)] = 0

    @abc.abstractmethod
    def blocks(self, model: TracedModule, layers: list[QuantizedLayer]) -> list[Block]:
        """Returns the blocks to learn, in graph order."""

    def learns_layers_first(self, block: Block) -> bool:
        """Whether each layer of ``block`` is learned by itself before the whole block."""
        return False

    def settings(self) -> DescentSettings:
        """Returns the settings of a block."""
        return DescentSettings(
            iterations=self.iterations,
            batch=self.batch,
            lr=self.lr,
            scale_lr=0.0,
            drop=0.0,
            warmup=self.warmup,
            beta=(self.beta[0], self.beta[1]),
            strength=self.strength,
            seed=self.seed,
        )

    def apply(self, task: CalibratedTask) -> Report:
        quantized, left = quantized_layers(task.model)
        blocks = self.blocks(task.model, quantized)
        settings, floats = self.settings(), _weights(task.model, quantized)
        changed: list[str] = []
        errors = []
        with synchronous():
            twins = LayerTwins(task)
            name = type(self).__name__.lower()
            for block in progress_bar(blocks, desc=name, unit="block", disable=not task.progress):
                if self.learns_layers_first(block):
                    ahead = twins.fork(block.exprs[0])
                    for layer in single_layers(task.model, block.layers):
                        learn(task, ahead, layer, LearnedRounding.settings(self), floats)
                learned = learn(task, twins, block, settings, floats)
                errors.append(learned.error)
                changes, reasons = _describe_block(block, learned)
                changed += changes
                left += reasons
        if not blocks:
            left.append(Left("", "no layer has quantized weights"))
        return Report(tuple(changed), tuple(left), tuple(errors))


def _weights(model: TracedModule, layers: list[QuantizedLayer]) -> dict[str, np.ndarray]:
    """Copies the weights of layers, by path."""
    return {layer.weight: get_module(model, layer.weight).numpy().copy() for layer in layers}


def _describe_block(block: Block, learned: LearnedBlock) -> tuple[list[str], list[Left]]:
    if not learned.better:
        names = ", ".join(layer.name for layer in block.layers)
        return [], [Left(names, "rounding to nearest gives a smaller error")]
    lines = [f"{n}: {k} of {m} weights rounded the other way" for n, (k, m) in learned.turned.items()]
    if learned.scales:
        lines.append(f"{block.name}: {learned.scales} scales of activations learned")
    return lines, []
