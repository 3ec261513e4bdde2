"""TFLite for comparisons, logic, conversions and choices."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Build, Emitter
from qtrace.export.tflite.operands import as_type, operands
from qtrace.export.tflite.plan import Job
from qtrace.graph.types import TensorNode

__all__ = ["FLOAT_LOGIC"]


def _common(given: Any) -> np.dtype:
    """The type in which operands are compared: float32 where a float is among them."""
    kinds = [np.dtype(v.dtype) if isinstance(v, TensorNode) else np.asarray(v).dtype for v in given]
    if any(k.kind == "f" for k in kinds):
        return np.dtype(np.float32)
    return np.dtype(np.bool_) if all(k.kind == "b" for k in kinds) else np.dtype(np.int32)


def _compared(code: str) -> Emitter:
    def emit(b: Build, job: Job) -> None:
        call, given = job.call, job.call.attrs["operands"]
        inputs, order = operands(b, call, given, _common(given))
        out = b.result(call.out, order)
        b.writer.op(code, inputs, [out])
        b.put(call.out, out, order)

    return emit


def _logic(code: str) -> Emitter:
    def emit(b: Build, job: Job) -> None:
        call = job.call
        if np.dtype(call.out.dtype) != np.bool_:
            raise ExportError(f"{call.out.name}: logic on integers has no TFLite form: use booleans")
        given = call.attrs.get("operands", call.inputs)
        inputs, order = operands(b, call, given, np.dtype(np.bool_))
        out = b.result(call.out, order)
        b.writer.op(code, inputs, [out])
        b.put(call.out, out, order)

    return emit


def _astype(b: Build, job: Job) -> None:
    call = job.call
    held = b.get(call.inputs[0])
    b.put(call.out, as_type(b, held.stored, np.dtype(call.out.dtype)), held.order)


def _where(b: Build, job: Job) -> None:
    call = job.call
    mask, kind = call.attrs["mask"], np.dtype(call.out.dtype)
    kinds = [np.dtype(np.bool_), kind, kind]
    inputs, order = operands(b, call, [mask, *call.attrs["operands"]], kinds)
    out = b.result(call.out, order)
    b.writer.op("SELECT_V2", inputs, [out])
    b.put(call.out, out, order)


FLOAT_LOGIC: dict[str, Emitter] = {
    **{
        kind: _compared(kind.upper())
        for kind in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
    },
    **{kind: _logic(kind.upper()) for kind in ("logical_and", "logical_or", "logical_not")},
    "astype": _astype,
    "where": _where,
}
