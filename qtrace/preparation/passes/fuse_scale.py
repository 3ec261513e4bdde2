"""Folds a stored scale and shift into the conv or linear layer before it.

``conv(x) * s + t = conv(x; w * s) + (b * s + t)``, where ``s`` and ``t`` are one number or one for each
output channel, as in PP-LCNetV3's LearnableAffineBlock and in a frozen BatchNorm. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.module_tree import delete_attribute
from qtrace.graph.origin import move_results
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.ops import OpCall
from qtrace.preparation.passes.base import Left, PassResult
from qtrace.preparation.passes.fuse_bn import Affine, fold_affine

__all__ = ["fuse_scale"]

_LAYERS = ("conv1d", "conv2d", "conv_transpose2d", "linear")


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
    with GraphEditor(traced) as editor:
        for total in calls.values():
            pair = _read_pair(calls, total)
            if pair is None:
                continue
            layer, product, scale, shift = pair
            obstacle = _find_obstacle(traced, layer, product, scale, shift)
            if obstacle is not None:
                left.append(Left(total.out.name, obstacle))
                continue
            gain, offset = (_per_channel(traced, layer, n) for n in (scale, shift))
            name = layer.out.name
            if norms is not None and name in norms:
                mean, deviation = norms[name]
                moved[name] = mean * gain + offset, deviation * np.abs(gain)
            fold_affine(traced, editor, layer, Affine(gain, offset))
            editor.replace_uses(total.out, layer.out)
            editor.remove(total.expr)
            folded[total.out.name] = name
            editor.remove(product.expr)
            changed.append(f"{name}: folded the scale and shift {total.out.name}")
    move_results(traced, folded)
    used = {e.name for e in exprs(traced) if isinstance(e, GetAttr)}
    stored = {n.expr.name for c in calls.values() for n in c.inputs if isinstance(n.expr, GetAttr)}
    for path in sorted(stored - used):
        delete_attribute(traced, path)
    return PassResult(tuple(changed), tuple(left), moved)


def _read_pair(
    calls: Mapping[Expr, OpCall], total: OpCall
) -> tuple[OpCall, OpCall, TensorNode, TensorNode] | None:
    """Returns the layer, the product, its scale and the shift of a sum; None if ``total`` is no such sum."""
    sum_parts = _split(total, "add")
    product = None if sum_parts is None else calls.get(sum_parts[0].expr)
    product_parts = None if product is None else _split(product, "mul")
    if sum_parts is None or product is None or product_parts is None:
        return None
    layer = calls.get(product_parts[0].expr)
    if layer is None or layer.kind not in _LAYERS:
        return None
    return layer, product, product_parts[1], sum_parts[1]


def _split(call: OpCall, kind: str) -> tuple[TensorNode, TensorNode] | None:
    """Returns the computed and the stored operand of a product or sum; None without one of each."""
    if call.kind != kind or len(call.inputs) != 2:
        return None
    stored = [isinstance(n.expr, GetAttr) for n in call.inputs]
    if stored[0] == stored[1]:
        return None
    x, number = call.inputs if stored[1] else call.inputs[::-1]
    return x, number


def _find_obstacle(
    traced: TracedModule, layer: OpCall, product: OpCall, scale: TensorNode, shift: TensorNode
) -> str | None:
    """Returns the reason why a scale and shift cannot be folded into ``layer``, as a clause, or None."""
    for node in (layer.out, product.out):
        if len(node.users) > 1 or any(node is n for n in traced.graph.outputs):
            return f"{node.name} is also used elsewhere"
    for parameter in (layer.weight, layer.bias):
        if parameter is None:
            continue
        if not isinstance(parameter.expr, GetAttr):
            return f"{parameter.name} is computed, not a parameter"
        if len(parameter.users) > 1:
            return f"{parameter.expr.name} is shared with another layer"
    for node in (scale, shift):
        if not _is_per_channel(layer, node):
            return f"{node.expr.name} is not one number for each channel"
    return None


def _is_per_channel(layer: OpCall, node: TensorNode) -> bool:
    shape, full = tuple(int(n) for n in node.shape), [int(n) for n in layer.out.shape]
    axis = len(full) - 1 if layer.kind == "linear" else 1
    own = (1,) * (len(full) - len(shape)) + shape
    return len(own) == len(full) and all(n == 1 or (i == axis and n == full[axis]) for i, n in enumerate(own))


def _per_channel(traced: TracedModule, layer: OpCall, node: Node) -> np.ndarray:
    channels = int(layer.out.shape[-1 if layer.kind == "linear" else 1])
    values = get_module(traced, node.expr.name).numpy().astype(np.float64).reshape(-1)
    return np.broadcast_to(values, (channels,))
