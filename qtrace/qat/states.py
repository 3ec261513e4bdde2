"""Loads a ``state_dict`` into a prepared module, and says in a sentence which sites differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from megengine.module import Module

from qtrace.errors import ConfigError
from qtrace.preparation.passes.insert import CONTAINER

__all__ = ["load_state"]

_BATCHNORM = ("running_mean", "running_var")


def load_state(prepared: Module, state: Mapping[str, np.ndarray]) -> None:
    """Loads what ``state_dict()`` of a module that was prepared with the same config returned.

    Averages of such states load, too: numbers stand for arrays without axes, and zero points are rounded.
    ``load_state_dict`` of MegEngine refuses those, and raises a KeyError with the names of all tensors where
    the configs differ. Nothing is loaded if anything differs.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        state: the weights, scales and zero points by name.

    Raises:
        ConfigError: when a site or a parameter is missing or has another shape or other values to learn,
            naming the first ones of each kind.
    """
    own = prepared.state_dict()
    sites, others = _groups(own), _groups(state)
    differing = [name for name in sites if name in others and sites[name] != others[name]]
    shapes = [
        f"{name} {_shape(state[name])} instead of {_shape(own[name])}"
        for name in own
        if name in state and np.size(state[name]) != own[name].size
    ]
    lost = [name for name in own if name not in state and not _is_site(name)]
    extra = [name for name in state if name not in own and not _is_site(name)]
    fakes = [f"{name} ({', '.join(others[name])} instead of {', '.join(sites[name])})" for name in differing]
    differences = {
        "it has no values for the sites": [name for name in sites if name not in others],
        "it has sites that this graph does not have": [name for name in others if name not in sites],
        "other fake quants stood at": fakes,
        "it has no": lost,
        "it has parameters that this graph does not have": extra,
        "other shapes": shapes,
    }
    if problems := [_listed(subject, names) for subject, names in differences.items() if names]:
        norms = any(name.endswith(_BATCHNORM) for name in (*lost, *extra))
        cause = ", such as qat.bn.fold, which keeps or removes BatchNorms" if norms else ""
        raise ConfigError(
            f"the state is of a graph that was prepared otherwise: {'; '.join(problems)}. "
            f"Prepare the model with the config that the state is of{cause}, or calibrate this one."
        )
    prepared.load_state_dict({name: _as_own(name, state[name], value) for name, value in own.items()})


def _as_own(name: str, value: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns a tensor of a state with the type and shape of the module's own; a zero point as an integer."""
    array = np.asarray(value, np.float64)
    return np.asarray(np.rint(array) if name.endswith(".zero_point") else array, own.dtype).reshape(own.shape)


def _is_site(name: str) -> bool:
    return name.startswith(f"{CONTAINER}.")


def _groups(state: Mapping[str, object]) -> dict[str, list[str]]:
    """Returns the names of the tensors of each site."""
    groups: dict[str, list[str]] = {}
    for name in sorted(filter(_is_site, state)):
        site, _, tensor = name.removeprefix(f"{CONTAINER}.").rpartition(".")
        groups.setdefault(site, []).append(tensor)
    return groups


def _shape(value: np.ndarray) -> str:
    return "x".join(map(str, np.shape(value))) or "one number"


def _listed(subject: str, names: Sequence[str]) -> str:
    """Names the first entries, and counts the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{subject} {', '.join(names[:3])}{more}"
