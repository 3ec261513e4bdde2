"""Reads an op with stored operands as a map ``x * gain + shift`` of its one computed operand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qtrace.graph.dataflow import evaluate_fixed, fixed_nodes
from qtrace.graph.operations import is_stored, numbers_of
from qtrace.graph.purity import is_pure
from qtrace.graph.types import GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner
from qtrace.ops import OpCall
from qtrace.preparation.passes.absorption.maps import LinearMap
from qtrace.preparation.passes.fuse_bn import affine

__all__ = ["ConstantOp", "computed_constants", "read_constant_op"]

_STATISTICS = ("running_mean", "running_var", "weight", "bias")


class ConstantOp:
    """An op that computes ``x * gain + shift`` with stored numbers.

    Attributes:
        call: the op.
        x: its computed operand.
        map: its gain and shift.
    """

    def __init__(self, call: OpCall, x: TensorNode, map: LinearMap) -> None:
        self.call, self.x, self.map = call, x, map


def computed_constants(traced: TracedModule) -> dict[Node, np.ndarray]:
    """Computes the factors and summands that depend only on parameters, such as one entry of a vector.

    Args:
        traced: a flat, expanded traced module.
    """
    fixed = fixed_nodes(traced, without=lambda expr: not is_pure(expr))
    wanted = [
        node
        for expr in exprs(traced)
        for node in expr.outputs
        if node in fixed and not is_stored(node) and is_float_tensor(node)
        if any(u.outputs and u.outputs[0] not in fixed for u in node.users)
    ]
    return {node: value.numpy() for node, value in evaluate_fixed(traced, wanted).items()}


def read_constant_op(
    traced: TracedModule, call: OpCall | None, computed: Mapping[Node, np.ndarray], norms: bool = True
) -> ConstantOp | None:
    """Reads ``call`` as a map of one computed tensor; None if it is no such op.

    Args:
        traced: the module of the stored numbers.
        call: the op; None for an expr that no rule reads.
        computed: the numbers of nodes that depend only on parameters.
        norms: whether to read a BatchNorm in evaluation as such an op.
    """
    if call is None or not call.expr.outputs or not is_float_tensor(call.out) or call.out.shape is None:
        return None
    if call.kind == "batch_norm":
        return _read_norm(traced, call) if norms else None
    if call.kind == "neg" and not is_stored(call.inputs[0]):
        return _build(call, call.inputs[0], np.asarray(-1.0), np.asarray(0.0))
    if call.kind not in ("mul", "add", "sub", "div"):
        return None
    left, right = call.attrs["operands"]
    known = [computed.get(v) if isinstance(v, Node) else None for v in (left, right)]
    numbers = [numbers_of(v) if k is None else k for v, k in zip((left, right), known, strict=True)]
    front = numbers[1] is None
    x, number = (right, numbers[0]) if front else (left, numbers[1])
    computed_operands = sum(n is None for n in numbers)
    if not isinstance(x, TensorNode) or computed_operands != 1 or (front and call.kind == "div"):
        return None
    assert number is not None
    if number.dtype.kind not in "iuf":
        return None
    number = number.astype(np.float64)
    one, zero = np.asarray(1.0), np.asarray(0.0)
    if call.kind == "add":
        return _build(call, x, one, number)
    if call.kind == "sub":
        return _build(call, x, *((-one, number) if front else (one, -number)))
    with np.errstate(all="ignore"):
        return _build(call, x, number if call.kind == "mul" else 1.0 / number, zero)


def _read_norm(traced: TracedModule, call: OpCall) -> ConstantOp | None:
    if owner(call.expr) is None:
        nodes = [call.attrs.get(name) for name in _STATISTICS]
        if any(n is not None and not isinstance(getattr(n, "expr", None), GetAttr) for n in nodes):
            return None
    norm, rank = affine(traced, call), len(call.out.shape)
    form = (1, -1, *(1,) * (rank - 2))
    return _build(call, call.inputs[0], norm.gain.reshape(form), norm.shift.reshape(form))


def _build(call: OpCall, x: TensorNode, gain: np.ndarray, shift: np.ndarray) -> ConstantOp | None:
    """Builds the op; None if it changes the shape of ``x``, or a number is not finite."""
    shape = tuple(int(n) for n in call.out.shape)
    if not is_float_tensor(x) or tuple(int(n) for n in x.shape or ()) != shape or not shape:
        return None
    if (
        max(np.ndim(gain), np.ndim(shift)) > len(shape)
        or not np.isfinite([*_ends(gain), *_ends(shift)]).all()
    ):
        return None
    arrays = (np.reshape(a, (1,) * (len(shape) - np.ndim(a)) + np.shape(a)) for a in (gain, shift))
    return ConstantOp(call, x, LinearMap(*arrays).compressed())


def _ends(array: np.ndarray) -> tuple[float, float]:
    return float(np.min(array)), float(np.max(array))
