"""Fingerprints of samples, by which a sample is recognised where it is given again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.data.base import Batch, DataSource, batch_length

__all__ = ["SampleRecord", "fingerprint_samples"]

_READ_VALUES = 4096  # of an input of a sample, evenly spread
_LEAST_VALUES, _LEAST_FLOATS = 16, 4  # of a sample: a few numbers may be alike by chance


def fingerprint_samples(batch: Any) -> list[bytes]:
    """Returns a fingerprint of each sample of a batch; none of a batch whose samples are a few numbers.

    Args:
        batch: an array or Tensor, a tuple of them, or a dict of them by name.
    """
    values = batch.values() if isinstance(batch, Mapping) else batch
    listed = list(values) if isinstance(values, Iterable) and not hasattr(values, "shape") else [values]
    if not all(hasattr(value, "shape") for value in listed):
        return []
    arrays = [np.asarray(value.numpy() if hasattr(value, "numpy") else value) for value in listed]
    count = batch_length(tuple(arrays))
    counted = [array for array in arrays if array.ndim and len(array) == count]
    floats = any(array.dtype.kind == "f" for array in counted)
    if sum(array[0].size for array in counted if count) < (_LEAST_FLOATS if floats else _LEAST_VALUES):
        return []
    return [_fingerprint([array[index] for array in counted]) for index in range(count)]


def _fingerprint(sample: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in sample:
        flat = array.reshape(-1)
        digest.update(str((array.shape, array.dtype.str)).encode())
        digest.update(flat[:: max(1, flat.size // _READ_VALUES)].tobytes())
    return digest.digest()


class SampleRecord:
    """The samples that a source has given, by their fingerprints.

    Args:
        source: the data, of which each batch is recorded that an iteration gives from now on.
    """

    def __init__(self, source: DataSource) -> None:
        self._source, self._numbers = source, set[int]()
        self._samples: set[bytes] = set()
        source.listeners.append(self._add)

    def _add(self, number: int, batch: Batch) -> None:
        if number not in self._numbers:
            self._numbers.add(number)
            self._samples.update(fingerprint_samples(batch))

    def share(self, batches: Iterable[Any]) -> float:
        """Returns the share of the samples of ``batches`` that the source has given; 0 for none.

        What other processes have read of the source is read here, too.
        """
        samples = [sample for batch in batches for sample in fingerprint_samples(batch)]
        if not samples:
            return 0.0
        if not self._numbers or (hasattr(self._source, "__len__") and len(self._numbers) < len(self._source)):
            for _ in self._source.numbered(lambda number: number not in self._numbers):
                pass
        return sum(sample in self._samples for sample in samples) / len(samples)
