"""Arrays in files that qtrace writes: one .npz, read back whole or not at all, and the one hash.

Arrays in one .npz file that we wrote ourselves, read back whole or not at all.

The one hash of arrays.

Checkpoints and exported files hold hashes, so the same values must give the same hash in every version.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

__all__ = ["hash_arrays", "pack_arrays", "unpack_arrays"]


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
        ValueError: when the bytes are not those; the message names the exception behind it.
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
