"""Folds a BatchNorm, or a stored scale and shift, into the conv or linear layer before it.

With running mean m and variance v, ``bn(conv(x; W) + b)`` is ``conv(x; W * g) + (b - m) * g + beta``. Here
``g = gamma / sqrt(v + eps)`` scales the output channels. See Jacob et al. 2018, "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2. Computed in float64.

``conv(x) * s + t = conv(x; W * s) + (b * s + t)``, where ``s`` and ``t`` are one number or one for each
output channel. PP-LCNetV3's LearnableAffineBlock and a frozen BatchNorm are such. A shift by itself is a bias
that the network adds after the layer, as Paddle's exports do in squeeze-excitation blocks. On integers the
result would be rounded before it, too. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute, set_parameter
from qtrace.graph.origin import move_results
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.passes._infinity import find_infinite
from qtrace.preparation.passes.base import Left, PassResult

# Folds BatchNorm into the conv or linear layer before it.

# Kinds of layers that take what follows them.
_LAYERS = ("conv1d", "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "linear")


@dataclass(frozen=True)
class Affine:
    """The per-channel map ``y * gain + shift`` of a layer's result, (C,), float64."""

    gain: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True)
class _Norm(Affine):
    """The map that a BatchNorm computes.

    ``mean`` and ``deviation`` are the channels' mean and standard deviation of its result in training.
    """

    mean: np.ndarray
    deviation: np.ndarray


def fuse_bn(traced: TracedModule) -> PassResult:
    """Folds every BatchNorm that directly follows a convolution or a linear function.

    Args:
        traced: a flat, expanded traced module; graph and parameters are edited in place.

    Returns:
        The folded layers, and the layers that were not folded, with the reason.
    """
    calls = {e: c for e in exprs(traced) if (c := ops.read(e)) is not None}
    norms = [c for c in calls.values() if c.kind == "batch_norm"]
    # All reasons before the first edit: layers that share a weight are folded together or not at all.
    own_reasons = {bn.expr: _find_own_obstacle(traced, calls, bn) for bn in norms}
    reasons = {bn.expr: own_reasons[bn.expr] or _find_shared_obstacle(calls, own_reasons, bn) for bn in norms}
    changed: list[str] = []
    left: list[Left] = []
    statistics: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    biases: dict[Node, str] = {}
    folded: dict[str, str] = {}
    with GraphEditor(traced) as editor:
        for bn in norms:
            reason = reasons[bn.expr]
            if reason is not None:
                left.append(Left(bn.out.name, reason))
                continue
            layer = calls[bn.inputs[0].expr]
            norm = affine(traced, bn)
            assert layer.weight is not None
            biases[layer.weight] = fold_affine(traced, editor, layer, norm, biases.get(layer.weight))
            statistics[layer.out.name] = norm.mean, norm.deviation
            editor.replace_uses(bn.out, layer.out)
            editor.remove(bn.expr)
            folded[bn.out.name] = layer.out.name
            changed.append(f"{layer.out.name}: folded {bn.out.name}")
    move_results(traced, folded)
    drop_dead_norms(traced, calls.values())
    return PassResult(tuple(changed), tuple(left), statistics)


def _find_own_obstacle(traced: TracedModule, calls: dict[Expr, OpCall], bn: OpCall) -> str | None:
    """Returns the reason in ``bn`` and its layer why ``bn`` cannot be folded, as a clause, or None."""
    layer = calls.get(bn.inputs[0].expr)
    if layer is None or layer.kind not in _LAYERS:
        return "no conv or linear layer stands directly before it"
    if len(layer.out.users) > 1 or any(layer.out is n for n in traced.graph.outputs):
        return f"the output of {layer.out.name} is also used elsewhere"
    for node in (layer.weight, layer.bias):
        if node is not None and not isinstance(node.expr, GetAttr):
            return f"{node.name} is computed, not a parameter"
    if any(n is not None and not isinstance(n.expr, GetAttr) for n in _statistics(bn)):
        return "its statistics are computed"
    return None


