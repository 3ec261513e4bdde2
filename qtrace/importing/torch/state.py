"""Gives the parameters of a graph back as a state of torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from qtrace.errors import ImportingError
from qtrace.graph.moves import places_of
from qtrace.graph.origin import FileNorm, FileOrigin, read_origin
from qtrace.graph.types import TracedModule
from qtrace.importing.torch.exporting import import_torch
from qtrace.importing.torch.record import FAKE_QUANTS, hash_values, layers_with_norms

__all__ = ["state_arrays", "to_torch_state"]

_LOG = logging.getLogger("qtrace")
_SHOWN = 5


def to_torch_state(traced: TracedModule) -> dict[str, Any]:
    """Returns the parameters of a network from `from_torch` under the names of the module's state.

    ``module.load_state_dict(state, strict=False)`` then gives torch the float network that qtrace quantizes:
    what `finetune` or a training loop learned, and folded weights. A BatchNorm that `prepare` folded into its
    layer becomes one that only adds the layer's bias. Of convolutions that `prepare` merged into one, the
    largest has the sum of all; the others, and merged BatchNorms, add nothing. Counters, such as
    ``num_batches_tracked``, are left out, and so are tensors that the graph does not hold, since the network
    does not read them or the import computed others from them, as from weights that the module standardizes.
    The logger ``qtrace`` names these; the module's own are still right.

    Args:
        traced: the network of `from_torch`, before or after `prepare`, `calibrate`, `finetune` and `convert`.

    Returns:
        Name -> float32 tensor on the CPU.

    Raises:
        ImportingError: when the network does not come from torch, torch is missing, a parameter was folded
            where torch's module has no place for it, or one that changed is also read elsewhere in the
            module; the message names it.
    """
    torch = import_torch()
    state = {name: torch.from_numpy(array) for name, array in state_arrays(traced).items()}
    absent = origin.absent if (origin := read_origin(traced)) is not None else ()
    if absent:
        _LOG.warning(
            "the state has no %s: the graph does not hold them, since the network does not read them or the "
            "import computed other tensors from them. Those of the module itself are still right.",
            _listed(absent),
        )
    return state


def state_arrays(traced: TracedModule) -> dict[str, np.ndarray]:
    """Returns the state of `to_torch_state` as float32 arrays.

    Raises:
        ImportingError: see `to_torch_state`.
    """
    origin = read_origin(traced)
    if origin is None or not (origin.parameters or origin.parts):
        raise ImportingError("the network has no names of torch's state: import it by qtrace.from_torch.")
    values = {name: tensor.numpy() for name, tensor in traced.named_parameters()}
    values.update({name: tensor.numpy() for name, tensor in traced.named_buffers()})
    values.update(_merged_values(origin, values))
    state: dict[str, np.ndarray] = {}
    written: dict[str, np.ndarray] = {}
    for path, parameter in origin.parameters.items():
        if path not in values:
            continue
        array = state.setdefault(parameter.tensor, np.zeros(parameter.shape, np.float32))
        places = places_of(parameter.shape, parameter.moves).reshape(-1)
        own = values[path].reshape(-1)
        known = written.setdefault(parameter.tensor, np.zeros(array.size, bool))
        again = known[places]
        if not np.array_equal(array.reshape(-1)[places][again], own[again], equal_nan=True):
            raise ImportingError(
                f"{path} and another parameter of the graph are one tensor of torch's module, "
                f"{parameter.tensor}, and differ in value: take the state before what changed one of them."
            )
        array.reshape(-1)[places] = own
        if not np.array_equal(array.reshape(-1)[places], own, equal_nan=True):
            raise ImportingError(
                f"{path} holds numbers of {parameter.tensor} several times, and they differ after training: "
                "take the state before it, or keep this parameter fixed in training."
            )
        known[places] = True
    for name, part in origin.parts.items():
        if part.tensor in values:
            state[name] = values[part.tensor].reshape(-1)[places_of(part.shape, part.moves)]
    norms = _write_norms(values, origin, state, layers_with_norms(traced))
    _check_frozen(origin, state)
    own_parts = {part.tensor for part in origin.parts.values()}
    _check_others(values, origin, {*origin.parameters, *own_parts, *norms})
    missing = {p.tensor for path, p in origin.parameters.items() if path not in values} - set(state)
    missing |= {name for name, known in written.items() if not known.all()}
    missing |= {name for name, part in origin.parts.items() if part.tensor not in values}
    if missing:
        raise ImportingError(
            f"the graph no longer holds {_listed(sorted(missing))}, which a pass folded into other "
            "parameters: take the state before prepare, or leave that algorithm out."
        )
    state.update({name: state[own] for name, own in origin.tied.items() if own in state})
    return state


def _merged_values(origin: FileOrigin, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the parameters of merged layers with which these add nothing.

    Raises:
        ImportingError: for one that torch's module computes from others, lacks, or reads elsewhere, too.
    """
    biases = {norm.bias for weight, norm in origin.norms.items() if weight in origin.merged}
    lost = ({*origin.merged} - {*origin.parameters} - biases) | ({*origin.merged} & {*values})
    if lost:
        raise ImportingError(
            f"reparameterize merged the layer of {_listed(sorted(lost))} into another one, and no values of "
            "torch's module leave it out: take the state before prepare, or give prepare a config whose "
            "`ptq` has no reparameterize."
        )
    return {path: np.full(count, number, np.float32) for path, (number, count) in origin.merged.items()}


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} others" if rest > 0 else "")


