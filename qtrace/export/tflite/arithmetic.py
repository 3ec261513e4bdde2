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
_CLAMPS: dict[Any, str] = {(0.0, None): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}


def _binary(b: Build, job: Job) -> None:
    """ADD, SUB and MUL on integers."""
    inputs, order = operands(b, job.call, job.call.attrs["operands"], None)
    code = _CODES[job.kind]
    b.compute(job, order, code, inputs, _OPTIONS[code])


def _float_binary(b: Build, job: Job) -> None:
    call, code = job.call, {**_CODES, **_ALONE}[job.kind]
    inputs, order = operands(b, call, call.attrs["operands"], np.dtype(call.out.dtype))
    b.emit(call.out, order, code, inputs, _OPTIONS.get(code, ""))


def rescaled(b: Build, job: Job, grid: Grid) -> None:
    """The same integers on a grid that is wider or narrower by a power of two."""
    x, order = b.get(job.call.inputs[0]).parts
    assert x.grid is not None
    factor = Grid((grid.scale[0] / x.grid.scale[0],), (0,))
    one = b.writer.constant("one_int", np.array(1, x.dtype), factor)
    result = b.writer.add("MUL", [x, one], f"{job.out.name}_int", x.shape, x.dtype, grid, kind="MulOptions")
    b.put(job.out, result, order)


def _div_by_number(b: Build, job: Job) -> None:
    """A division by a number multiplies by its inverse; others have no form on integers."""
    call = job.call
    if call.attrs.get("side") != "right":
        raise ExportError(
            f"{call.out.name}: TFLite has no division on integers: keep it in float by a rule that says "
            f"quantize: false, or {allowing('div')}"
        )
    _times_number(b, job, 1.0 / call.attrs["scalar"])


def _negated(b: Build, job: Job) -> None:
    _times_number(b, job, -1.0)


def _times_number(b: Build, job: Job, factor: float) -> None:
    x, order = b.get(job.call.inputs[0]).parts
    target = b.target(job, order)
    inputs, options = [x, number(b, job.call, factor, None)], {"fusedActivationFunction": target.activation}
    b.writer.op("MUL", inputs, [target.stored], "MulOptions", **options)
    b.done(job, target)


def _clamp(b: Build, job: Job) -> None:
    """An activation function that stands alone: its input is rounded to the result's grid, then clamped."""
    x, order = b.get(job.call.inputs[0]).parts
    name, _, grid = b.site_grid(job)
    if x.grid != grid:
        x = b.requantized(x, grid, f"{job.call.out.name}_open")
    b.put(job.out, b.clamped(x, bounds(job.call), name), order)


def _float_clamp(b: Build, job: Job) -> None:
    call = job.call
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
