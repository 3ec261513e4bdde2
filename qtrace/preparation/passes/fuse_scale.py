"""Folds a stored scale, shift, or both into the conv or linear layer before it.

``conv(x) * s + t = conv(x. W * s) + (b * s + t)``, where ``s`` and ``t`` are one number or one for each
output channel, as in PP-LCNetV3's LearnableAffineBlock and in a frozen BatchNorm. A shift by itself is a bias
that the network adds after the layer, as Paddle's exports do in squeeze-excitation blocks: on integers the
result would be rounded before it, too. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.origin import move_results
from qtrace.graph.types import Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.ops import OpCall
from qtrace.preparation.passes._infinity import find_infinite
from qtrace.preparation.passes.base import Left, PassResult
from qtrace.preparation.passes.fuse_bn import BIAS_SHAPES, Affine, fold_affine

__all__ = ["fuse_scale"]


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
    if layer is None or layer.kind not in BIAS_SHAPES:
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
