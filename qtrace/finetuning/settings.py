"""How a graph is fine-tuned: losses are relative and rates count in quantization steps, for any network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qtrace.errors import ConfigError

__all__ = ["Settings"]

_AT_LEAST = {
    "steps": 1,
    "batch_size": 1,
    "seed": 0,
    "most_blocks": 0,
    "checkpoint_every": 1,
    "memory": 1,
    "evaluate_every": 1,
}
_OPTIONAL = ("range_lr", "evaluate_every", "max_minutes")
_POSITIVE = ("lr", "temperature", "clip", "max_minutes")
_NOT_NEGATIVE = ("range_lr", "block_weight", "kl_weight", "freeze_below", "freeze_bn_below")
_SHARES = ("warmup", "range_average", "weight_average", "holdout")


@dataclass(frozen=True)
class Settings:
    """The settings of ``qtrace.finetune``.

    Attributes:
        steps: how many steps of Adam.
        batch_size: samples in a step, where batches can be taken apart; else a batch is a step.
        lr: learning rate, in quantization steps: a step of Adam moves a weight by about ``lr`` times its
            scale. Biases, norms and weights in float move by the same share of their size as the median
            quantized weight.
        range_lr: learning rate of ranges, in quantization steps by which the end of a range moves; None for
            `lr`.
        warmup: the share of the steps in which rates grow from 0; from there they fall to 0 along a cosine.
        clip: the largest norm of a gradient, relative to the loss; parameters count in quantization steps.
        kl_weight: how much the divergence of class probabilities counts, at outputs of shape (N, C).
        temperature: by what logits are divided for that (Hinton et al. 2015).
        block_weight: how much the outputs of blocks count.
        blocks: names of nodes to take as block outputs; None to choose them by structure, () for none.
        most_blocks: how many are chosen at most.
        freeze_below: a range stays as it is once the moving average of its end changes by less than this
            share of a quantization step in a step; 0 for never.
        freeze_bn_below: the same for a kept BatchNorm's statistics, as a share of the standard deviation or
            variance.
        range_average: how much of the moving average of ranges and statistics stays at a step.
        weight_average: how much of the moving average of the weights stays at a step; evaluations and the
            result use that average. 0 for none.
        holdout: the share of the data that is evaluated on and not learned from, where no other is given.
        evaluate_every: steps between evaluations of the held-back data; None for up to 20 evaluations in a
            run, fewer where the held-back data has many batches.
        max_minutes: the most minutes that the run takes; None for no bound. A step is timed at the start, and
            the run has as many steps as fit. It ends earlier if the machine becomes slower.
        seed: of the order of the data.
        checkpoint_every: steps between checkpoints.
        memory: bytes of data that are held; batches beyond are not used.
        jit: whether a step runs under ``jit.trace``; None where it pays.
    """

    steps: int = 500
    batch_size: int = 32
    lr: float = 0.0125
    range_lr: float | None = None
    warmup: float = 0.05
    clip: float = 2.0
    kl_weight: float = 1.0
    temperature: float = 2.0
    block_weight: float = 1.0
    blocks: Sequence[str] | None = None
    most_blocks: int = 16
    freeze_below: float = 2.5e-4
    freeze_bn_below: float = 5e-3
    range_average: float = 0.95
    weight_average: float = 0.0
    holdout: float = 0.1
    evaluate_every: int | None = None
    max_minutes: float | None = None
    seed: int = 0
    checkpoint_every: int = 100
    memory: int = 2**31
    jit: bool | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that are out of bounds."""
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"finetune: {name} is {value!r}: give a whole number from {least} on.")
        for name in (*_POSITIVE, *_NOT_NEGATIVE, *_SHARES):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _is_number(value) or value < 0 or (name in _POSITIVE and value == 0):
                bound = "above 0" if name in _POSITIVE else "from 0 on"
                raise ConfigError(f"finetune: {name} is {value!r}: give a number {bound}.")
            if name in _SHARES and value >= 1:
                raise ConfigError(f"finetune: {name} is {value!r}: give a share from 0 to less than 1.")
        if isinstance(self.blocks, str):
            raise ConfigError(f"finetune: blocks is {self.blocks!r}: give a list of names of nodes.")

    @property
    def rate_of_ranges(self) -> float:
        """The learning rate of ranges."""
        return self.lr if self.range_lr is None else self.range_lr

    def factor(self, step: int) -> float:
        """What rates are multiplied by at a step: a linear warm-up, then half a cosine.

        Args:
            step: its number, from 0 on.
        """
        begin = math.ceil(self.warmup * self.steps)
        if step < begin:
            return (step + 1) / (begin + 1)
        return 0.5 * (1.0 + math.cos(math.pi * (step - begin) / max(self.steps - begin, 1)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
