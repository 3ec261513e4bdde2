"""Waits for single values of MegEngine's queue, while MegEngine and other threads run on.

``Tensor.numpy()`` waits for all ops in MegEngine's queue, so that none is left to run, and holds Python's
lock meanwhile. An `Arrival` shares the memory of the value (DLPack) instead, and queues one more op after
it: a sum with one, the mark. A device runs its ops in order, so the value is complete when the mark is in
memory.
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

# Seconds between two looks at the mark: a share of the time waited so far, within two limits.
_PAUSE_SECONDS = (5e-5, 2e-3)
_PAUSE_SHARE = 0.2
# After this time `Tensor.numpy` waits, and raises the error of a failed op.
_TIMEOUT_SECONDS = 1.0
# Enough random bytes that memory which is not yet written does not hold them by chance.
_MARK_BYTES = 64


@dataclass(frozen=True)
class Arrival:
    """A value that MegEngine computes.

    Attributes:
        value: the tensor.
        shared: the memory of the value, the mark, and the numbers that the mark holds when the memory is
            complete; None if the memory cannot be shared.
    """

    value: Tensor
    shared: tuple[np.ndarray, Tensor, np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the value."""
        return math.prod(self.value.shape) * int(np.dtype(self.value.dtype).itemsize)

    def wait(self) -> np.ndarray:
        """Waits for the value, while other threads run, and returns it. The array must not be changed.

        Raises:
            RuntimeError: when MegEngine has reported a failed op. If it reports one later, the array is
                undefined and ``megengine._full_sync`` raises.
        """
        if self.shared is None:
            return self.value.numpy()
        memory, mark, marked = self.shared
        current = np.from_dlpack(_DlpackTensor(mark))
        start = time.monotonic()
        while current.tobytes() != marked.tobytes():  # a tenth of the time of numpy's comparison
            waited = time.monotonic() - start
            if waited > _TIMEOUT_SECONDS:
                return self.value.numpy()
            time.sleep(min(max(_PAUSE_SHARE * waited, _PAUSE_SECONDS[0]), _PAUSE_SECONDS[1]))
        return memory


class Arrivals:
    """Queues a mark after each value that is to be awaited, in the order of computation."""

    def __init__(self) -> None:
        self._marked = np.frombuffer(os.urandom(_MARK_BYTES), np.int32) >> 1  # far from the largest number
        self._mark = Tensor(self._marked)
        self._device = str(self._mark.device.physical_name)

    def expect(self, tensor: Tensor) -> Arrival:
        """Queues a mark after ``tensor``, whose ops are in MegEngine's queue already."""
        # Detached, since an in-place method gives its tensor another value.
        value = tensor.detach()
        if not self._can_share(value):
            return Arrival(value)
        # Before the mark, since sharing a view queues a copy of it.
        memory = np.from_dlpack(_DlpackTensor(value)).reshape(value.shape)
        self._mark, self._marked = self._mark + 1, self._marked + 1
        return Arrival(value, (memory, self._mark, self._marked))

    def _can_share(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` is plain CPU memory, and its ops are in the queue of the marks."""
        name = str(tensor.device.physical_name)
        queued = name == self._device and name.startswith("cpu") and name != "cpu:default"
        plain = tensor.format != "nhwc" and tensor.dtype in (np.float32, np.float16) and all(tensor.shape)
        return queued and plain


class _DlpackTensor:
    """A tensor with the interface that `numpy.from_dlpack` reads."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU
