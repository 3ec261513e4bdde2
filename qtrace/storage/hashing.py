"""The one hash of arrays.

Checkpoints and exported files hold hashes, so the same values must give the same hash in every version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

__all__ = ["hash_arrays"]


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
