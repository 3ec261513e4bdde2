"""Unlabelled data, held in memory: drawn by step for learning, in order for measuring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import as_arguments
from qtrace.errors import CalibrationError
from qtrace.finetuning.settings import Settings
from qtrace.graph.types import TracedModule
from qtrace.storage.hashing import hash_arrays

__all__ = ["Batch", "Data", "Leaves", "Samples", "held_back", "read", "split_data"]

Leaves = list[np.ndarray]
"""The arrays of a call, in the order in which its arguments hold them."""


def pack(value: Any, leaves: Leaves) -> Any:
    """Moves the tensors of nested arguments into ``leaves``; what is left has their numbers instead."""
    if isinstance(value, dict):
        return {key: pack(item, leaves) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(pack(item, leaves) for item in value)
    leaves.append(value.numpy())
    return len(leaves) - 1


def unpack(form: Any, leaves: list[Any]) -> Any:
    """Puts values where `pack` took them from."""
    if isinstance(form, dict):
        return {key: unpack(item, leaves) for key, item in form.items()}
    if isinstance(form, (tuple, list)):
        return type(form)(unpack(item, leaves) for item in form)
    return leaves[form]


@dataclass(frozen=True)
class Batch:
    """What a call of the model reads.

    Attributes:
        number: of the user's batch; where samples of several are mixed, of the step or the part of the data.
        leaves: its arrays, or Tensors.
    """

    number: int
    leaves: Sequence[Any]

    def tensors(self) -> Batch:
        """The batch with its arrays as Tensors."""
        return Batch(self.number, [Tensor(leaf) for leaf in self.leaves])


@dataclass(frozen=True)
class Samples:
    """Batches of one structure.

    Attributes:
        form: the arguments of a call, with numbers for arrays.
        batches: the user's batches; if ``joined``, all samples as one batch.
        joined: whether batches can be taken apart along their first axis.
        left_out: how many batches did not fit into memory.
    """

    form: Any
    batches: tuple[Batch, ...]
    joined: bool
    left_out: int = 0

    @property
    def count(self) -> int:
        """How many samples there are, or batches where they cannot be taken apart."""
        return len(self.batches[0].leaves[0]) if self.joined else len(self.batches)

    @property
    def identity(self) -> str:
        """A hash of all values."""
        leaves = (("", leaf) for batch in self.batches for leaf in batch.leaves)
        return hash_arrays(repr(self.form), leaves, "{dtype} {shape}")

    def draw(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step: every sample once in an epoch, in an order that ``seed`` and epoch decide.

        Args:
            step: its number, from 0 on; nothing else need be known to go on there.
            size: samples in a batch; as many as there are, if that is fewer.
            seed: of the orders.
        """
        size = min(size, self.count) if self.joined else 1
        chosen = []
        for epoch in range(step * size // self.count, ((step + 1) * size - 1) // self.count + 1):
            order = np.random.default_rng([seed, epoch]).permutation(self.count)
            start = epoch * self.count
            chosen.append(order[max(step * size - start, 0) : (step + 1) * size - start])
        numbers = np.concatenate(chosen)
        return self._taken(numbers, step) if self.joined else self.batches[int(numbers[0])]

    def in_order(self, size: int) -> Iterator[Batch]:
        """All of it, once, ``size`` samples at a time."""
        if not self.joined:
            yield from self.batches
            return
        for number, start in enumerate(range(0, self.count, size)):
            yield self._taken(slice(start, start + size), number)

    def _taken(self, chosen: np.ndarray | slice, number: int) -> Batch:
        return Batch(number, [leaf[chosen] for leaf in self.batches[0].leaves])

    def part(self, numbers: np.ndarray) -> Samples:
        """Only some of the samples."""
        if self.joined:
            return Samples(self.form, (self._taken(numbers, 0),), True, self.left_out)
        return Samples(self.form, tuple(self.batches[int(n)] for n in numbers), False, self.left_out)


def read(source: Iterable[Any], model: TracedModule, memory: int, what: str) -> Samples:
    """Reads batches until memory is full.

    Args:
        source: as for ``qtrace.calibrate``.
        model: the module that will be called.
        memory: how many bytes to hold at most; the first batch is held in any case.
        what: what to call the data in an error.

    Raises:
        CalibrationError: when there are no batches, one does not fit the model, or one has NaN or infinity.
    """
    if isinstance(source, (Tensor, np.ndarray, dict, str)) or not isinstance(source, Iterable):
        raise CalibrationError(
            f"{what} is one {type(source).__name__}: give an iterable of batches, such as a list of arrays."
        )
    batches: list[Leaves] = []
    form, held, left = None, 0, 0
    for index, batch in enumerate(source):
        leaves: Leaves = []
        shape = pack(as_arguments(batch, model, index), leaves)
        if batches and shape != form:
            raise CalibrationError(f"{what}: batch {index} has other arguments than the first one.")
        if not all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype.kind == "f"):
            # A ReLU and the clip of a fake quant would hide it from the loss.
            raise CalibrationError(f"{what}: batch {index} holds NaN or infinite values: look at its source.")
        form, size = shape, sum(leaf.nbytes for leaf in leaves)
        if left or (batches and held + size > memory):
            left += 1
            continue
        batches.append(leaves)
        held += size
    if not batches or not all(leaf.size for batch in batches for leaf in batch):
        raise CalibrationError(f"{what} has no batches, or empty ones: give at least one with samples.")
    joined = _alike(batches)
    if joined:
        batches = [[np.concatenate(leaves) for leaves in zip(*batches, strict=True)]]
    numbered = tuple(Batch(number, leaves) for number, leaves in enumerate(batches))
    return Samples(form, numbered, joined, left)


