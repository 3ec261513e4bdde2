"""The state of a fine-tuning in one file."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.collection.checkpoint import write_durably
from qtrace.errors import TrainingError

__all__ = ["load", "save"]


def save(path: Path, state: Mapping[str, np.ndarray], identity: str) -> None:
    """Writes arrays; the file appears whole or not at all.

    Args:
        path: the file.
        state: arrays by name.
        identity: what they belong to.

    Raises:
        QtraceError: when it cannot be written.
    """
    stream = io.BytesIO()
    meta = np.frombuffer(json.dumps({"identity": identity}).encode(), np.uint8)
    np.savez(stream, **{"meta": meta, **state})
    write_durably(path, stream.getvalue())


def load(path: Path, identity: str) -> dict[str, Any]:
    """Reads what `save` wrote.

    Raises:
        TrainingError: when it belongs to another model, other data or settings, or is damaged.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            content = {key: file[key] for key in file.files}
        found = json.loads(content.pop("meta").tobytes())["identity"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise TrainingError(
            f"the checkpoint {path} is damaged ({type(error).__name__}): remove it and begin anew."
        ) from error
    if found != identity:
        raise TrainingError(
            f"the checkpoint {path} belongs to another fine-tuning: the model, the data or a setting has "
            "changed since. Put it back, or remove the checkpoint and begin anew."
        )
    return content
