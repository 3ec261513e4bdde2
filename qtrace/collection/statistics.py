"""What was collected: an observer for each group of sites, and the batches that they have seen."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from qtrace.collection.base import named_fake_quants
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.observers.base import Observer

__all__ = ["Statistics", "checksum", "fresh", "no_statistics"]


@dataclass
class Statistics:
    """Mergeable statistics of a prepared graph.

    Attributes:
        observers: group -> its observer; replaced, never changed.
        batches: number of each batch that was seen -> a checksum of its values.
    """

    observers: dict[str, Observer]
    batches: dict[int, int] = field(default_factory=dict)

    def add(self, observed: Mapping[str, Iterable[Observer]]) -> None:
        """Adds what observers of some groups have seen, in their order."""
        for group, parts in observed.items():
            for part in parts:
                self.observers[group] = self.observers[group].merge(part)

    def merge(self, other: Statistics) -> Statistics:
        """Both together: the same whichever comes first.

        Raises:
            CalibrationError: when both have seen one batch.
        """
        twice = sorted(set(self.batches) & set(other.batches))
        if twice:
            raise CalibrationError(f"batch {twice[0]} was observed twice: give each batch to one worker.")
        merged = Statistics(dict(self.observers), {**self.batches, **other.batches})
        merged.add({group: [observer] for group, observer in other.observers.items()})
        return merged


def fresh(observer: Observer) -> Observer:
    """A new observer of the same kind, without data."""
    return type(observer)(observer.scheme, **observer.options)


def no_statistics(prepared: TracedModule) -> Statistics:
    """Statistics of a prepared graph that has seen nothing."""
    fakes = named_fake_quants(prepared)
    return Statistics({name: fresh(fq.observer) for name, fq in fakes if fq.observer is not None})


def checksum(arrays: Iterable[np.ndarray]) -> int:
    """A number that tells batches apart: CRC-32 of their bytes, one array after the other."""
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found
