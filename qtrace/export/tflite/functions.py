"""TFLite for functions of one value: in float, as a table of integers, or by TFLite's own integer kernels.

Between integers all three are possible. XNNPACK turns dequantize, function, quantize into a look-up, which
is exact and fast; a table is exact on any kernel, and slow on a CPU. TFLite's own kernels are approximations,
some with a fixed scale for their results: one step off in up to a tenth of the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import numpy as np

from qtrace.export.tflite.build import Build, Emitter
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Grid, Stored
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall

__all__ = ["FLOAT_FUNCTIONS", "FUNCTIONS", "NATIVE", "table"]

# What LOGISTIC and TANH give on integers of 8 bits, and both on those of 16.
_LOGISTIC, _TANH, _WIDE = Grid((1.0 / 256.0,), (-128,)), Grid((1.0 / 128.0,), (0,)), Grid((2.0**-15,), (0,))


class _Chain:
    """Float operators behind each other; the last one's result is the node's."""

    def __init__(self, b: Build, job: Job) -> None:
        self.b, self.call = b, job.call
        self.x, self.order = b.floats(b.get(job.call.inputs[0])).parts

    def op(self, code: str, *inputs: Stored, last: bool = False, kind: str = "", **options: Any) -> Stored:
        """Adds an operator."""
        name = self.call.out.name if last else f"{self.call.out.name}_{code.lower()}"
        result = self.b.writer.add(code, inputs, name, self.x.shape, kind=kind, **options)
        if last:
            self.b.put(self.call.out, result, self.order)
        return result

    def plus(self, x: Stored, value: float) -> Stored:
        """Adds a number to a tensor."""
        return self.op("ADD", x, self.number(value), kind="AddOptions")

    def number(self, value: float) -> Stored:
        """A constant."""
        return self.b.writer.constant(f"number_{value:g}", np.array(value, np.float32))

    def softplus(self, x: Stored, last: bool = False) -> Stored:
        """log(1 + exp(-|x|)) + max(x, 0)."""
        tail = self.op("LOG", self.plus(self.op("EXP", self.op("NEG", self.op("ABS", x))), 1.0))
        return self.op("ADD", tail, self.op("RELU", x), last=last, kind="AddOptions")


def _chained(write: Callable[[_Chain], object]) -> Emitter:
    def emit(b: Build, job: Job) -> None:
        write(_Chain(b, job))

    return emit


def _one(code: str, kind: str = "") -> Emitter:
    return _chained(lambda c: c.op(code, c.x, last=True, kind=kind))


def _hsigmoid(c: _Chain) -> None:
    gate = c.op("RELU6", c.plus(c.x, 3.0))
    c.op("MUL", gate, c.number(1.0 / 6.0), last=True, kind="MulOptions")


def _prelu(b: Build, job: Job) -> None:
    """One slope, or one for each channel along axis 1."""
    c, slope = _Chain(b, job), _slope(b, job.call)
    if slope.size == 1:
        c.op("LEAKY_RELU", c.x, last=True, kind="LeakyReluOptions", alpha=float(slope.reshape(-1)[0]))
        return
    rank = b.rank(job.call.out)
    wide = slope.reshape(1, -1, *[1] * (rank - 2)) if slope.ndim == 1 else slope
    wide = wide.reshape((1,) * (rank - wide.ndim) + wide.shape).transpose(c.order)
    alpha = b.writer.constant(f"{job.call.out.name}_slope", wide[0].astype(np.float32))
    c.op("PRELU", c.x, alpha, last=True)


def _slope(b: Build, call: OpCall) -> np.ndarray:
    slope = call.attrs["negative_slope" if call.kind == "leaky_relu" else "slope"]
    value = b.value(slope) if isinstance(slope, TensorNode) else slope
    return np.asarray(value.numpy() if isinstance(value, mge.Tensor) else value)


FLOAT_FUNCTIONS: dict[str, Emitter] = {
    "sigmoid": _one("LOGISTIC"),
    "tanh": _one("TANH"),
    "hswish": _one("HARD_SWISH"),
    "gelu": _one("GELU", "GeluOptions"),
    "silu": _chained(lambda c: c.op("MUL", c.x, c.op("LOGISTIC", c.x), last=True, kind="MulOptions")),
    "hsigmoid": _chained(_hsigmoid),
    "leaky_relu": _prelu,
    "prelu": _prelu,
    "softplus": _chained(lambda c: c.softplus(c.x, last=True)),
    "logsigmoid": _chained(lambda c: c.op("NEG", c.softplus(c.op("NEG", c.x)), last=True)),
    "expm1": _chained(lambda c: c.op("SUB", c.op("EXP", c.x), c.number(1.0), last=True, kind="SubOptions")),
    "log1p": _chained(lambda c: c.op("LOG", c.plus(c.x, 1.0), last=True)),
    "square": _one("SQUARE"),
    **{k: _one(k.upper()) for k in ("exp", "log", "sqrt", "abs", "neg", "sin", "cos", "floor", "ceil")},
}

# Those that a table can hold: functions of one value alone.
FUNCTIONS = frozenset(FLOAT_FUNCTIONS) - {"neg"}


def table(b: Build, job: Job) -> None:
    """A look-up: the integers that the graph gives for each integer of the input."""
    call, (x, order), (_, kind, grid) = job.call, b.get(job.call.inputs[0]).parts, b.site_grid(job)
    assert x.grid is not None
    info = np.iinfo(x.dtype)
    values = grid.integers(_computed(b, call, x.grid.floats(np.arange(info.min, info.max + 1))), kind)
    content = b.writer.constant(f"{call.out.name}_table", values, grid)
    wide, index = (b.writer.tensor(f"{call.out.name}_{n}", x.shape, np.int32) for n in ("wide", "index"))
    start = b.writer.constant("table_start", np.array(-info.min, np.int32))
    b.writer.op("CAST", [x], [wide], "CastOptions")
    b.writer.op("ADD", [wide, start], [index], "AddOptions")
    b.compute(job, order, "GATHER", [content, index], "GatherOptions", fuses=False, axis=0)


def _computed(b: Build, call: OpCall, values: np.ndarray) -> np.ndarray:
    """What the graph's own op makes of some values."""
    inputs: list[Any] = []
    for node in call.expr.inputs:
        given = values if node is call.inputs[0] else b.value(node)
        inputs.append(mge.Tensor(given) if isinstance(node, TensorNode) else owner(call.expr))
    return call.expr.interpret(*inputs)[0].numpy()


