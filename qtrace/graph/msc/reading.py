"""Reads an MSCGraph from its files: the JSON document, and the values of weights beside it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from qtrace.errors import DataError
from qtrace.graph.msc.document import MSCGraph
from qtrace.plugins.arguments import check_arguments
from qtrace.storage.archives import unpack_arrays

__all__ = ["from_msc"]


@check_arguments
def from_msc(path: str | os.PathLike[str]) -> MSCGraph:
    """Reads an MSCGraph: the JSON document, and the values of weights from the ``.npz`` file beside it.

    Args:
        path: the JSON document. A document without ``.npz`` has no values.

    Raises:
        DataError: when a file is missing, damaged, or no MSCGraph.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
        values = _read_values(source.with_suffix(".npz"))
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no MSCGraph, or damaged: it is no text.") from error
    return MSCGraph.from_json(text, values, source=str(path))


def _read_values(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        return unpack_arrays(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path.with_suffix('.json')} is damaged: {path.name}, with the values of its weights, cannot be "
            f"read ({error})."
        ) from error
