"""Waiting for values that MegEngine still computes, while it goes on and other threads run.

``Tensor.numpy()`` waits for all ops that MegEngine was given, so that none is left to go on with, and keeps
Python's lock meanwhile. Here the memory of a value is shared (DLPack), and behind it MegEngine is given one
more op, a sum with one. A device runs its ops in order: when the sum is in memory, so is the value.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

__all__ = ["Arrival", "Arrivals"]

# Seconds between two looks: the share of what was waited so far, between the least and the most.
_PAUSES = (5e-5, 2e-3)
_SHARE = 0.2
# After so many seconds without an answer `Tensor.numpy` waits, and raises what went wrong.
_PATIENCE = 1.0
# Bytes of a mark: so many random ones are not by chance in memory that is not yet written.
_MARK = 64


@dataclass(frozen=True)
class Arrival:
    """A value that was asked for.

    Attributes:
        value: it.
        shared: its memory, and a tensor with the numbers that it holds when the memory is whole; None where
            one must wait otherwise.
    """

    value: Tensor
    shared: tuple[np.ndarray, Tensor, np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """How much memory the value takes."""
        return math.prod(self.value.shape) * int(np.dtype(self.value.dtype).itemsize)

    def wait(self) -> np.ndarray:
        """The value when it is there; other threads run meanwhile. Nobody may change it.

        Raises:
            RuntimeError: where MegEngine knows by now that an op has failed; else the value is anything, and
                ``megengine._full_sync`` tells.
        """
        if self.shared is None:
            return self.value.numpy()
        memory, mark, marked = self.shared
        seen = np.from_dlpack(_Shared(mark))
        begun = time.monotonic()
        while seen.tobytes() != marked.tobytes():  # a tenth of the time of numpy's comparison
            waited = time.monotonic() - begun
            if waited > _PATIENCE:
                return self.value.numpy()
            time.sleep(min(max(_SHARE * waited, _PAUSES[0]), _PAUSES[1]))
        return memory


class Arrivals:
    """Asks for values of MegEngine's, in the order in which they are computed."""

    def __init__(self) -> None:
        self._marked = np.frombuffer(os.urandom(_MARK), np.int32) >> 1  # far from the largest number
        self._mark = Tensor(self._marked)
        self._device = str(self._mark.device.physical_name)

    def expect(self, tensor: Tensor) -> Arrival:
        """Asks for a value; the ops that compute it were given to MegEngine before."""
        # Detached: a method in place gives the tensor that it is called on another value.
        value = tensor.detach()
        if not self._shares(value):
            return Arrival(value)
        # Before the mark: of a view, what is shared is a copy that MegEngine is told to make now.
        memory = np.from_dlpack(_Shared(value)).reshape(value.shape)
        self._mark, self._marked = self._mark + 1, self._marked + 1
        return Arrival(value, (memory, self._mark, self._marked))

    def _shares(self, tensor: Tensor) -> bool:
        """Whether its memory is this processor's, in its order, and its ops are in the queue of the marks."""
        name = str(tensor.device.physical_name)
        queued = name == self._device and name.startswith("cpu") and name != "cpu:default"
        plain = tensor.format != "nhwc" and tensor.dtype in (np.float32, np.float16) and all(tensor.shape)
        return queued and plain


class _Shared:
    """A tensor as `numpy.from_dlpack` takes it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU
