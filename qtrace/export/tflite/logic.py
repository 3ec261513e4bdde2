"""TFLite for comparisons, logic, conversions and choices."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Builder, Emitter, check_type
from qtrace.export.tflite.operands import as_type, operands
from qtrace.export.tflite.plan import FusedOp
from qtrace.graph.types import TensorNode

__all__ = ["FLOAT_LOGIC"]


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
