"""What was collected: an observer for each group of sites, and the batches that they have seen."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.errors import CalibrationError
from qtrace.observers.base import Observer
from qtrace.preparation.model import QuantizedModel

__all__ = ["Statistics", "arrays", "checksum", "fresh", "no_statistics"]

Observed = Mapping[str, Iterable[Observer]]


@dataclass(frozen=True)
class Statistics:
    """Mergeable statistics of a prepared graph; nothing in it is ever changed.

    Attributes:
        observers: group -> its observer.
        batches: number of each batch that was seen -> a checksum of its values.
    """

    observers: Mapping[str, Observer]
    batches: Mapping[int, int] = field(default_factory=dict)

    def plus(self, observed: Observed, batches: Mapping[int, int] | None = None) -> Statistics:
        """These statistics and what observers of some groups have seen, in their order."""
        observers = dict(self.observers)
        for group, parts in observed.items():
            for part in parts:
                observers[group] = observers[group].merge(part)
        return Statistics(observers, {**self.batches, **(batches or {})})

    def merge(self, other: Statistics) -> Statistics:
        """Both together: the same whichever comes first.

        Raises:
            CalibrationError: when both have seen one batch.
        """
        twice = sorted(set(self.batches) & set(other.batches))
        if twice:
            raise CalibrationError(f"batch {twice[0]} was observed twice: give each batch to one worker.")
        return self.plus({group: [o] for group, o in other.observers.items()}, other.batches)


def fresh(observer: Observer) -> Observer:
    """A new observer of the same kind, without data."""
    return type(observer)(observer.scheme, **observer.options)


def no_statistics(prepared: QuantizedModel) -> Statistics:
    """Statistics of a prepared graph that has seen nothing."""
    fakes = prepared.fake_quants.items()
    return Statistics({name: fresh(fq.observer) for name, fq in fakes if fq.observer is not None})


def arrays(batch: Any) -> list[np.ndarray]:
    """The arrays of a batch, in an order that does not depend on that of a dict."""
    return [np.asarray(value.numpy() if isinstance(value, Tensor) else value) for value in _leaves(batch)]


def checksum(values: Iterable[np.ndarray]) -> int:
    """A number that tells batches apart: CRC-32 of their bytes, one array after the other."""
    found = 0
    for value in values:
        found = zlib.crc32(np.ascontiguousarray(value).data, found)
    return found


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _leaves(batch[key])
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch
