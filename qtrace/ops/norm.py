"""Normalisation. BatchNorm is folded into the layer before it, or fused with it; others stay float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph import functions
from qtrace.graph.types import Apply, Expr
from qtrace.graph.walk import owner
from qtrace.ops.arguments import UnreadableError, activation, arguments, settings
from qtrace.ops.base import OpRule, Reading, Role, op_rule, typed

__all__ = ["RULES"]


def _batch_norm(expr: Expr) -> Reading:
    a = settings(expr, "running_mean", "eps")
    if a["running_mean"] is None or a.get("training"):
        raise UnreadableError("it normalises by the statistics of each batch")
    names = ("running_mean", "running_var", "weight", "bias") if owner(expr) is None else ()
    return Reading((activation(expr),), {"eps": a.number("eps"), **{n: a[n] for n in names}})


def _affine(*fields: str) -> Callable[[Expr], Reading]:
    """Builds a reader of a norm: weight and bias (node, module tensor or None), eps and ``fields``."""

    def read(expr: Expr) -> Reading:
        node = activation(expr)
        if isinstance(expr, Apply):
            attrs = {"eps": float(expr.opdef.eps), **{n: getattr(expr.opdef, n, None) for n in _FIELDS}}
            weight, bias = (*expr.inputs[1:], None, None)[:2]
            return Reading((node,), {**attrs, "weight": weight, "bias": bias})
        a = settings(expr, "weight", "bias", "eps", *fields)
        if not a.get("affine", True):
            a["weight"] = a["bias"] = None
        attrs = {"eps": a.number("eps"), "weight": a["weight"], "bias": a["bias"]}
        return Reading((node,), {**attrs, **{n: a[n] for n in fields}})

    return read


_FIELDS = ("group", "normalized_dim")


def _softmax(expr: Expr) -> Reading:
    node, a = activation(expr), settings(expr, "axis")
    if a["axis"] is None:
        # MegEngine's softmax chooses the axis of the channels of a matrix, of an image or of a batch of them.
        a["axis"] = 0 if len(node.shape) in (0, 1, 3) else 1
    return typed(expr, (node,), {"axis": a.axes("axis")})


def _named_axis(expr: Expr) -> Reading:
    a = arguments(expr)
    names = ("axis", "ord", "eps", "keepdims")
    return Reading((activation(expr),), {n: a[n] for n in names if n in a})


def _local_response(expr: Expr) -> Reading:
    names = ("kernel_size", "k", "alpha", "beta")
    a = settings(expr, *names)
    return Reading((activation(expr),), {n: a[n] for n in names})


def _float(
    kind: str, read: Callable[[Expr], Reading], *callees: Callable[..., Any], kernels: tuple[str, ...] = ()
) -> OpRule:
    reason = "it keeps its accuracy only in float between 8-bit neighbours"
    return op_rule(kind, Role.FLOAT, read, *callees, kernels=kernels, reason=reason)


_BATCH_NORMS = (M.BatchNorm2d, M.BatchNorm1d, M.SyncBatchNorm, F.nn.batch_norm)

RULES = (
    op_rule("batch_norm", Role.NORM, _batch_norm, *_BATCH_NORMS),
    _float("softmax", _softmax, M.Softmax, F.softmax, kernels=("Softmax",)),
    _float("logsoftmax", _named_axis, F.logsoftmax, functions.log_softmax),
    _float("logsumexp", _named_axis, F.logsumexp),
    _float("norm", _named_axis, F.norm),
    _float("normalize", _named_axis, F.normalize),
    _float(
        "layer_norm",
        _affine("normalized_shape"),
        M.LayerNorm,
        F.nn.layer_norm,
        kernels=("LayerNorm",),
    ),
    _float("group_norm", _affine("num_groups"), M.GroupNorm, F.nn.group_norm, kernels=("GroupNorm",)),
    _float("instance_norm", _affine(), M.InstanceNorm, F.nn.instance_norm, kernels=("InstanceNorm",)),
    _float("general_norm", _affine("normalized_axis"), M.GeneralNorm, F.nn.general_norm),
    _float("local_response_norm", _local_response, M.LocalResponseNorm, F.nn.local_response_norm),
)
