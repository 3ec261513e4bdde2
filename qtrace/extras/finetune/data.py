"""Unlabelled data in memory: drawn at random for learning, read in order for evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import as_arguments, check_batches
from qtrace.errors import CalibrationError
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.graph.types import TracedModule
from qtrace.storage.checkpoints import hash_arrays

__all__ = ["Batch", "Data", "Leaves", "Samples", "hold_back", "read", "split_data"]

Leaves = list[np.ndarray]
"""The arrays of a call, in the order of its arguments."""


def pack(value: Any, leaves: Leaves) -> Any:
    """Moves the tensors of nested arguments into ``leaves``; returns the arguments with their indices."""
    if isinstance(value, dict):
        return {key: pack(item, leaves) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(pack(item, leaves) for item in value)
    leaves.append(value.numpy())
    return len(leaves) - 1


def unpack(form: Any, leaves: list[Any]) -> Any:
    """Reverses `pack`: replaces each index in ``form`` by its leaf."""
    if isinstance(form, dict):
        return {key: unpack(item, leaves) for key, item in form.items()}
    if isinstance(form, (tuple, list)):
        return type(form)(unpack(item, leaves) for item in form)
    return leaves[form]


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