def _find_shared_obstacle(
    calls: dict[Expr, OpCall], own_reasons: dict[Expr, str | None], bn: OpCall
) -> str | None:
    """Returns the reason in other readers of the layer's parameters why ``bn`` cannot be folded, or None."""
    layer = calls[bn.inputs[0].expr]
    assert layer.weight is not None
    if layer.bias is not None and set(map(id, users(layer.bias))) != set(map(id, users(layer.weight))):
        return f"{layer.bias.expr.name} is shared with another layer"
    for user in users(layer.weight):
        other = calls.get(user)
        if other is None or (other.kind, other.channel_axes) != (layer.kind, layer.channel_axes):
            return f"{layer.weight.expr.name} is shared with {user.outputs[0].name}, a layer of another kind"
        following = [calls.get(u) for u in users(user.outputs[0])]
        norm = following[0] if len(following) == 1 else None
        same = norm is not None and norm.kind == "batch_norm" and _identity(norm) == _identity(bn)
        if norm is None or not same or own_reasons[norm.expr] is not None:
            return f"{layer.weight.expr.name} is shared with {user.outputs[0].name}, which has no such norm"
    return None


def _statistics(bn: OpCall) -> list[TensorNode | None]:
    return [bn.attrs[k] for k in ("running_mean", "running_var", "weight", "bias") if k in bn.attrs]


def _identity(bn: OpCall) -> tuple[Any, ...]:
    """Returns a key that is equal for two calls of one BatchNorm."""
    module = owner(bn.expr)
    if module is not None:
        return ("module", id(module))
    return (*_statistics(bn), bn.attrs["eps"])


def affine(traced: TracedModule, bn: OpCall) -> _Norm:
    """Computes the per-channel map of a BatchNorm in evaluation."""
    module = owner(bn.expr)
    if module is not None:
        mean, var, gamma, beta = module.running_mean, module.running_var, module.weight, module.bias
    else:
        mean, var, gamma, beta = (
            None if n is None else get_module(traced, n.expr.name) for n in _statistics(bn)
        )
    m, v = (t.numpy().astype(np.float64).reshape(-1) for t in (mean, var))
    scale, offset = np.ones_like(m), np.zeros_like(m)
    if gamma is not None:
        scale = scale * gamma.numpy().astype(np.float64).reshape(-1)
    if beta is not None:
        offset = offset + beta.numpy().astype(np.float64).reshape(-1)
    gain = scale / np.sqrt(v + bn.attrs["eps"])
    return _Norm(gain, offset - m * gain, offset, np.abs(scale))


def fold_affine(
    traced: TracedModule, editor: GraphEditor, layer: OpCall, outer: Affine, folded_bias: str | None = None
) -> str:
    """Changes weight and bias of ``layer`` so that it gives what ``outer`` makes of its result.

    Args:
        traced: the module of the parameters.
        editor: its editor.
        layer: a layer with parameters.
        outer: the map.
        folded_bias: the path of the folded bias if another call of the layer has folded ``outer`` already;
            this call then reads the same weight and bias.

    Returns:
        The path of the folded bias.
    """
    assert layer.weight is not None
    path = layer.weight.expr.name
    bias_path: str = folded_bias or (
        layer.bias.expr.name if layer.bias is not None else free_bias(traced, path)
    )
    if folded_bias is None:
        weight = get_module(traced, path).numpy().astype(np.float64)
        shape = tuple(n if i in layer.channel_axes else 1 for i, n in enumerate(weight.shape))
        set_parameter(traced, path, Parameter((weight * outer.gain.reshape(shape)).astype(np.float32)))
        old = get_module(traced, bias_path).numpy() if layer.bias is not None else np.zeros(1, np.float32)
        bias = old.astype(np.float64).reshape(-1) * outer.gain + outer.shift
        bias = bias.astype(np.float32).reshape(bias_shape(layer.kind))
        set_parameter(traced, bias_path, Parameter(bias))
    if layer.bias is None:
        editor.set_argument(layer.expr, "bias", editor.get_attr(bias_path))
    return bias_path


