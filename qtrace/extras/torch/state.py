"""Notes which parameter of an imported graph is which tensor of torch's state, and gives the state back.

The exported file has the names of the state, and the moves say where each number stands. Both are
checked by value: a parameter that is not what its moves make of the state's tensor is left out.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import megengine.module as M
import numpy as np
from megengine import Parameter

from qtrace.errors import ImportingError, install, shorten_list
from qtrace.graph.flatten import set_parameter
from qtrace.graph.origin import (
    FileNorm,
    FileOrigin,
    FileParameter,
    Move,
    hash_values,
    part_of,
    places_of,
    read_origin,
    reshaped_to,
    taken_at,
    write_origin,
)
from qtrace.graph.recurrent import OnnxRecurrent
from qtrace.graph.types import CallMethod, GetAttr, ModuleNode, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module

FAKE_QUANTS = "qsites"
"""The submodule of a prepared graph that holds its fake quants."""

_LAYERS = (M.Conv1d, M.Conv2d, M.ConvTranspose2d, M.Linear)
_NORMS = (M.BatchNorm1d, M.BatchNorm2d)
# Kind of a recurrent layer -> the order of its gates in torch, and in ONNX.
_GATES = {"lstm": ("ifgo", "iofg"), "gru": ("rzn", "zrn"), "rnn": ("h", "h")}


def import_torch() -> Any:
    """Imports torch.

    Raises:
        ImportingError: when a package of the extra ``torch`` is missing.
    """
    for package in ("torch", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ImportingError(f"networks from torch need the package {package}: run {install('torch')}.")
    import torch

    return torch


def note_state(traced: TracedModule, state: Mapping[str, Any]) -> None:
    """Records the tensors of a state of torch, and the BatchNorms that `prepare` may fold into a layer.

    Args:
        traced: the imported graph.
        state: the ``state_dict`` of the module.
    """
    origin = read_origin(traced)
    assert origin is not None
    stored = set(_stored_paths(traced))
    parameters = {path: parameter for path, parameter in origin.parameters.items() if path in stored}
    checked = _covered({path: own for path, own in parameters.items() if _is_state(traced, path, own, state)})
    checked.update(_kept_tables(traced, stored - set(checked), checked, state))
    parts = _recurrent_parts(traced, state)
    other_paths = stored - {*checked, *(part.tensor for part in parts.values())}
    computed = {path: hash_values(get_module(traced, path).numpy()) for path in other_paths}
    norms = _norms(traced, checked)
    _tie(traced, checked)
    held = {*parts, *(parameter.tensor for parameter in checked.values())}
    tied = _tied_names(state, held)
    absent = tuple(n for n, own in state.items() if n not in held and n not in tied and _is_float(own))
    other = {own.tensor for path, own in origin.parameters.items() if path not in checked}
    frozen = {
        name: hash_values(_numbers(state[name]))
        for name in sorted((held & ({*origin.frozen} | other)) - {*parts})
    }
    known = replace(
        origin,
        parameters=checked,
        norms=norms,
        computed=computed,
        tied=tied,
        absent=absent,
        frozen=frozen,
        parts=parts,
    )
    # torch's exporter notes lines of the user's source in its file, which nobody has asked to keep.
    write_origin(traced, replace(known, graph_facts=(), end_facts={}, output_axes={}, node_remarks={}))


def _covered(parameters: Mapping[str, FileParameter]) -> dict[str, FileParameter]:
    """Returns the parameters whose tensors are in the graph whole, be it in parts."""
    places: dict[str, list[np.ndarray]] = {}
    for parameter in parameters.values():
        own = places_of(parameter.shape, parameter.moves).reshape(-1)
        places.setdefault(parameter.tensor, []).append(own)
    whole = {
        parameter.tensor
        for parameter in parameters.values()
        if np.unique(np.concatenate(places[parameter.tensor])).size == math.prod(parameter.shape)
    }
    return {path: parameter for path, parameter in parameters.items() if parameter.tensor in whole}


def _kept_tables(
    traced: TracedModule, paths: set[str], known: Mapping[str, FileParameter], state: Mapping[str, Any]
) -> dict[str, FileParameter]:
    """Returns tensors that a module had taken from one of its own before the export, and kept as a constant.

    timm's LeViT keeps its biases at all pairs of places so, once it has run. The file does not say where such
    a constant comes from, but numbers that are all different do, or the numbers of each row.
    """
    held = {parameter.tensor for parameter in known.values()}
    parts: dict[str, FileParameter] = {}
    for name, tensor in state.items():
        owner = name.rpartition(".")[0]
        own = [path for path in sorted(paths) if path.rpartition(".")[0] == owner]
        if not own or name in held or not _is_float(tensor) or tensor.numel() < 2:
            continue
        for path in own:
            values = get_module(traced, path).numpy().astype(np.float32)
            moves = _moves_from(_numbers(tensor), values, (int(tensor.shape[0]), 1))
            if moves is not None:
                parts[path] = FileParameter(name, tuple(int(n) for n in tensor.shape), moves)
    return parts


def _recurrent_parts(traced: TracedModule, state: Mapping[str, Any]) -> dict[str, FileParameter]:
    """Returns the tensors of torch's recurrent layers, which ONNX's layers hold in another order of gates."""
    first = re.compile(r"(.*)weight_ih_(l\d+)\Z")
    stacks = [match.groups() for match in map(first.match, state) if match is not None]
    parts: dict[str, FileParameter] = {}
    for path, layer in traced.named_modules():
        if isinstance(layer, OnnxRecurrent):
            for owner, level in stacks:
                own = _parts_of_layer(layer, path, owner, level)
                if own.keys() <= state.keys() and all(
                    np.array_equal(_numbers(state[name]), _values_at(traced, part).reshape(-1))
                    for name, part in own.items()
                ):
                    parts.update(own)
    return parts


def _parts_of_layer(layer: OnnxRecurrent, path: str, owner: str, level: str) -> dict[str, FileParameter]:
    (gates, order), size = _GATES[layer.kind], int(layer.recurrence.shape[-1])
    rows = [order.index(gate) * size + row for gate in gates for row in range(size)]
    sources = {"weight_ih": ("weight", 0), "weight_hh": ("recurrence", 0)}
    if layer.bias is not None:
        sources |= {"bias_ih": ("bias", 0), "bias_hh": ("bias", len(rows))}
    parts = {}
    for kind, (name, start) in sources.items():
        shape = tuple(int(n) for n in getattr(layer, name).shape)
        taken = taken_at(1, [start + row for row in rows])
        for way, suffix in enumerate(("", "_reverse")[: shape[0]]):
            moves = (part_of(0, way, way + 1), taken, reshaped_to((len(rows), *shape[2:])))
            parts[f"{owner}{kind}_{level}{suffix}"] = FileParameter(f"{path}.{name}", shape, moves)
    return parts


def _values_at(traced: TracedModule, part: FileParameter) -> np.ndarray:
    values: np.ndarray = get_module(traced, part.tensor).numpy().reshape(-1)
    return values[places_of(part.shape, part.moves)]


def _moves_from(numbers: np.ndarray, values: np.ndarray, counts: Sequence[int]) -> tuple[Move, ...] | None:
    """Returns the moves that make some values of numbers, all of which are among them.

    Args:
        numbers: the numbers.
        values: the values.
        counts: numbers of equal rows, each row of values having its own numbers.

    Returns:
        The moves; None if there is no one way, or one that lists too many places.
    """
    from qtrace.importing.onnx.quantization import MAX_TAKEN  # the way back to torch needs no package onnx

    if not values.size or not np.isfinite(numbers).all():
        return None
    for count in counts:
        if values.size % count or numbers.size % count:
            continue
        rows, own = numbers.reshape(count, -1), values.reshape(count, -1)
        order = np.argsort(rows, axis=1, kind="stable")
        ordered = np.take_along_axis(rows, order, 1)
        if not (np.diff(ordered, axis=1) > 0).all():
            continue
        at = [np.searchsorted(row, each) for row, each in zip(ordered, own, strict=True)]
        at = np.minimum(np.stack(at), rows.shape[1] - 1)
        places = np.take_along_axis(order, at, 1)
        if not np.array_equal(np.take_along_axis(rows, places, 1), own):
            continue
        if any(np.unique(row).size < rows.shape[1] for row in places):
            continue
        alike = (places == places[0]).all()
        if not alike:
            places = places + rows.shape[1] * np.arange(count)[:, None]
        taken = taken_at(1, places[0]) if alike else taken_at(1, places.reshape(-1))
        if len(taken[1]) <= MAX_TAKEN:
            return reshaped_to((count if alike else 1, -1)), taken, reshaped_to(values.shape)
    return None


def _numbers(tensor: Any) -> np.ndarray:
    flat: np.ndarray = tensor.detach().cpu().float().numpy().reshape(-1)
    return flat


def _is_float(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point)


def _tie(traced: TracedModule, parameters: Mapping[str, FileParameter]) -> None:
    """Makes parameters one that hold one tensor of the state in the same order, as in torch's module."""
    counts = Counter(parameter.tensor for parameter in parameters.values())
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    for path, parameter in sorted(parameters.items()):
        if counts[parameter.tensor] == 1:
            continue
        own = get_module(traced, path)
        places = places_of(parameter.shape, parameter.moves)
        shape = tuple(int(n) for n in own.shape)
        other = first.setdefault((parameter.tensor, shape, places.tobytes()), path)
        if other != path and isinstance(own, Parameter):
            set_parameter(traced, path, get_module(traced, other))


