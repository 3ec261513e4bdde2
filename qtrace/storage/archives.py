"""Arrays in one .npz file that we wrote ourselves, read back whole or not at all."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["pack_arrays", "unpack_arrays"]


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
