"""Checkpoints: arrays in files, refused where they are damaged or belong to another run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import QtraceError
from qtrace.storage.archives import pack_arrays, unpack_arrays
from qtrace.storage.files import replacing

__all__ = ["Checkpoint", "OtherIdentityError", "pack", "unpack", "write"]

_SUFFIX = ".block.npz"


class OtherIdentityError(Exception):
    """A checkpoint belongs to another run; the caller says to the user what that means."""


def pack(identity: str, arrays: Mapping[str, Any], **facts: Any) -> bytes:
    """Packs arrays as the content of a checkpoint.

    Args:
        identity: a hash of everything on which the arrays depend.
        arrays: arrays by name; none is called "meta".
        **facts: plain data next to the arrays.
    """
    meta = json.dumps({"identity": identity, **facts}).encode()
    return pack_arrays({"meta": np.frombuffer(meta, np.uint8), **arrays})


def unpack(data: bytes, identity: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the facts and the arrays that `pack` was given.

    Raises:
        OtherIdentityError: when it was packed with another identity.
        ValueError, KeyError, TypeError: when it is damaged.
    """
    arrays = unpack_arrays(data)
    facts = json.loads(arrays.pop("meta").tobytes())
    if facts["identity"] != identity:
        raise OtherIdentityError
    return facts, arrays


def write(path: Path, data: bytes) -> None:
    """Writes a checkpoint; it is on the disk when this returns.

    Raises:
        QtraceError: when it cannot be written.
    """
    try:
        with replacing(path) as (file,):
            file.write(data)
    except OSError as error:
        raise QtraceError(f"the checkpoint {path} cannot be written: {error.strerror}.") from error


class Checkpoint:
    """Keeps the result of each learned block under a key of everything that it depends on.

    An interrupted run continues after these blocks and gives the same result.

    Args:
        folder: the existing folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> dict[str, np.ndarray] | None:
        """Returns the arrays under ``key``; None if there is no file or it cannot be read."""
        path = self.folder / f"{key}{_SUFFIX}"
        if not path.is_file():
            return None
        try:
            return unpack_arrays(path.read_bytes())
        except (OSError, ValueError):
            return None

    def save(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps ``arrays`` under ``key``."""
        write(self.folder / f"{key}{_SUFFIX}", pack_arrays(arrays))