def bias_shape(kind: str) -> tuple[int, ...]:
    """Returns the shape of the bias of a kind of layer, with -1 for the channels."""
    return (-1,) if kind == "linear" else (1, -1, *[1] * int(kind[-2]))  # such as conv_transpose2d


def free_bias(traced: TracedModule, weight_path: str) -> str:
    """Returns a free path for a new bias: ``bias`` next to ``weight``, else the weight's with a suffix."""
    parent, _, name = weight_path.rpartition(".")
    module = get_module(traced, parent)
    free = "bias" if name == "weight" and getattr(module, "bias", None) is None else f"{name}_bias"
    while getattr(module, free, None) is not None:
        free += "_"
    return f"{parent}.{free}" if parent else free


def drop_dead_norms(traced: TracedModule, calls: Iterable[OpCall]) -> set[str]:
    """Deletes the BatchNorms among ``calls`` and their statistics that no expr reads; returns their paths."""
    used = [e.name for e in exprs(traced) if isinstance(e, GetAttr)]
    alive = {name.rsplit(".", i)[0] for name in used for i in range(name.count(".") + 1)}
    dead: set[str] = set()
    for call in calls:
        if call.kind != "batch_norm":
            continue
        if owner_path := _module_path(call.expr):
            dead.add(owner_path)
        dead.update(n.expr.name for n in _statistics(call) if n is not None and isinstance(n.expr, GetAttr))
    for path in sorted(dead - alive):
        delete_attribute(traced, path)
    return dead - alive


def _module_path(expr: Expr) -> str | None:
    if owner(expr) is None or not isinstance(expr.inputs[0].expr, GetAttr):
        return None
    return str(expr.inputs[0].expr.name)


# Folds a stored scale, shift, or both into the conv or linear layer before it.


@dataclass(frozen=True)
class _Scaled:
    """A layer and the ops with stored tensors that directly follow it.

    Attributes:
        layer: the layer.
        ops: the product, the sum, or both in this order.
        scale: the stored factor; None without a product.
        shift: the stored summand; None without a sum.
    """

    layer: OpCall
    ops: tuple[OpCall, ...]
    scale: TensorNode | None
    shift: TensorNode | None


def fuse_scale(
    traced: TracedModule, norms: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None
) -> PassResult:
    """Folds every product and sum with stored tensors that directly follow a layer.

    Args:
        traced: a flat, expanded traced module; graph and parameters are edited in place.
        norms: name of a layer's result -> mean and standard deviation of its channels, where a folded
            BatchNorm says them.

    Returns:
        The folded layers with the new means and deviations, and those left with the reason.
    """
    calls = {e: c for e in exprs(traced) if (c := ops.read(e)) is not None}
    changed: list[str] = []
    left: list[Left] = []
    moved: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    folded: dict[str, str] = {}
    candidates = [s for call in calls.values() if (s := _read_scaled(calls, call)) is not None]
    infinite = find_infinite(traced, calls) if candidates else set()
    with GraphEditor(traced) as editor:
        for scaled in candidates:
            layer, last = scaled.layer, scaled.ops[-1]
            if any(call.expr in infinite for call in scaled.ops):
                continue  # such as the mask of an attention, which would spoil the range of the bias
            obstacle = _find_obstacle(traced, scaled)
            if obstacle is not None:
                left.append(Left(last.out.name, obstacle))
                continue
            gain = _per_channel(traced, layer, scaled.scale, 1.0)
            offset = _per_channel(traced, layer, scaled.shift, 0.0)
            name = layer.out.name
            if norms is not None and name in norms:
                mean, deviation = norms[name]
                moved[name] = mean * gain + offset, deviation * np.abs(gain)
            fold_affine(traced, editor, layer, Affine(gain, offset))
            editor.replace_uses(last.out, layer.out)
            folded[last.out.name] = name
            for call in reversed(scaled.ops):
                editor.remove(call.expr)
            changed.append(f"{name}: folded the {_describe(scaled)} {last.out.name}")
    move_results(traced, folded)
    used = {e.name for e in exprs(traced) if isinstance(e, GetAttr)}
    stored = {n.expr.name for c in calls.values() for n in c.inputs if isinstance(n.expr, GetAttr)}
    for path in sorted(stored - used):
        delete_attribute(traced, path)
    return PassResult(tuple(changed), tuple(left), moved)