def _fixed_scale(code: str, narrow: Grid) -> Emitter:
    """A kernel whose results have one scale: they are rounded again to that of the graph."""

    def emit(b: Build, job: Job) -> None:
        x, order = b.get(job.call.inputs[0]).parts
        name, kind, grid = b.site_grid(job)
        fixed = _WIDE if kind == np.int16 else narrow
        first = name if grid == fixed else f"{job.out.name}_fixed"
        result = b.writer.add(code, [x], first, x.shape, kind, fixed)
        b.put(job.out, b.quantized(result, grid, kind, name), order)

    return emit


def _native(code: str, kind: str = "", slope: bool = False) -> Emitter:
    """TFLite's integer kernel of a function."""

    def emit(b: Build, job: Job) -> None:
        if code == "HARD_SWISH" and b.site_grid(job)[1] == np.int16:  # the kernel has 8 bits
            table(b, job)
            return
        x, order = b.get(job.call.inputs[0]).parts
        options = {"alpha": float(_slope(b, job.call).reshape(-1)[0])} if slope else {}
        b.compute(job, order, code, [x], kind, fuses=False, **options)

    return emit


NATIVE: dict[str, Emitter] = {
    "sigmoid": _fixed_scale("LOGISTIC", _LOGISTIC),
    "tanh": _fixed_scale("TANH", _TANH),
    "hswish": _native("HARD_SWISH"),
    # A prelu with several slopes is not taken for a function of one value.
    **dict.fromkeys(("leaky_relu", "prelu"), _native("LEAKY_RELU", "LeakyReluOptions", slope=True)),
}
