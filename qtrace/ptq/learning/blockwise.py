"""Learning roundings, and scales of activations, block by block against the float graph's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import megengine as mge
import numpy as np

from qtrace.numerics import SMALLEST_NORMAL
from qtrace.ptq.base import CalibratedTask, Noise, SiteNoise
from qtrace.ptq.layers.quantized import Twins, write
from qtrace.ptq.learning.block_run import BlockData, BlockRun
from qtrace.ptq.learning.blocks import Block
from qtrace.ptq.learning.descent import Settings, descend
from qtrace.storage.hashing import hash_arrays

__all__ = ["Learned", "Settings", "learn", "queueless"]


@dataclass(frozen=True)
class Learned:
    """What came of a block.

    Attributes:
        error: of its output, with rounding to nearest and as it is now.
        turned: layer -> how many weights are rounded the other way, and how many it has.
        scales: how many activation scales were learned.
        better: whether the result is better than rounding to nearest, which the weights have otherwise.
    """

    error: SiteNoise
    turned: dict[str, tuple[int, int]]
    scales: int
    better: bool


@contextmanager
def queueless() -> Iterator[None]:
    """Within the block MegEngine runs each op at once: from a queue, CPU gradients are wrong now and then."""
    before = mge.config.async_level
    mge.config.async_level = 0
    try:
        yield
    finally:
        mge.config.async_level = before


def learn(
    task: CalibratedTask, twins: Twins, block: Block, settings: Settings, floats: Mapping[str, np.ndarray]
) -> Learned:
    """Learns the roundings of a block and writes them into the model.

    Args:
        task: the model, the float reference and the data.
        twins: both graphs, not yet past the block.
        block: what is learned.
        settings: how.
        floats: path of a weight -> its values before anything was rounded.

    Raises:
        CalibrationError: when the loss is not a number, naming the block.
    """
    data = BlockData(twins, block)
    run = BlockRun(task, twins, block, floats)
    nearest, start = [r.nearest for r in run.layers], [r.start for r in run.layers]
    before, found = run.noise(data, nearest), run.noise(data, start)
    decided = _decide(task, run, data, settings, before)
    after = run.noise(data, decided)
    kept = after.noise < min(before.noise, found.noise)
    if kept:
        run.store_scales()
    else:
        decided, after = (start, found) if found.noise < before.noise else (nearest, before)
    turned = {}
    for state, old, new in zip(run.layers, nearest, decided, strict=True):
        path, step = state.layer.weight, np.broadcast_to(state.rounding.scale, new.shape)
        turned[state.layer.name] = int(np.sum(np.abs(new - old) > 0.5 * step)), new.size
        write(task.model, path, floats[path] if decided is nearest else new)
    twins.quantized.changed()
    error = SiteNoise(block.name, before.decibels, after.decibels)
    scales = len(run.scales) if kept and settings.scale_lr else 0
    return Learned(error, turned, scales, decided is not nearest)


def _decide(
    task: CalibratedTask, run: BlockRun, data: BlockData, settings: Settings, before: Noise
) -> list[np.ndarray]:
    """The weights with their roundings decided; the scales of ``run`` are then as learned, too."""
    if before.noise < SMALLEST_NORMAL * data.values:  # of a dead block: the loss is not a float32
        return [state.nearest for state in run.layers]
    kept, key = task.checkpoint, ""
    if kept is not None:
        known = (("", np.atleast_1d(a)) for a in (*run.state(), *(a for part in data.parts for a in part)))
        key = hash_arrays(f"{settings} {run.block.name}", known, "{dtype}{shape}")
        found = kept.load(key)
        if found is not None:
            run.set_scales([found[f"scale{i}"] for i in range(len(run.scales))])
            return [found[f"weight{i}"] for i in range(len(run.layers))]
    descend(run, data, settings, before.noise / data.values)
    decided = [state.rounding.hard() for state in run.layers]
    if kept is not None:
        arrays = {f"weight{i}": w for i, w in enumerate(decided)}
        arrays.update((f"scale{i}", s.numpy()) for i, (_, s) in enumerate(run.scales.values()))
        kept.save(key, arrays)
    return decided