def _read_scaled(calls: Mapping[Expr, OpCall], last: OpCall) -> _Scaled | None:
    """Returns the layer that ``last`` scales or shifts, with all ops between both; None if it does neither.

    A product whose one reader shifts it belongs to that sum.
    """
    parts = _split(last, "mul")
    if parts is not None:
        users = last.out.users
        if len(users) == 1 and (user := calls.get(users[0])) is not None and _split(user, "add") is not None:
            return None
        return _scaled_layer(calls, parts[0], (last,), parts[1], None)
    parts = _split(last, "add")
    if parts is None:
        return None
    product = calls.get(parts[0].expr)
    factors = None if product is None else _split(product, "mul")
    if product is None or factors is None:
        return _scaled_layer(calls, parts[0], (last,), None, parts[1])
    return _scaled_layer(calls, factors[0], (product, last), factors[1], parts[1])


def _scaled_layer(
    calls: Mapping[Expr, OpCall],
    x: TensorNode,
    read: tuple[OpCall, ...],
    scale: TensorNode | None,
    shift: TensorNode | None,
) -> _Scaled | None:
    """Returns the layer that computes ``x`` with what follows it; None if no layer does.

    A lone stored tensor, such as an embedding of positions, is taken only if it has one number a channel.
    """
    layer = calls.get(x.expr)
    if layer is None or layer.kind not in _LAYERS:
        return None
    stored = scale if shift is None else shift
    if len(read) == 1 and (stored is None or not _is_per_channel(layer, stored)):
        return None
    return _Scaled(layer, read, scale, shift)


def _describe(scaled: _Scaled) -> str:
    if scaled.shift is None:
        return "scale"
    return "shift" if scaled.scale is None else "scale and shift"


def _split(call: OpCall, kind: str) -> tuple[TensorNode, TensorNode] | None:
    """Returns the computed and the stored operand of a product or sum; None without one of each."""
    if call.kind != kind or len(call.inputs) != 2:
        return None
    stored = [isinstance(n.expr, GetAttr) for n in call.inputs]
    if stored[0] == stored[1]:
        return None
    x, number = call.inputs if stored[1] else call.inputs[::-1]
    return x, number


def _find_obstacle(traced: TracedModule, scaled: _Scaled) -> str | None:
    """Returns the reason why a scale and shift cannot be folded into their layer, as a clause, or None."""
    layer = scaled.layer
    for node in (layer.out, *(call.out for call in scaled.ops[:-1])):
        if len(node.users) > 1 or any(node is n for n in traced.graph.outputs):
            return f"{node.name} is also used elsewhere"
    for parameter in (layer.weight, layer.bias):
        if parameter is None:
            continue
        if not isinstance(parameter.expr, GetAttr):
            return f"{parameter.name} is computed, not a parameter"
        if len(parameter.users) > 1:
            return f"{parameter.expr.name} is shared with another layer"
    for node in (scaled.scale, scaled.shift):
        if node is not None and not _is_per_channel(layer, node):
            return f"{node.expr.name} is not one number for each channel"
    return None


def _is_per_channel(layer: OpCall, node: TensorNode) -> bool:
    shape, full = tuple(int(n) for n in node.shape), [int(n) for n in layer.out.shape]
    axis = len(full) - 1 if layer.kind == "linear" else 1
    own = (1,) * (len(full) - len(shape)) + shape
    return len(own) == len(full) and all(n == 1 or (i == axis and n == full[axis]) for i, n in enumerate(own))


def _per_channel(traced: TracedModule, layer: OpCall, node: TensorNode | None, default: float) -> np.ndarray:
    """Returns the number of each channel in a stored tensor; ``default`` without one."""
    channels = int(layer.out.shape[-1 if layer.kind == "linear" else 1])
    if node is None:
        return np.full(channels, default)
    values = get_module(traced, node.expr.name).numpy().astype(np.float64).reshape(-1)
    return np.broadcast_to(values, (channels,))
