"""The state of a fine-tuning in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qtrace.errors import TrainingError
from qtrace.storage import checkpoints

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
    checkpoints.write(path, checkpoints.pack(identity, state))


def load(path: Path, identity: str) -> dict[str, np.ndarray]:
    """Reads what `save` wrote.

    Raises:
        TrainingError: when it belongs to another model, other data or settings, or is damaged.
    """
    try:
        return checkpoints.unpack(path.read_bytes(), identity)[1]
    except checkpoints.OtherIdentityError:
        raise TrainingError(
            f"the checkpoint {path} belongs to another fine-tuning: the model, the data or a setting has "
            "changed since. Put it back, or remove the checkpoint and begin anew (--force)."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"the checkpoint {path} is damaged ({type(error).__name__}): remove it and begin anew (--force)."
        ) from error
