"""Checkpoints: arrays in files, refused where they are damaged or belong to another run.

Arrays in files that qtrace writes: one .npz, read back whole or not at all, and the one hash.

Arrays in one .npz file that we wrote ourselves, read back whole or not at all.

The one hash of arrays.

Checkpoints and exported files hold hashes, so the same values must give the same hash in every version.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import QtraceError, refusing
from qtrace.storage.files import replacing

__all__ = [
    "Checkpoint",
    "OtherIdentityError",
    "hash_arrays",
    "pack",
    "pack_arrays",
    "unpack",
    "unpack_arrays",
    "write",
]

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
    with refusing(QtraceError, f"the checkpoint {path}", "written"), replacing(path) as (file,):
        file.write(data)


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


def pack_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Arrays as the content of an .npz file, without compression."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:  # np.savez takes no array of the name "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)  # type: ignore[no-untyped-call]
    return stream.getvalue()


def unpack_arrays(data: bytes) -> dict[str, np.ndarray]:
    """The inverse of `pack_arrays`.

    Raises:
        ValueError: when the bytes are not such; the message names the cause.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {info.filename.removesuffix(".npy"): _array(archive, info) for info in archive.infolist()}
    except Exception as error:  # whatever zipfile, the decompressors and numpy make of damaged bytes
        raise ValueError(type(error).__name__) from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One member; its checksum is compared before its header is believed."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{info.filename} is compressed, which pack_arrays never does")
    stream = io.BytesIO(archive.read(info))
    array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)  # type: ignore[no-untyped-call]
    return array


def hash_arrays(
    text: str, arrays: Iterable[tuple[str, np.ndarray]], header: str = "{name} {dtype} {shape}"
) -> str:
    """Returns the SHA-256, in hex, of a text and of arrays with their names, dtypes and shapes, in order.

    Args:
        text: settings and names on which the arrays do not depend.
        arrays: pairs of name and array.
        header: the format of the text that is hashed before the values of an array.
    """
    digest = hashlib.sha256(text.encode())
    for name, array in arrays:
        digest.update(header.format(name=name, dtype=array.dtype, shape=array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
