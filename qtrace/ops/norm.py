"""Normalisation. BatchNorm is folded into the layer before it, or fused with it; others stay float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import owner
from qtrace.ops.base import OpRule, Reading, Role, Target, arguments, axes, positional, tensors, typed

__all__ = ["RULES"]


def _batch_norm(expr: Expr) -> Reading | str:
    module = owner(expr)
    if module is not None:
        if module.running_mean is None:
            return "it normalises by the statistics of each batch"
        return Reading(tensors(expr.args[1]), {"eps": float(module.eps)})
    a = arguments(expr)
    if a["running_mean"] is None or a["training"]:
        return "it normalises by the statistics of each batch"
    names = ("running_mean", "running_var", "weight", "bias")
    return Reading(tensors(a["inp"]), {"eps": float(a["eps"]), **{n: a[n] for n in names}})


def _affine(**fields: str) -> Callable[[Expr], Reading | str]:
    """A reader of a norm with weight and bias (nodes, tensors of the module, or None), eps and ``fields``.

    Args:
        **fields: the name of an argument of the function, and of the module's attribute that holds it.
    """

    def read(expr: Expr) -> Reading | str:
        module: Any = owner(expr)
        if isinstance(expr, Apply):
            attrs = {"eps": float(expr.opdef.eps), **{n: getattr(expr.opdef, n, None) for n in _KERNEL}}
            weight, bias = (*expr.inputs[1:], None, None)[:2]
            return Reading(tensors(expr.inputs[0]), {**attrs, "weight": weight, "bias": bias})
        if module is not None:
            a = {n: getattr(module, n) for n in ("weight", "bias", "eps")}
            a.update((name, getattr(module, attribute)) for name, attribute in fields.items())
        else:
            a = arguments(expr)
        if not a.get("affine", True):
            a["weight"] = a["bias"] = None
        attrs = {"eps": float(a["eps"]), "weight": a["weight"], "bias": a["bias"]}
        return Reading(tensors(positional(expr)[0]), {**attrs, **{n: a[n] for n in fields}})

    return read


_KERNEL = ("group", "normalized_dim")


def _softmax(expr: Expr) -> Reading | str:
    module = owner(expr)
    node = positional(expr)[0]
    if isinstance(expr, Apply):
        axis = expr.opdef.axis
    else:
        axis = module.axis if module is not None else arguments(expr)["axis"]
    if axis is None:
        # As MegEngine's softmax chooses it: the channels of a matrix, of an image and of a single one.
        rank = len(node.shape)
        axis = 0 if rank in (0, 1, 3) else 1
    return typed(expr, tensors(node), {"axis": axes(axis)})


def _named_axis(expr: Expr) -> Reading | str:
    a = arguments(expr)
    names = ("axis", "ord", "eps", "keepdims")
    return Reading(tensors(a["inp"]), {n: a[n] for n in names if n in a})


def _kept(expr: Expr) -> Reading | str:
    module: Any = owner(expr)
    names = ("kernel_size", "k", "alpha", "beta")
    found = arguments(expr) if module is None else {n: getattr(module, n) for n in names}
    return Reading(tensors(positional(expr)[0]), {n: found[n] for n in names})


_WHY = "it keeps its accuracy only in float between 8-bit neighbours"


def _float(kind: str, read: Callable[[Expr], Reading | str], *targets: Target) -> OpRule:
    return OpRule(kind, Role.FLOAT, targets, read, _WHY)


RULES = (
    OpRule(
        "batch_norm",
        Role.NORM,
        (
            Target(module=M.BatchNorm2d),
            Target(module=M.BatchNorm1d),
            Target(module=M.SyncBatchNorm),
            Target(function=F.nn.batch_norm),
        ),
        _batch_norm,
    ),
    _float(
        "softmax", _softmax, Target(module=M.Softmax), Target(function=F.softmax), Target(kernel="Softmax")
    ),
    _float("logsoftmax", _named_axis, Target(function=F.logsoftmax)),
    _float("logsumexp", _named_axis, Target(function=F.logsumexp)),
    _float("norm", _named_axis, Target(function=F.norm)),
    _float("normalize", _named_axis, Target(function=F.normalize)),
    _float(
        "layer_norm",
        _affine(normalized_shape="normalized_shape"),
        Target(module=M.LayerNorm),
        Target(function=F.nn.layer_norm),
        Target(kernel="LayerNorm"),
    ),
    _float(
        "group_norm",
        _affine(num_groups="num_groups"),
        Target(module=M.GroupNorm),
        Target(function=F.nn.group_norm),
        Target(kernel="GroupNorm"),
    ),
    _float(
        "instance_norm",
        _affine(),
        Target(module=M.InstanceNorm),
        Target(function=F.nn.instance_norm),
        Target(kernel="InstanceNorm"),
    ),
    _float(
        "general_norm",
        _affine(normalized_axis="normalized_axis"),
        Target(module=M.GeneralNorm),
        Target(function=F.nn.general_norm),
    ),
    _float(
        "local_response_norm",
        _kept,
        Target(module=M.LocalResponseNorm),
        Target(function=F.nn.local_response_norm),
    ),
)