def _check_others(values: dict[str, np.ndarray], origin: FileOrigin, known: set[str]) -> None:
    """Refuses parameters that learned or were added, and that are no tensors of the module's state.

    Raises:
        ImportingError: naming them.
    """
    lost = []
    for path, value in values.items():
        if path in known or FAKE_QUANTS in path.split("."):
            continue
        own = origin.computed.get(path)
        if np.any(value) if own is None else hash_values(value) != own:
            lost.append(path)
    if lost:
        raise ImportingError(
            f"{_listed(sorted(lost))} changed, and torch's module has no tensor for it: the module computes "
            "it from others, or a pass added it. Take the state before that pass, or keep this parameter "
            "fixed in training."
        )


def _write_norms(
    values: dict[str, np.ndarray], origin: FileOrigin, state: dict[str, np.ndarray], standing: Set[str]
) -> set[str]:
    """Writes the BatchNorms that were folded into their layers, and the layers' biases; returns their paths.

    A folded BatchNorm keeps neither mean nor gain. With the mean 0 and ``gamma = sqrt(variance + eps)`` it
    adds ``beta`` alone. One without a gain has the variance ``1 - eps``, one without a shift the mean
    ``-bias``.

    Raises:
        ImportingError: for a tensor that belongs to several layers, and would need another value for each.
    """
    there = {path: own.tensor for path, own in origin.parameters.items() if path in values}
    folded = {weight: norm for weight, norm in origin.norms.items() if weight in {*values} - standing}
    biases = {norm.bias for norm in folded.values()}
    fixed = {tensor for path, tensor in there.items() if path not in biases}
    paths: set[str] = set()
    for norm in folded.values():
        bias = values.get(norm.bias)
        if bias is None:
            continue
        own = origin.parameters.get(norm.bias)
        if own is not None:
            unit = {own.tensor: np.zeros(own.shape, np.float32)}
        else:
            unit = {}
        unit.update(_unit_norm(norm, bias.reshape(-1).astype(np.float32)))
        for name, array in unit.items():
            if name in fixed and not np.array_equal(state[name], array, equal_nan=True):
                raise ImportingError(
                    f"{name} is read in several places of torch's module, and prepare folded it at one of "
                    "them: take the state before prepare, or give prepare a config whose `ptq` has no "
                    "fuse_bn."
                )
            state[name] = array
        fixed |= unit.keys()
        paths.add(norm.bias)
    return paths


def _check_frozen(origin: FileOrigin, state: Mapping[str, np.ndarray]) -> None:
    """Refuses tensors that changed where the graph also holds numbers that were computed from them.

    Raises:
        ImportingError: naming them.
    """
    changed = [n for n, own in origin.frozen.items() if n in state and hash_values(state[n]) != own]
    if changed:
        raise ImportingError(
            f"{_listed(changed)} changed, and torch's module computes numbers from it elsewhere, too, which "
            "the graph keeps as they were at the import: take the state before prepare and training, or "
            "leave out the algorithm that changed it."
        )


def _unit_norm(norm: FileNorm, bias: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a BatchNorm that only adds ``bias``.

    Raises:
        ImportingError: for a BatchNorm without statistics.
    """
    gamma, beta, mean, variance = norm.tensors
    if not mean or not variance:
        raise ImportingError(f"a BatchNorm was folded into {norm.bias}, and torch's one keeps no statistics.")
    ones = np.ones_like(bias)
    unit = {
        gamma: np.sqrt(ones + np.float32(norm.eps)),
        beta: bias,
        mean: 0 * ones if beta else -bias,
        variance: ones if gamma else ones - np.float32(norm.eps),
    }
    return {name: array for name, array in unit.items() if name}