def _tied_names(state: Mapping[str, Any], stored: set[str]) -> dict[str, str]:
    """Returns the names of tensors that are stored under another name of theirs -> that name."""
    names: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        if hasattr(tensor, "data_ptr") and tensor.numel():
            memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            names.setdefault(memory, []).append(name)
    tied = {}
    for group in names.values():
        own = next((name for name in group if name in stored), None)
        if own is not None:
            tied.update({name: own for name in group if name not in stored})
    return tied


def _stored_paths(traced: TracedModule) -> list[str]:
    return [name for name, _ in (*traced.named_parameters(), *traced.named_buffers())]


def _is_state(traced: TracedModule, path: str, parameter: FileParameter, state: Mapping[str, Any]) -> bool:
    """Returns whether a parameter is what its moves make of the tensor of the state."""
    tensor = state.get(parameter.tensor)
    if tensor is None or tuple(tensor.shape) != parameter.shape:
        return False
    flat = _numbers(tensor)
    own = get_module(traced, path).numpy().reshape(-1)
    try:
        places = places_of(parameter.shape, parameter.moves).reshape(-1)
    except ValueError:
        return False
    return places.shape == own.shape and bool(np.array_equal(flat[places], own.astype(np.float32)))


def _norms(traced: TracedModule, parameters: Mapping[str, FileParameter]) -> dict[str, FileNorm]:
    """Returns path of a layer's weight -> the BatchNorm module directly after it."""
    norms = {}
    for expr in exprs(traced):
        path = _called(expr, _NORMS)
        source = expr.inputs[1] if path is not None else None
        if not isinstance(source, TensorNode):
            continue
        layer = _called(source.expr, _LAYERS)
        if path is None or layer is None:
            continue
        names = [f"{path}.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
        gamma, beta, mean, variance = (parameters[n].tensor if n in parameters else "" for n in names)
        eps = float(get_module(traced, path).eps)
        norms[f"{layer}.weight"] = FileNorm(f"{layer}.bias", eps, (gamma, beta, mean, variance))
    return norms


def layers_with_norms(traced: TracedModule) -> set[str]:
    """Returns the paths of the weights and biases of the layers before a BatchNorm that still stands."""
    paths: set[str] = set()
    for expr in exprs(traced):
        if not any(isinstance(n, ModuleNode) and n.module_type in _NORMS for n in expr.inputs):
            continue
        # A BatchNorm that is called reads the layer's result; one that is an argument is folded on the way.
        layer = expr if _called(expr, _NORMS) is None else _before_roundings(expr.inputs[1]).expr
        module = _called(layer, _LAYERS)
        if module is not None:
            paths.add(f"{module}.weight")
        sources = (_before_roundings(node).expr for node in layer.inputs)
        paths.update(str(source.name) for source in sources if isinstance(source, GetAttr))
    return paths


def _before_roundings(node: Any) -> Any:
    """Returns the node that is rounded to ``node``; ``node`` itself if none is."""
    while isinstance(node.expr, CallMethod):
        module = getattr(node.expr.inputs[0], "expr", None)
        if not isinstance(module, GetAttr) or module.name.split(".")[0] != FAKE_QUANTS:
            break
        node = node.expr.inputs[1]
    return node


def _called(expr: Any, kinds: tuple[type, ...]) -> str | None:
    """Returns the path of the module of one of some classes that ``expr`` calls; None if it calls another."""
    if not isinstance(expr, CallMethod) or not isinstance(expr.inputs[0], ModuleNode):
        return None
    if expr.inputs[0].module_type not in kinds or not isinstance(expr.inputs[0].expr, GetAttr):
        return None
    return str(expr.inputs[0].expr.name)


_LOG = logging.getLogger("qtrace")


def to_torch_state(traced: TracedModule) -> dict[str, Any]:
    """Returns the parameters of a network from `from_torch` under the names of the module's state.

    ``module.load_state_dict(state, strict=False)`` then gives torch the float network that qtrace quantizes:
    what `finetune` or a training loop learned, and folded weights. A BatchNorm that `prepare` folded into its
    layer becomes one that only adds the layer's bias. Of convolutions that `prepare` merged into one, the
    largest has the sum of all; the others, and merged BatchNorms, add nothing. Counters, such as
    ``num_batches_tracked``, are left out. So are tensors that the graph does not hold, since the network
    does not read them or the import computed others from them, as from weights that the module standardizes.
    The logger ``qtrace`` names these; the module's own are still right.

    Args:
        traced: the network of `from_torch`, before or after `prepare`, `calibrate`, `finetune` and `convert`.

    Returns:
        Name -> float32 tensor on the CPU.

    Raises:
        ImportingError: when torch is missing, or the network does not come from it. Also when torch's module
            lacks a place for a folded parameter, or reads a changed one elsewhere, too. The message names it.
    """
    torch = import_torch()
    state = {name: torch.from_numpy(array) for name, array in state_arrays(traced).items()}
    absent = origin.absent if (origin := read_origin(traced)) is not None else ()
    if absent:
        _LOG.warning(
            "the state lacks %s: the graph does not hold them, since the network does not read them or the "
            "import computed other tensors from them. Those of the module itself are still right.",
            shorten_list(absent),
        )
    return state


def state_arrays(traced: TracedModule) -> dict[str, np.ndarray]:
    """Returns the state of `to_torch_state` as float32 arrays.

    Raises:
        ImportingError: see `to_torch_state`.
    """
    origin = read_origin(traced)
    if origin is None or not (origin.parameters or origin.parts):
        raise ImportingError("the network lacks names of torch's state: import it by qtrace.from_torch.")
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
                f"{path} and another parameter are one tensor of torch's module, {parameter.tensor}, and "
                "differ in value: take the state before what changed one of them."
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
    read = {expr.name for expr in exprs(traced) if isinstance(expr, GetAttr)}
    norms = _write_norms(values, origin, state, layers_with_norms(traced), read)
    _check_frozen(origin, state)
    own_parts = {part.tensor for part in origin.parts.values()}
    _check_others(values, origin, {*origin.parameters, *own_parts, *norms})
    missing = {p.tensor for path, p in origin.parameters.items() if path not in values} - set(state)
    missing |= {name for name, known in written.items() if not known.all()}
    missing |= {name for name, part in origin.parts.items() if part.tensor not in values}
    if missing:
        raise ImportingError(
            f"the graph no longer holds {shorten_list(sorted(missing))}, which a pass folded into other "
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
            f"reparameterize merged the layer of {shorten_list(sorted(lost))} into another one, which "
            "torch's module cannot express: take the state before prepare, or leave "
            "reparameterize out of `ptq`."
        )
    return {path: np.full(count, number, np.float32) for path, (number, count) in origin.merged.items()}


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
            f"{shorten_list(sorted(lost))} changed, and torch's module lacks a tensor for it: the module "
            "computes it from others, or a pass added it. Take the state before that pass, or keep this "
            "parameter fixed in training."
        )


