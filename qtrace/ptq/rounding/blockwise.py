"""Learns the roundings and activation scales of a block on the float graph's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qtrace.numerics import SMALLEST_NORMAL
from qtrace.ptq.base import CalibratedTask, Noise, SiteNoise
from qtrace.ptq.layers.quantized import LayerTwins, write
from qtrace.ptq.rounding.block_run import BlockData, BlockRun
from qtrace.ptq.rounding.blocks import Block
from qtrace.ptq.rounding.descent import learn_block
from qtrace.ptq.rounding.gradients import DescentSettings
from qtrace.storage.checkpoints import hash_arrays

__all__ = ["LearnedBlock", "learn"]


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
