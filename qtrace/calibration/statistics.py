"""The statistics of a calibration: an observer for each group of sites, and the observed batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.calibration.base import range_group
from qtrace.data.base import read_array
from qtrace.errors import CalibrationError
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from qtrace.preparation.float16 import float_values
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QScheme

__all__ = ["Statistics", "arrays", "checksum", "fresh", "no_statistics"]

Observed = Mapping[str, Iterable[Observer]]


@dataclass(frozen=True)
class Statistics:
    """Immutable, mergeable statistics of a prepared graph.

    Attributes:
        observers: group of sites -> its observer; and `range_group` of a node in float -> its observer,
            if the config asks for float16.
        batches: number of each observed batch -> a checksum of its values.
    """

    observers: Mapping[str, Observer]
    batches: Mapping[int, int] = field(default_factory=dict)

    def plus(self, observed: Observed, batches: Mapping[int, int] | None = None) -> Statistics:
        """Returns these statistics merged with further observers of some groups, in their order."""
        observers = dict(self.observers)
        for group, others in observed.items():
            for other in others:
                observers[group] = observers[group].merge(other)
        return Statistics(observers, {**self.batches, **(batches or {})})

    def merge(self, other: Statistics) -> Statistics:
        """Merges two statistics; commutative and associative.

        Raises:
            CalibrationError: when both hold the same batch.
        """
        twice = sorted(set(self.batches) & set(other.batches))
        if twice:
            raise CalibrationError(f"batch {twice[0]} was observed twice: give each batch to one worker.")
        return self.plus({group: [o] for group, o in other.observers.items()}, other.batches)


def fresh(observer: Observer) -> Observer:
    """Builds an observer without data, of the same kind and options."""
    return type(observer)(observer.scheme, **observer.options)


def no_statistics(prepared: QuantizedModel) -> Statistics:
    """Builds the statistics of a prepared graph before its first batch."""
    fakes = prepared.fake_quants.items()
    ranges = {range_group(name): MinMax(QScheme()) for name in float_values(prepared)}
    observers = {name: fresh(fq.observer) for name, fq in fakes if fq.observer is not None}
    return Statistics({**observers, **ranges})


def arrays(batch: Any) -> list[np.ndarray]:
    """Returns the arrays of a batch; the order of the keys of a dict does not matter."""
    return [
        value.numpy()
        if isinstance(value, Tensor)
        else np.asarray(read_array(value, 0) if hasattr(value, "detach") else value)
        for value in _leaves(batch)
    ]


def checksum(values: Iterable[np.ndarray]) -> int:
    """Returns the CRC-32 of the bytes of all arrays, which tells batches apart."""
    crc = 0
    for value in values:
        crc = zlib.crc32(np.ascontiguousarray(value).data, crc)
    return crc


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _leaves(batch[key])
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch
