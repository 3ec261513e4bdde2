"""TFLite for each op kind: tables of emitters, and constant folding."""

from __future__ import annotations

from typing import Any

import megengine as mge
import numpy as np

from qtrace import ops
from qtrace.graph.types import Expr, ModuleNode, TensorNode
from qtrace.ops import OpCall
from qtrace.targets.tflite.build import Builder, Emitter
from qtrace.targets.tflite.functions import (
    FLOAT_ARITHMETIC,
    FLOAT_FUNCTIONS,
    FLOAT_LOGIC,
    FUNCTIONS,
    INTEGER_ARITHMETIC,
    NATIVE,
    rescaled,
    table,
)
from qtrace.targets.tflite.layers import FLOAT_LAYERS, INEXACT, LAYERS
from qtrace.targets.tflite.layout import FusedOp, reads_values
from qtrace.targets.tflite.moves import FLOAT_INDEXING, INDEXING
from qtrace.targets.tflite.moves import MOVES as MOVING
from qtrace.targets.tflite.reductions import (
    FLOAT_REDUCTIONS,
    FLOAT_WINDOWS,
    INTEGER_REDUCTIONS,
    INTEGER_WINDOWS,
    MOVING_REDUCTIONS,
    MOVING_WINDOWS,
    why_in_float,
)

__all__ = [
    "AGNOSTIC",
    "FLOAT",
    "FUNCTIONS",
    "INEXACT",
    "INTEGER",
    "MOVES",
    "NATIVE",
    "SPATIAL",
    "fold",
    "rescaled",
    "table",
    "tabular",
    "why_in_float",
]

MOVES: dict[str, Emitter] = {**MOVING, **INDEXING, **MOVING_WINDOWS, **MOVING_REDUCTIONS}
INTEGER: dict[str, Emitter] = {
    **LAYERS,
    **INTEGER_WINDOWS,
    **INTEGER_ARITHMETIC,
    **INTEGER_REDUCTIONS,
}
FLOAT: dict[str, Emitter] = {
    **LAYERS,
    **FLOAT_LAYERS,
    **FLOAT_WINDOWS,
    **FLOAT_FUNCTIONS,
    **FLOAT_REDUCTIONS,
    **FLOAT_INDEXING,
    **FLOAT_ARITHMETIC,
    **FLOAT_LOGIC,
}

# Kinds that need the channels last, and kinds that keep the order of their input.
SPATIAL = frozenset(
    {"conv2d", "conv_transpose2d", "interpolate", "adaptive_avg_pool2d", *MOVING_WINDOWS, "avg_pool2d"}
)
AGNOSTIC = frozenset(
    {
        "identity",
        "dropout",
        "pad",
        "concat",
        "split",
        "getitem",
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
    }
    | {"relu", "relu6", "clip", "batch_norm", "pixel_shuffle"}
    | FUNCTIONS
)


def tabular(op: FusedOp) -> bool:
    """Whether an op maps single values: a slope for each channel does not."""
    slope: Any = op.call.attrs.get("slope")  # a tensor, or a number without a shape
    one_slope = int(np.prod(getattr(slope, "shape", ()))) == 1
    return one_slope and len(op.call.inputs) == 1 and len(op.call.expr.outputs) == 1


def fold(b: Builder, expr: Expr) -> bool:
    """Computes an expr of shapes, numbers and parameters; returns whether it is one.

    The result is also computed for another batch size, to know whether it depends on the batch size.
    """
    outputs = [n for n in expr.outputs if isinstance(n, TensorNode)]
    if len(outputs) != len(expr.outputs) or any(isinstance(n, ModuleNode) for n in expr.inputs):
        return False
    if not reads_values(expr):
        _fold_shape(b, expr)
        return True
    call = ops.read(expr)
    if call is not None and call.kind == "full_like" and isinstance(call.attrs["value"], (int, float)):
        _fold_full(b, call)
        return True
    moves = call is not None and call.kind in MOVES
    if any(n in b.integers and moves for n in expr.inputs):
        return False  # integers that move stay integers
    values = [b.values.get(n) if n not in b.lazy else b.value(n) for n in expr.inputs]
    if any(v is None for v in values):
        return False
    results = _interpreted(expr, values)
    for node, value in zip(outputs, results, strict=True):
        b.values[node] = value
    if any(n in b.shifted for n in expr.inputs):
        _fold_shifted(b, expr, outputs, results)
    return True


def _interpreted(expr: Expr, values: list[Any]) -> list[np.ndarray]:
    return [t.numpy() for t in expr.interpret(*(mge.Tensor(v) for v in values))]


def _fold_shape(b: Builder, expr: Expr) -> None:
    source, out = expr.inputs[0], expr.outputs[0]
    shape = np.array(b.shape(source), np.int32)
    b.values[out] = shape
    if b.batch and source not in b.values and shape.size and shape[0] % b.batch == 0:
        b.shifted[out] = np.array([shape[0] // b.batch * (b.batch + 1), *shape[1:]], np.int32)


def _fold_full(b: Builder, call: OpCall) -> None:
    """Computes a tensor filled with one number, in the shape of another tensor."""
    shape, kind = b.shape(call.out), np.dtype(call.out.dtype)
    b.values[call.out] = np.full(shape, call.attrs["value"], kind)
    if b.batch and shape and shape[0] % b.batch == 0:
        more = (shape[0] // b.batch * (b.batch + 1), *shape[1:])
        b.shifted[call.out] = np.full(more, call.attrs["value"], kind)


def _fold_shifted(b: Builder, expr: Expr, outputs: list[TensorNode], results: list[np.ndarray]) -> None:
    try:
        others = _interpreted(expr, [b.shifted.get(n, b.values[n]) for n in expr.inputs])
    except (AssertionError, IndexError, RuntimeError, ValueError):  # another size does not fit here at all
        others = [np.zeros(0)] * len(results)
    for node, value, other in zip(outputs, results, others, strict=True):
        if not np.array_equal(value, other):
            b.shifted[node] = other
