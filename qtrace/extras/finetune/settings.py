"""Settings that suit any network: losses are relative, and learning rates count in quantization steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qtrace.errors import ConfigError
from qtrace.learning import ENGINES

__all__ = ["FinetuneSettings"]

_MINIMA = {
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
class FinetuneSettings:
    """The settings of ``qtrace.finetune``.

    Attributes:
        steps: number of steps of Adam.
        batch_size: samples in a step; if batches cannot be split into samples, each batch is a step.
        lr: learning rate, in quantization steps: a step of Adam moves a weight by about ``lr`` times its
            scale. Biases, norms and weights in float move by the same share of their size as the median
            quantized weight.
        range_lr: learning rate of ranges, in quantization steps by which the end of a range moves; None for
            `lr`.
        warmup: the share of the steps in which rates grow from 0; then they fall to 0 along a cosine.
        clip: the largest norm of a gradient, relative to the loss; parameters count in quantization steps.
        kl_weight: weight of the divergence of class probabilities, for outputs of shape (N, C), in the loss.
        temperature: divisor of the logits in that divergence (Hinton et al. 2015).
        block_weight: weight of the block outputs in the loss.
        blocks: names of nodes to take as block outputs; None to choose them by structure, () for none.
        most_blocks: the most block outputs that are chosen by structure.
        freeze_below: a range is frozen once the moving average of its end changes by less than this share of
            a quantization step in a step; 0 for never.
        freeze_bn_below: the statistics of a kept BatchNorm are frozen once their moving average changes by
            less than this share of the standard deviation or variance in a step; 0 for never.
        range_average: the share of the moving average of ranges and statistics that a step keeps.
        weight_average: the share of the moving average of the weights that a step keeps; evaluations and the
            result use that average. 0 for no average.
        holdout: the share of the data that is held back for evaluations, if no evaluation data is given.
        evaluate_every: steps between evaluations of the held-back data; None for up to 20 evaluations in a
            run, fewer if the held-back data has many batches.
        max_minutes: the most minutes that the call takes, evaluations included; None for no limit. A step is
            timed at the start, and the run has as many steps as fit, at least one. It ends earlier if the
            machine becomes slower.
        seed: seed of the order of the data.
        checkpoint_every: steps between checkpoints.
        memory: the most bytes of data in memory; further batches are not used.
        jit: whether a step runs under ``jit.trace``; None to decide by the number of steps. Only
            the engine ``megengine`` traces.
        engine: what computes the steps. ``torch`` computes them by PyTorch and needs the extra
            ``torch``; ``megengine`` runs every graph; ``auto`` takes torch if it is installed and every op of
            the graph has a form in torch.
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
    engine: str = "auto"

    def __post_init__(self) -> None:
        """Refuses numbers that are out of range."""
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ConfigError(f"finetune: {name} is {value!r}: give a whole number from {minimum} on.")
        for name in (*_POSITIVE, *_NOT_NEGATIVE, *_SHARES):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _is_number(value) or value < 0 or (name in _POSITIVE and value == 0):
                bound = "above 0" if name in _POSITIVE else "from 0 on"
                raise ConfigError(f"finetune: {name} is {value!r}: give a number {bound}.")
            if name in _SHARES and value >= 1:
                raise ConfigError(f"finetune: {name} is {value!r}: give a share from 0 to less than 1.")
        if self.engine not in ENGINES:
            raise ConfigError(f"finetune: engine is {self.engine!r}: choose one of {', '.join(ENGINES)}.")
        if isinstance(self.blocks, str):
            raise ConfigError(f"finetune: blocks is {self.blocks!r}: give a list of names of nodes.")

    @property
    def rate_of_ranges(self) -> float:
        """The learning rate of ranges."""
        return self.lr if self.range_lr is None else self.range_lr

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rates at a step: a linear warm-up, then half a cosine.

        Args:
            step: the number of the step, from 0.
        """
        warm = math.ceil(self.warmup * self.steps)
        if step < warm:
            return (step + 1) / (warm + 1)
        return 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(self.steps - warm, 1)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
