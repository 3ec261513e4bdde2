"""Words for what a figure was measured on: which samples, how many, and on which side of an export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["FAKE_QUANTS", "Counted", "samples_of"]

FAKE_QUANTS = "graph with fake quants"
"""What computes the figures that are no runtime's."""


class Counted:
    """Batches whose samples are counted while they are read.

    Attributes:
        samples: the number of samples that were read.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        """Counts the samples of ``batches``, dicts or tuples of arrays."""
        self.samples = 0
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches."""
        from qtrace.data.base import batch_length

        for batch in self._batches:
            self.samples += batch_length(batch)
            yield batch


def samples_of(samples: int, option: str, max_batches: int | None) -> str:
    """Says which samples of the data of ``option`` were used, as the verdict of a command says it.

    Args:
        samples: the number of samples.
        option: the option that named the data, such as ``--data``.
        max_batches: the value of --max-batches; None for all batches.
    """
    if max_batches is None:
        return f"{samples} samples, all of {option}"
    return f"{samples} samples at the beginning of {option} (--max-batches)"
