"""Ranges and BatchNorm statistics: averaged while they move, frozen once they hardly move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.twins import range_unit
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph.types import ModuleNode, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.preparation.model import fake_quants

__all__ = ["Frozen", "MovingTensors", "Watch"]


@dataclass(frozen=True)
class Frozen:
    """A range or the statistics of a BatchNorm that were frozen.

    Attributes:
        name: the site of a range, or the path of a BatchNorm.
        sort: ``range`` or ``statistics``.
        step: number of steps before it was frozen.
        drift: the change of its average in the last steps, per step, as a share of its unit.
    """

    name: str
    sort: str
    step: int
    drift: float


@dataclass
class MovingTensors:
    """The parameters of a range, or the statistics of a BatchNorm.

    Attributes:
        name: the site of a range, or the path of a BatchNorm.
        sort: ``range`` or ``statistics``.
        tensors: the parameters or statistics.
        units: for each tensor, the size of a change of 1; of the tensor's shape.
        limit: the change in a step, in ``units``, below which the tensors are frozen; 0 for never.
        norm: the BatchNorm of statistics; None for a range.
        average: the moving average of each tensor.
        before: the averages at the last check; empty before the first.
        frozen: when and how the tensors were frozen; None while they move.
    """

    name: str
    sort: str
    tensors: list[Tensor]
    units: list[np.ndarray]
    limit: float
    norm: Module | None = None
    average: list[np.ndarray] = field(default_factory=list)
    before: list[np.ndarray] = field(default_factory=list)
    frozen: Frozen | None = None

    def __post_init__(self) -> None:
        self.average = [t.numpy().copy() for t in self.tensors]

    def move(self, decay: float) -> None:
        """Adds the current values to the average, which keeps the share ``decay`` of itself."""
        if self.frozen is None:
            share = np.float32(1.0 - decay)
            self.average = [
                a + share * (t.numpy() - a) for a, t in zip(self.average, self.tensors, strict=True)
            ]

    def check(self, step: int, steps: int) -> bool:
        """Freezes the tensors if their average moved little in the last ``steps`` steps; returns whether."""
        if self.frozen is not None or not self.limit:
            return False
        before, self.before = self.before, [a.copy() for a in self.average]
        if not before:
            return False
        changes = zip(self.average, before, self.units, strict=True)
        drift = max(float(np.mean(np.abs(a - b) / unit)) for a, b, unit in changes) / steps
        if drift >= self.limit:
            return False
        self.frozen = Frozen(self.name, self.sort, step, drift)
        self.settle()
        return True

    def settle(self) -> None:
        """Gives the tensors their averages, and ends the training of the BatchNorm."""
        for tensor, average in zip(self.tensors, self.average, strict=True):
            tensor._reset(type(tensor)(average))
        if self.norm is not None:
            self.norm.training = False


class Watch:
    """Averages and freezes all ranges that learn and all BatchNorms that train.

    Args:
        model: the prepared graph.
        settings: the decay of the averages, and the changes below which tensors are frozen.
    """

    def __init__(self, model: TracedModule, settings: FinetuneSettings) -> None:
        self.settings = settings
        self.all = [*_ranges(model, settings.freeze_below), *_norms(model, settings.freeze_bn_below)]
        self.every = max(settings.steps // 20, 1)
        # The averages lag the values: before that they hardly move in any case.
        lag = math.ceil(1.0 / (1.0 - settings.range_average))
        self.begin = math.ceil(settings.warmup * settings.steps) + lag

    def start(self) -> None:
        """Lets the BatchNorms that are not frozen use the statistics of batches."""
        for watched in self.all:
            if watched.norm is not None:
                watched.norm.training = watched.frozen is None

    def update(self, step: int) -> list[Frozen]:
        """Updates the averages after the ``step``-th step; returns what this freezes."""
        for watched in self.all:
            watched.move(self.settings.range_average)
        if step < self.begin or step % self.every:
            return []
        return [w.frozen for w in self.all if w.check(step, self.every) and w.frozen is not None]

    def stop(self) -> None:
        """Lets all BatchNorms use their own statistics and not change them."""
        for watched in self.all:
            if watched.norm is not None:
                watched.norm.training = False

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Gives moving tensors their averages within the block, as the end of the run would."""
        moving = [w for w in self.all if w.frozen is None]
        before = [[t.numpy().copy() for t in w.tensors] for w in moving]
        for watched in moving:
            watched.settle()
        try:
            yield
        finally:
            for watched, values in zip(moving, before, strict=True):
                for tensor, value in zip(watched.tensors, values, strict=True):
                    tensor._reset(type(tensor)(value))
            self.start()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores the statistics of BatchNorms after the block."""
        before = [(t, t.numpy().copy()) for w in self.all if w.norm is not None for t in w.tensors]
        try:
            yield
        finally:
            for tensor, value in before:
                tensor._reset(Tensor(value))

    def rewind(self, step: int) -> bool:
        """Restarts the averages from the values after ``step``; tensors that were frozen later move again.

        Returns:
            Whether a BatchNorm's statistics move again.
        """
        thawed = [w for w in self.all if w.frozen is not None and w.frozen.step > step]
        for watched in thawed:
            watched.frozen = None
        for watched in self.all:
            if watched.frozen is None:
                watched.average, watched.before = [t.numpy().copy() for t in watched.tensors], []
        self.start()
        return any(watched.norm is not None for watched in thawed)

    @property
    def fixed(self) -> set[int]:
        """The ids of the tensors that are frozen."""
        return {id(t) for w in self.all if w.frozen is not None for t in w.tensors}

    @property
    def frozen(self) -> list[Frozen]:
        """The frozen ranges and statistics, the earliest first."""
        return sorted((w.frozen for w in self.all if w.frozen is not None), key=lambda f: f.step)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the averages and the frozen steps and drifts as arrays."""
        state: dict[str, np.ndarray] = {}
        for index, watched in enumerate(self.all):
            for kind in ("average", "before"):
                arrays: Sequence[np.ndarray] = getattr(watched, kind)
                state.update({f"{index}/{kind}/{i}": a for i, a in enumerate(arrays)})
            if watched.frozen is not None:
                state[f"{index}/frozen"] = np.array([watched.frozen.step, watched.frozen.drift])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        for index, watched in enumerate(self.all):
            for kind in ("average", "before"):
                keys = [f"{index}/{kind}/{i}" for i in range(len(watched.tensors))]
                setattr(watched, kind, [np.array(state[key]) for key in keys if key in state])
            if f"{index}/frozen" in state:
                step, drift = state[f"{index}/frozen"]
                watched.frozen = Frozen(watched.name, watched.sort, int(step), float(drift))


def _ranges(model: TracedModule, limit: float) -> list[MovingTensors]:
    ranges = []
    for fake in fake_quants(model):
        parameters = list(fake.parameters(recursive=False))
        if parameters:
            units = [range_unit(fake, p) for p in parameters]
            ranges.append(MovingTensors(fake.site, "range", parameters, units, limit))
    return ranges


def _norms(model: TracedModule, limit: float) -> list[MovingTensors]:
    """The statistics of BatchNorms that were kept for training; layers in float never move theirs."""
    from megengine.module.batchnorm import _BatchNorm

    folds = [expr for expr in exprs(model) if isinstance(owner(expr), BnFold)]
    called = {node.owner for expr in folds for node in expr.inputs if isinstance(node, ModuleNode)}
    statistics = []
    for name, norm in model.named_modules():
        if isinstance(norm, _BatchNorm) and norm in called and norm.track_running_stats:
            variance = np.maximum(norm.running_var.numpy(), np.float32(norm.eps))
            tensors = [norm.running_mean, norm.running_var]
            units = [np.sqrt(variance), variance]
            statistics.append(MovingTensors(name, "statistics", tensors, units, limit, norm))
    return statistics
