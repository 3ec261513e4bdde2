"""The state of a fine-tuning in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.calibration.checkpoint import write_durably
from qtrace.errors import TrainingError
from qtrace.storage.archives import pack_arrays, unpack_arrays

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
    meta = np.frombuffer(json.dumps({"identity": identity}).encode(), np.uint8)
    write_durably(path, pack_arrays({"meta": meta, **state}))


def load(path: Path, identity: str) -> dict[str, Any]:
    """Reads what `save` wrote.

    Raises:
        TrainingError: when it belongs to another model, other data or settings, or is damaged.
    """
    try:
        content = unpack_arrays(path.read_bytes())
        found = json.loads(content.pop("meta").tobytes())["identity"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"the checkpoint {path} is damaged ({type(error).__name__}): remove it and begin anew (--force)."
        ) from error
    if found != identity:
        raise TrainingError(
            f"the checkpoint {path} belongs to another fine-tuning: the model, the data or a setting has "
            "changed since. Put it back, or remove the checkpoint and begin anew (--force)."
        )
    return content