def _alike(batches: list[Leaves]) -> bool:
    """Whether all arrays count samples along the first axis and agree in the others."""
    for batch in batches:
        if any(leaf.ndim == 0 or len(leaf) != len(batch[0]) for leaf in batch):
            return False
        pairs = zip(batch, batches[0], strict=True)
        if any(a.shape[1:] != b.shape[1:] or a.dtype != b.dtype for a, b in pairs):
            return False
    return True


def held_back(samples: Samples, share: float, seed: int) -> tuple[Samples, Samples | None]:
    """Splits data into a part to learn from and one to measure on; None if there is too little.

    Args:
        samples: all of it.
        share: of the second part, rounded up.
        seed: decides which, for data may be sorted.
    """
    count = int(np.ceil(share * samples.count))
    if count == 0 or samples.count - count < 1:
        return samples, None
    order = np.random.default_rng([seed, 2**31]).permutation(samples.count)
    return samples.part(np.sort(order[count:])), samples.part(np.sort(order[:count]))


@dataclass(frozen=True)
class Data:
    """The data of a fine-tuning.

    Attributes:
        learned: the samples that are learned from.
        unseen: the samples that the outputs are evaluated on.
        source: of ``unseen``: ``held back``, ``given``, or ``learned from`` where there is too little data.
    """

    learned: Samples
    unseen: Samples
    source: str


def split_data(
    model: TracedModule, batches: Iterable[Any], evaluation: Iterable[Any] | None, settings: Settings
) -> Data:
    """Reads what is learned from and what is evaluated on.

    Args:
        model: the module that will be called.
        batches: inputs as for ``qtrace.calibrate``.
        evaluation: inputs to evaluate on; None to hold back a part of ``batches``.
        settings: the share to hold back, the seed, and the bound on memory.
    """
    samples = read(batches, model, settings.memory, "the data")
    if evaluation is not None:
        return Data(samples, read(evaluation, model, settings.memory, "the evaluation data"), "given")
    learned, unseen = held_back(samples, settings.holdout, settings.seed)
    return Data(learned, learned, "learned from") if unseen is None else Data(learned, unseen, "held back")
