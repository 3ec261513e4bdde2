"""TFLite for arithmetic on two operands, and for activation functions that stand alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Build, Emitter, allowing, bounds
from qtrace.export.tflite.operands import number, operands
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Grid
from qtrace.graph.types import TensorNode

__all__ = ["FLOAT_ARITHMETIC", "INTEGER_ARITHMETIC", "rescaled"]

_CODES = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "maximum": "MAXIMUM", "minimum": "MINIMUM"}
_ALONE = {"pow": "POW", "floor_div": "FLOOR_DIV"}
_OPTIONS = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions"}


def _binary(b: Build, job: Job) -> None:
    """ADD, SUB and MUL on integers."""
    call, code = job.call, _CODES[job.kind]
    inputs, order = operands(b, call, call.attrs["operands"], None)
    target = b.target(job, order)
    options = {"fusedActivationFunction": target.activation}
    b.writer.op(code, inputs, [target.stored], _OPTIONS[code], **options)
    b.done(job, target)


def _float_binary(b: Build, job: Job) -> None:
    call, code = job.call, {**_CODES, **_ALONE}[job.kind]
    inputs, order = operands(b, call, call.attrs["operands"], np.dtype(call.out.dtype))
    out = b.result(call.out, order)
    b.writer.op(code, inputs, [out], _OPTIONS.get(code, ""))
    b.put(call.out, out, order)


def rescaled(b: Build, job: Job, grid: Grid) -> None:
    """The same integers on a grid that is wider or narrower by a power of two."""
    held = b.get(job.call.inputs[0])
    assert held.stored.grid is not None
    factor = Grid((grid.scale[0] / held.stored.grid.scale[0],), (0,))
    one = b.writer.constant("one_int", np.array(1, held.stored.dtype), factor)
    made = b.writer.tensor(f"{job.out.name}_int", held.stored.shape, held.stored.dtype, grid)
    b.writer.op("MUL", [held.stored, one], [made], "MulOptions")
    b.put(job.out, made, held.order)


def _div_by_number(b: Build, job: Job) -> None:
    """A division by a number multiplies by its inverse; others have no form on integers."""
    call = job.call
    if call.attrs.get("side") != "right":
        raise ExportError(
            f"{call.out.name}: TFLite has no division on integers: keep it in float by a rule that says "
            f"quantize: false, or {allowing('div')}"
        )
    held = b.get(call.inputs[0])
    target = b.target(job, held.order)
    inverse = number(b, call, 1.0 / call.attrs["scalar"], None)
    options = {"fusedActivationFunction": target.activation}
    b.writer.op("MUL", [held.stored, inverse], [target.stored], "MulOptions", **options)
    b.done(job, target)


def _negated(b: Build, job: Job) -> None:
    held = b.get(job.call.inputs[0])
    target = b.target(job, held.order)
    minus = number(b, job.call, -1.0, None)
    options = {"fusedActivationFunction": target.activation}
    b.writer.op("MUL", [held.stored, minus], [target.stored], "MulOptions", **options)
    b.done(job, target)


def _clamp(b: Build, job: Job) -> None:
    """An activation function that stands alone: its input is rounded to the result's grid, then clamped."""
    held = b.get(job.call.inputs[0])
    name, _, grid = b.site_grid(job)
    stored = (
        b.requantized(held.stored, grid, f"{job.call.out.name}_open")
        if held.stored.grid != grid
        else held.stored
    )
    stored = b.clamped(stored, bounds(job.call), name)
    b.put(job.out, stored, held.order)


def _float_clamp(b: Build, job: Job) -> None:
    call = job.call
    lower, upper = bounds(call)
    codes: dict[Any, str] = {(0.0, None): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}
    code = (
        None if isinstance(lower, TensorNode) or isinstance(upper, TensorNode) else codes.get((lower, upper))
    )
    if code is not None:
        held = b.floats(b.get(call.inputs[0]))
        out = b.result(call.out, held.order)
        b.writer.op(code, [held.stored], [out])
        b.put(call.out, out, held.order)
        return
    given = [v for v in (lower, upper) if v is not None]
    (stored, *limits), order = operands(b, call, [call.inputs[0], *given], np.dtype(np.float32))
    ways = [c for c, v in (("MAXIMUM", lower), ("MINIMUM", upper)) if v is not None]
    for way, limit in zip(ways, limits, strict=True):
        made = b.result(call.out, order)
        b.writer.op(way, [stored, limit], [made], "MaximumMinimumOptions")
        stored = made
    b.put(call.out, stored, order)


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
