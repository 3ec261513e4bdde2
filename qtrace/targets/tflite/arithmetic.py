"""TFLite for arithmetic on two operands, and for activation functions that stand by themselves.

TFLite for comparisons, logic, conversions and choices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.targets.tflite.build import Builder, Emitter, allowing, check_type
from qtrace.targets.tflite.operands import as_type, number, operands
from qtrace.targets.tflite.plan import FusedOp, bounds
from qtrace.targets.tflite.writer import Grid

__all__ = ["FLOAT_ARITHMETIC", "FLOAT_LOGIC", "INTEGER_ARITHMETIC", "rescaled"]

_CODES = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "maximum": "MAXIMUM", "minimum": "MINIMUM"}
_ALONE = {"pow": "POW", "floor_div": "FLOOR_DIV"}
_OPTIONS = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions"}
_CLAMPS: dict[Any, str] = {(0.0, None): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}


def _binary(b: Builder, op: FusedOp) -> None:
    """Writes ADD, SUB or MUL on integers."""
    inputs, order = operands(b, op.call, op.call.attrs["operands"], None)
    code = _CODES[op.kind]
    b.compute(op, order, code, inputs, _OPTIONS[code])


def _float_binary(b: Builder, op: FusedOp) -> None:
    call, code = op.call, {**_CODES, **_ALONE}[op.kind]
    inputs, order = operands(b, call, call.attrs["operands"], np.dtype(call.out.dtype))
    if op.clamp is not None:
        b.compute(op, order, code, inputs, _OPTIONS[code])
        return
    b.emit(call.out, order, code, inputs, _OPTIONS.get(code, ""))


def rescaled(b: Builder, op: FusedOp, grid: Grid) -> None:
    """Writes a carried ``mul`` or ``div``: the integers stay, the grid changes by a power of two."""
    x, order = b.get(op.call.inputs[0]).parts
    assert x.grid is not None
    factor = Grid((grid.scale[0] / x.grid.scale[0],), (0,))
    unit = b.writer.constant("one_int", np.array(1, x.dtype), factor)
    result = b.writer.add("MUL", [x, unit], f"{op.out.name}_int", x.shape, x.dtype, grid, kind="MulOptions")
    b.put(op.out, result, order)


def _div_by_number(b: Builder, op: FusedOp) -> None:
    """Writes a division by a number as a multiplication by its inverse; other divisions are refused."""
    call = op.call
    if call.attrs.get("side") != "right":
        raise ExportError(
            f"{call.out.name}: TFLite lacks division on integers: keep it in float by a rule that says "
            f"quantize: false, or {allowing('div')}"
        )
    _times_number(b, op, 1.0 / call.attrs["scalar"])


def _negated(b: Builder, op: FusedOp) -> None:
    _times_number(b, op, -1.0)


def _times_number(b: Builder, op: FusedOp, factor: float) -> None:
    x, order = b.get(op.call.inputs[0]).parts
    target = b.target(op, order)
    inputs, options = [x, number(b, op.call, factor, None)], {"fusedActivationFunction": target.activation}
    b.writer.op("MUL", inputs, [target.tensor], "MulOptions", **options)
    b.finish(op, target)


def _clamp(b: Builder, op: FusedOp) -> None:
    """Writes an activation function that no op fuses: rounds to the result's grid, then clamps."""
    x, order = b.get(op.call.inputs[0]).parts
    name, _, grid = b.site_grid(op)
    if x.grid != grid:
        x = b.requantized(x, grid, f"{op.call.out.name}_open")
    b.put(op.out, b.clamped(x, bounds(op.call), name), order)


def _float_clamp(b: Builder, op: FusedOp) -> None:
    call = op.call
    limits = {code: v for code, v in zip(("MAXIMUM", "MINIMUM"), bounds(call), strict=True) if v is not None}
    code = None if any(isinstance(v, TensorNode) for v in limits.values()) else _CLAMPS.get(bounds(call))
    if code is not None:
        x, order = b.floats(b.get(call.inputs[0])).parts
        b.emit(call.out, order, code, [x])
        return
    (x, *ends), order = operands(b, call, [call.inputs[0], *limits.values()], np.dtype(np.float32))
    for code, end in zip(limits, ends, strict=True):
        result = b.result(call.out, order)
        b.writer.op(code, [x, end], [result], "MaximumMinimumOptions")
        x = result
    b.put(call.out, x, order)


INTEGER_ARITHMETIC: dict[str, Emitter] = {
    **dict.fromkeys(("add", "sub", "mul"), _binary),
    **dict.fromkeys(("relu", "relu6", "clip"), _clamp),
    "div": _div_by_number,
    "neg": _negated,
}
FLOAT_ARITHMETIC: dict[str, Emitter] = {
    **dict.fromkeys((*_CODES, *_ALONE), _float_binary),
    **dict.fromkeys(("relu", "relu6", "clip"), _float_clamp),
}


def _common(operands: Any) -> np.dtype:
    """Returns the type in which ``operands`` are compared: float32 where a float is among them."""
    kinds = [np.dtype(v.dtype) if isinstance(v, TensorNode) else np.asarray(v).dtype for v in operands]
    if any(k.kind == "f" for k in kinds):
        return np.dtype(np.float32)
    return np.dtype(np.bool_) if all(k.kind == "b" for k in kinds) else np.dtype(np.int32)


def _comparison(b: Builder, op: FusedOp) -> None:
    values = op.call.attrs["operands"]
    inputs, order = operands(b, op.call, values, _common(values))
    b.emit(op.out, order, op.kind.upper(), inputs)


def _logic(b: Builder, op: FusedOp) -> None:
    call = op.call
    if np.dtype(call.out.dtype) != np.bool_:
        raise ExportError(f"{call.out.name}: logic on integers cannot become TFLite: use booleans")
    inputs, order = operands(b, call, call.attrs.get("operands", call.inputs), np.dtype(np.bool_))
    b.emit(call.out, order, call.kind.upper(), inputs)


def _astype(b: Builder, op: FusedOp) -> None:
    call = op.call
    source, kind = b.get(call.inputs[0]), np.dtype(call.out.dtype)
    check_type(call.out.name, kind)
    b.put(call.out, as_type(b, source.tensor, kind), source.order)


def _choose(b: Builder, op: FusedOp) -> None:
    call = op.call
    mask, kind = call.attrs["mask"], np.dtype(call.out.dtype)
    kinds = [np.dtype(np.bool_), kind, kind]
    inputs, order = operands(b, call, [mask, *call.attrs["operands"]], kinds)
    b.emit(call.out, order, "SELECT_V2", inputs)


FLOAT_LOGIC: dict[str, Emitter] = {
    **dict.fromkeys(("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"), _comparison),
    **dict.fromkeys(("logical_and", "logical_or", "logical_not"), _logic),
    "astype": _astype,
    "where": _choose,
}
