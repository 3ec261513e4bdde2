"""Blocks that were learned, in files: an interrupted run goes on behind them, to the same result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from qtrace.storage.archives import pack_arrays, unpack_arrays

__all__ = ["Checkpoint", "key_of"]

_SUFFIX = ".block.npz"


class Checkpoint:
    """Keeps the result of each block under a key of everything that it depends on.

    Args:
        folder: where the files are; it exists.
        write: writes a file as a whole or not at all.
    """

    def __init__(self, folder: Path, write: Callable[[Path, bytes], None]) -> None:
        self.folder, self._write = folder, write

    def load(self, key: str) -> dict[str, np.ndarray] | None:
        """What was kept under ``key``; None when there is nothing, or nothing that can be read."""
        path = self.folder / f"{key}{_SUFFIX}"
        if not path.is_file():
            return None
        try:
            return unpack_arrays(path.read_bytes())
        except (OSError, ValueError):
            return None

    def save(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps ``arrays`` under ``key``."""
        self._write(self.folder / f"{key}{_SUFFIX}", pack_arrays(arrays))


def key_of(text: str, arrays: Iterable[np.ndarray]) -> str:
    """A hash of settings and names in ``text``, and of all values."""
    found = hashlib.sha256(text.encode())
    for array in arrays:
        value = np.ascontiguousarray(array)
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(value.tobytes())
    return found.hexdigest()
