"""Matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.moves import joined, transposed_by
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS", "lower_linear"]


def _gemm(call: Call) -> Any:
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    left, right = bool(call.attribute("transA", 0)), bool(call.attribute("transB", 0))
    if call.version < 7:
        call.attribute("broadcast", 0)  # matrices broadcast as they do since opset 7
    if not call.is_float(0):
        call.refuse(f"multiplies {call.dtype(0).name}; MegEngine multiplies matrices of float32")
    weight, bias = call.values[1], call.values[2] if call.has(2) else None
    if isinstance(weight, Stored) and alpha == 1 and not left and not isinstance(call.values[0], Stored):
        if bias is None:
            return _linear(call, _laid_out(weight, right), None)
        columns = weight.array.shape[0 if right else 1]
        if isinstance(bias, Stored) and beta == 1 and bias.array.size == columns and _is_row(bias.array):
            return _linear(call, _laid_out(weight, right), bias)
    product = call.function(
        F.matmul,
        call.tensor(0),
        call.tensor(1),
        transpose_a=left,
        transpose_b=right,
        name=f"{call.name}_product",
    )
    if alpha != 1:
        product = call.function(F.mul, product, alpha)
    if bias is None or beta == 0:
        return product
    added = call.operand(2)
    if beta != 1:
        added = added * beta if isinstance(added, float) else call.function(F.mul, added, beta)
    return call.function(F.add, product, added)


def _is_row(array: np.ndarray) -> bool:
    return array.ndim <= 2 and array.size == array.shape[-1] if array.ndim else False


def _laid_out(weight: Stored, transposed: bool) -> Stored:
    """Returns the weight as MegEngine's Linear stores it: outputs x inputs."""
    if transposed:
        return weight
    return replace(weight, array=weight.array.T, moves=joined(weight.moves, transposed_by((1, 0))))


def _linear(call: Call, weight: Stored, bias: Stored | None) -> Any:
    outputs, inputs = weight.array.shape
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    module = M.Linear(inputs, outputs, bias=bias is not None)
    if call.layers.owns(module, tensors):
        return call.module(module, tensors, call.tensor(0))
    parts = [call.layers.tensor(part) for part in tensors.values()]
    return call.function(F.linear, call.tensor(0), *parts)


def lower_linear(call: Call) -> Any:
    """Lowers the layer that `join_biases` makes of a MatMul and an Add."""
    if call.rank(0) < 2:
        product = call.function(F.matmul, call.tensor(0), call.tensor(1), name=f"{call.name}_product")
        return call.function(F.add, product, call.tensor(2))
    return _linear(call, _laid_out(call.stored(1), False), call.stored(2))


def _matmul(call: Call) -> Any:
    if not call.is_float(0):
        call.refuse(f"multiplies {call.dtype(0).name}; MegEngine multiplies matrices of float32")
    weight = call.values[1]
    if isinstance(weight, Stored) and weight.array.ndim == 2 and call.rank(0) >= 2:
        return _linear(call, _laid_out(weight, False), None)
    left, right = call.tensor(0), call.tensor(1)
    ranks = call.rank(0), call.rank(1)
    if min(ranks) > 2 or (max(ranks) > 2 and min(ranks) == 2 and ranks[0] == 2):
        left, right = _same_batch(call, left, right)
    return call.function(F.matmul, left, right)


def _same_batch(call: Call, left: Any, right: Any) -> tuple[Any, Any]:
    """Broadcasts the leading axes, which MegEngine's matmul does not."""
    sizes, batches = call.common_sizes(left, right, but=2)
    expanded = []
    for node in (left, right):
        own = call.builder.shapes(node)
        rank = len(own[0])
        ends = [call.layers.axis(node, axis) for axis in (rank - 2, rank - 1)]
        shapes = [(*batch, *own[min(p, len(own) - 1)][-2:]) for p, batch in enumerate(batches)]
        expanded.append(call.expanded(node, [*sizes, *ends], shapes))
    return expanded[0], expanded[1]


LOWERINGS: dict[str, Lowering] = {"Gemm": _gemm, "MatMul": _matmul}
