"""The settings of a fine-tuning, which suit any network, and its unlabelled data in memory.

Losses are relative, and learning rates count in quantization steps. Data is drawn at random for learning and
read in order for evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import as_arguments, check_batches, map_values
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.types import TracedModule
from qtrace.learning import ENGINES
from qtrace.storage.checkpoints import hash_arrays

_COUNTS = ("steps", "batch_size", "checkpoint_every", "memory", "evaluate_every")  # 1 or more
_FROM_ZERO = ("seed", "most_blocks")
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
        freeze_bn_below: the statistics of a kept BatchNorm are frozen once they hardly move: by less than
            this share of the standard deviation or variance in a step; 0 for never.
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
        engine: what computes the steps. ``torch`` needs the extra ``torch``; ``megengine`` runs every graph;
            ``auto`` takes torch if it is installed and every op of the graph has a form in it.
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
        for name in (*_COUNTS, *_FROM_ZERO):
            value, minimum = getattr(self, name), int(name in _COUNTS)
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


Leaves = list[np.ndarray]
"""The arrays of a call, in the order of its arguments."""


def pack(value: Any, leaves: Leaves) -> Any:
    """Moves the tensors of nested arguments into ``leaves``; returns the arguments with their indices."""

    def store(leaf: Any) -> int:
        leaves.append(leaf.numpy())
        return len(leaves) - 1

    return map_values(value, store)


def unpack(form: Any, leaves: list[Any]) -> Any:
    """Reverses `pack`: replaces each index in ``form`` by its leaf."""
    return map_values(form, leaves.__getitem__)


@dataclass(frozen=True)
class Batch:
    """The inputs of one call of the model.

    Attributes:
        number: the number of the user's batch; of the step or the part of the data if batches are mixed.
        leaves: the arrays or Tensors of the arguments.
    """

    number: int
    leaves: Sequence[Any]

    def tensors(self) -> Batch:
        """Returns the batch with its arrays as Tensors."""
        leaves = [Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in self.leaves]
        return Batch(self.number, leaves)


@dataclass(frozen=True)
class Samples:
    """Batches of one structure.

    Attributes:
        form: the arguments of a call, with the index of a leaf in place of each array.
        batches: the user's batches; if ``joined``, all samples as one batch.
        joined: whether the first axis of every array counts samples, so that batches can be split.
        left_out: number of batches that did not fit into memory.
    """

    form: Any
    batches: tuple[Batch, ...]
    joined: bool
    left_out: int = 0

    @property
    def count(self) -> int:
        """The number of samples; of batches if these cannot be split."""
        return len(self.batches[0].leaves[0]) if self.joined else len(self.batches)

    @property
    def identity(self) -> str:
        """A hash of all values."""
        leaves = (("", leaf) for batch in self.batches for leaf in batch.leaves)
        return hash_arrays(repr(self.form), leaves, "{dtype} {shape}")

    def draw(self, step: int, size: int, seed: int) -> Batch:
        """Returns the batch of a step; an epoch has every sample once, in an order set by ``seed`` and epoch.

        Args:
            step: the number of the step, from 0.
            size: samples in a batch; at most all samples are used.
            seed: the seed of the orders.
        """
        size = min(size, self.count) if self.joined else 1
        indices = []
        for epoch in range(step * size // self.count, ((step + 1) * size - 1) // self.count + 1):
            order = np.random.default_rng([seed, epoch]).permutation(self.count)
            start = epoch * self.count
            indices.append(order[max(step * size - start, 0) : (step + 1) * size - start])
        chosen = np.concatenate(indices)
        return self._select(chosen, step) if self.joined else self.batches[int(chosen[0])]

    def in_order(self, size: int) -> Iterator[Batch]:
        """Yields all samples once, in batches of ``size``."""
        if not self.joined:
            yield from self.batches
            return
        for number, start in enumerate(range(0, self.count, size)):
            yield self._select(slice(start, start + size), number)

    def _select(self, chosen: np.ndarray | slice, number: int) -> Batch:
        return Batch(number, [leaf[chosen] for leaf in self.batches[0].leaves])

    def subset(self, indices: np.ndarray) -> Samples:
        """Returns the samples at ``indices``."""
        if self.joined:
            return Samples(self.form, (self._select(indices, 0),), True, self.left_out)
        return Samples(self.form, tuple(self.batches[int(i)] for i in indices), False, self.left_out)


def read(source: Iterable[Any], model: TracedModule, memory: int, label: str) -> Samples:
    """Reads batches until ``memory`` is full.

    Args:
        source: batches as for ``qtrace.calibrate``.
        model: the module that will be called.
        memory: the most bytes to keep; the first batch is kept in any case.
        label: the name of the data in an error.

    Raises:
        CalibrationError: when there are no batches, or one does not fit the model or holds NaN or infinity.
    """
    check_batches(source, label)
    batches: list[Leaves] = []
    form, size, left_out = None, 0, 0
    for index, batch in enumerate(source):
        leaves: Leaves = []
        structure = pack(as_arguments(batch, model, index), leaves)
        if batches and structure != form:
            raise CalibrationError(f"{label}: batch {index} has other arguments than the first one.")
        if not all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype.kind == "f"):
            # A ReLU and the clip of a fake quant would hide it from the loss.
            raise CalibrationError(
                f"{label}: batch {index} holds NaN or infinite values: look at its source."
            )
        form, added = structure, sum(leaf.nbytes for leaf in leaves)
        if left_out or (batches and size + added > memory):
            left_out += 1
            continue
        batches.append(leaves)
        size += added
    if not batches or not all(leaf.size for batch in batches for leaf in batch):
        raise CalibrationError(f"{label} holds no batches, or empty ones: give at least one with samples.")
    joined = _can_join(batches)
    if joined:
        batches = [[np.concatenate(leaves) for leaves in zip(*batches, strict=True)]]
    numbered = tuple(Batch(number, leaves) for number, leaves in enumerate(batches))
    return Samples(form, numbered, joined, left_out)


def _can_join(batches: list[Leaves]) -> bool:
    """Whether the first axis of all arrays counts samples and the other axes agree."""
    for batch in batches:
        if any(leaf.ndim == 0 or len(leaf) != len(batch[0]) for leaf in batch):
            return False
        pairs = zip(batch, batches[0], strict=True)
        if any(a.shape[1:] != b.shape[1:] or a.dtype != b.dtype for a, b in pairs):
            return False
    return True


def hold_back(samples: Samples, share: float, seed: int) -> tuple[Samples, Samples | None]:
    """Splits samples at random into those to learn from and those to evaluate on; None if there are too few.

    Args:
        samples: all samples.
        share: the share to evaluate on, rounded up.
        seed: the seed of the choice, which is random since data may be sorted.
    """
    count = int(np.ceil(share * samples.count))
    if count == 0 or samples.count - count < 1:
        return samples, None
    order = np.random.default_rng([seed, 2**31]).permutation(samples.count)
    return samples.subset(np.sort(order[count:])), samples.subset(np.sort(order[:count]))


@dataclass(frozen=True)
class Data:
    """The data of a fine-tuning.

    Attributes:
        learned: the samples to learn from.
        unseen: the samples to evaluate the outputs on.
        source: where ``unseen`` comes from: ``held back``, ``given``, or ``learned from`` if there is too
            little data.
    """

    learned: Samples
    unseen: Samples
    source: str


def split_data(
    model: TracedModule, batches: Iterable[Any], evaluation: Iterable[Any] | None, settings: FinetuneSettings
) -> Data:
    """Reads the samples to learn from and those to evaluate on.

    Args:
        model: the module that will be called.
        batches: inputs as for ``qtrace.calibrate``.
        evaluation: inputs to evaluate on; None to hold back a part of ``batches``.
        settings: the share to hold back, the seed, and the limit of memory.
    """
    samples = read(batches, model, settings.memory, "the data")
    if evaluation is not None:
        return Data(samples, read(evaluation, model, settings.memory, "the evaluation data"), "given")
    learned, unseen = hold_back(samples, settings.holdout, settings.seed)
    return Data(learned, learned, "learned from") if unseen is None else Data(learned, unseen, "held back")
