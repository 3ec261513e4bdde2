"""The checkpoint of a fine-tuning: all that its next step depends on, under the identity of the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Data
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.graph.types import TracedModule
from qtrace.preparation.identity import graph_hash
from qtrace.storage import checkpoints

__all__ = ["identity_of", "pack_state", "read_checkpoint", "restore_state", "write_checkpoint"]

# Settings that a resumed run may change.
_CHANGEABLE = ("checkpoint_every", "memory", "max_minutes", "engine")


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, np.ndarray]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def identity_of(
    settings: FinetuneSettings, jit: bool, model: TracedModule, teacher: TracedModule, data: Data
) -> str:
    """Returns a text that tells a run from one with other settings, graphs or data."""
    options = dataclasses.asdict(settings).items()
    identity = {key: value for key, value in options if key not in _CHANGEABLE} | {"jit": jit}
    hashes = [graph_hash(model), graph_hash(teacher), data.learned.identity, data.unseen.identity]
    return json.dumps([identity, *hashes], sort_keys=True, default=list)


def pack_state(model: TracedModule, owners: Mapping[str, _Stateful]) -> dict[str, np.ndarray]:
    """Returns the values of the model and the states of ``owners`` as arrays."""
    state = {f"model/{name}": tensor.numpy() for name, tensor in model.named_tensors()}
    for name, owner in owners.items():
        state.update({f"{name}/{key}": value for key, value in owner.state_dict().items()})
    return state


def restore_state(
    state: Mapping[str, np.ndarray], model: TracedModule, owners: Mapping[str, _Stateful]
) -> None:
    """Gives the model and ``owners`` the state that `pack_state` returned."""
    for name, tensor in model.named_tensors():
        tensor._reset(type(tensor)(state[f"model/{name}"]))
    for name, owner in owners.items():
        prefix = f"{name}/"
        owner.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})


def write_checkpoint(path: Path, identity: str, state: dict[str, np.ndarray]) -> None:
    """Writes the arrays of a checkpoint, atomically."""
    checkpoints.write(path, checkpoints.pack(identity, state))


def read_checkpoint(path: Path, identity: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint; refuses a damaged one, and one of another model, data or settings."""
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