def _write_norms(
    values: dict[str, np.ndarray],
    origin: FileOrigin,
    state: dict[str, np.ndarray],
    standing: Set[str],
    read: Set[str],
) -> set[str]:
    """Writes the BatchNorms that were folded into their layers, and the layers' biases; returns their paths.

    A folded BatchNorm keeps neither mean nor gain. With the mean 0 and ``gamma = sqrt(variance + eps)`` it
    adds only ``beta``. One without a gain has the variance ``1 - eps``, one without a shift the mean
    ``-bias``.

    Raises:
        ImportingError: for a tensor that belongs to several layers, and would need another value for each.
    """
    there = {path: own.tensor for path, own in origin.parameters.items() if path in values}
    folded = {weight: norm for weight, norm in origin.norms.items() if weight in {*values} - standing}
    biases = {norm.bias for norm in folded.values()}
    fixed = {tensor for path, tensor in there.items() if path not in biases}
    by_itself = {there[path] for path in read if path in there}
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
        for name, array in sorted(unit.items(), key=lambda item: item[0] not in by_itself):
            if name in fixed and not np.array_equal(state[name], array, equal_nan=True):
                raise ImportingError(
                    f"{name} is read in several places, and prepare folded it at one of them: "
                    "take the state before prepare, or leave fuse_bn out of `ptq`."
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
            f"{shorten_list(changed)} changed, but numbers that torch computes from it did not: take the "
            "state before prepare and training, or leave out the algorithm that changed it."
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
