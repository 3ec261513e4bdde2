"""TFLite for functions of one value: in float, as a table of integers, or by TFLite's own integer kernels.

Between integers all three are possible. XNNPACK turns dequantize, function, quantize into a look-up, which
is exact and fast; a table is exact on any kernel, and slow on a CPU. TFLite's own kernels are approximations,
some with a fixed scale for their results: one step off in up to a tenth of the values.
"""

from __future__ import annotations

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
        held = b.floats(b.get(job.call.inputs[0]))
        self.x, self.order = held.stored, held.order

    def op(self, code: str, *inputs: Stored, last: bool = False, kind: str = "", **options: Any) -> Stored:
        """Adds an operator."""
        name = self.call.out.name if last else f"{self.call.out.name}_{code.lower()}"
        made = self.b.writer.tensor(name, self.x.shape)
        self.b.writer.op(code, inputs, [made], kind, **options)
        if last:
            self.b.put(self.call.out, made, self.order)
        return made

    def number(self, value: float) -> Stored:
        """A constant."""
        return self.b.writer.constant(f"number_{value:g}", np.array(value, np.float32))


def _one(code: str, kind: str = "", **options: Any) -> Emitter:
    def emit(b: Build, job: Job) -> None:
        chain = _Chain(b, job)
        chain.op(code, chain.x, last=True, kind=kind, **options)

    return emit


def _silu(b: Build, job: Job) -> None:
    c = _Chain(b, job)
    c.op("MUL", c.x, c.op("LOGISTIC", c.x), last=True, kind="MulOptions")


def _hsigmoid(b: Build, job: Job) -> None:
    c = _Chain(b, job)
    more = c.op("ADD", c.x, c.number(3.0), kind="AddOptions")
    c.op("MUL", c.op("RELU6", more), c.number(1.0 / 6.0), last=True, kind="MulOptions")


def _leaky_relu(b: Build, job: Job) -> None:
    c = _Chain(b, job)
    slope = job.call.attrs["negative_slope"]
    c.op("LEAKY_RELU", c.x, last=True, kind="LeakyReluOptions", alpha=slope)


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
    slope = call.attrs["slope"]
    found = b.value(slope) if isinstance(slope, TensorNode) else np.asarray(slope.numpy())
    assert found is not None
    return found


def _softplus(b: Build, job: Job) -> None:
    """log(1 + exp(-|x|)) + max(x, 0)."""
    c = _Chain(b, job)
    _softplus_of(c, c.x, last=True)


def _softplus_of(c: _Chain, x: Stored, last: bool = False) -> Stored:
    power = c.op("EXP", c.op("NEG", c.op("ABS", x)))
    tail = c.op("LOG", c.op("ADD", power, c.number(1.0), kind="AddOptions"))
    return c.op("ADD", tail, c.op("RELU", x), last=last, kind="AddOptions")


def _logsigmoid(b: Build, job: Job) -> None:
    c = _Chain(b, job)
    c.op("NEG", _softplus_of(c, c.op("NEG", c.x)), last=True)


def _expm1(b: Build, job: Job) -> None:
    c = _Chain(b, job)
    c.op("SUB", c.op("EXP", c.x), c.number(1.0), last=True, kind="SubOptions")


def _log1p(b: Build, job: Job) -> None:
    c = _Chain(b, job)
    c.op("LOG", c.op("ADD", c.x, c.number(1.0), kind="AddOptions"), last=True)


FLOAT_FUNCTIONS: dict[str, Emitter] = {
    "sigmoid": _one("LOGISTIC"),
    "tanh": _one("TANH"),
    "hswish": _one("HARD_SWISH"),
    "gelu": _one("GELU", "GeluOptions"),
    "silu": _silu,
    "hsigmoid": _hsigmoid,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "softplus": _softplus,
    "logsigmoid": _logsigmoid,
    "expm1": _expm1,
    "log1p": _log1p,
    "square": _one("SQUARE"),
    **{k: _one(k.upper()) for k in ("exp", "log", "sqrt", "abs", "neg", "sin", "cos", "floor", "ceil")},
}

# Those that a table can hold: functions of one value alone.
FUNCTIONS = frozenset(FLOAT_FUNCTIONS) - {"neg"}


def table(b: Build, job: Job) -> None:
    """A look-up: the integers that the graph gives for each integer of the input."""
    call, held = job.call, b.get(job.call.inputs[0])
    name, kind, grid = b.site_grid(job)
    assert held.stored.grid is not None
    info = np.iinfo(held.stored.dtype)
    every = np.arange(info.min, info.max + 1)
    values = grid.integers(_computed(b, call, held.stored.grid.floats(every)), kind)
    content = b.writer.constant(f"{call.out.name}_table", values, grid)
    shape = held.stored.shape
    wide, index = (b.writer.tensor(f"{call.out.name}_{n}", shape, np.int32) for n in ("wide", "index"))
    start = b.writer.constant("table_start", np.array(-info.min, np.int32))
    b.writer.op("CAST", [held.stored], [wide], "CastOptions")
    b.writer.op("ADD", [wide, start], [index], "AddOptions")
    made = b.writer.tensor(name, shape, kind, grid)
    b.writer.op("GATHER", [content, index], [made], "GatherOptions", axis=0)
    b.put(job.out, made, held.order)


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
        held = b.get(job.call.inputs[0])
        name, kind, grid = b.site_grid(job)
        made = _WIDE if kind == np.int16 else narrow
        out = b.writer.tensor(
            name if grid == made else f"{job.out.name}_fixed", held.stored.shape, kind, made
        )
        b.writer.op(code, [held.stored], [out])
        b.put(job.out, b.quantized(out, grid, kind, name), held.order)

    return emit


def _kernel(b: Build, job: Job, code: str, kind: str = "", **options: Any) -> None:
    held = b.get(job.call.inputs[0])
    name, dtype, grid = b.site_grid(job)
    out = b.writer.tensor(name, held.stored.shape, dtype, grid)
    b.writer.op(code, [held.stored], [out], kind, **options)
    b.put(job.out, out, held.order)


def _native_hswish(b: Build, job: Job) -> None:
    if b.site_grid(job)[1] == np.int16:  # the kernel has 8 bits
        table(b, job)
        return
    _kernel(b, job, "HARD_SWISH")


def _native_leaky_relu(b: Build, job: Job) -> None:
    _kernel(b, job, "LEAKY_RELU", "LeakyReluOptions", alpha=job.call.attrs["negative_slope"])


def _native_prelu(b: Build, job: Job) -> None:
    """Of a single slope; others are not taken for functions of one value."""
    slope = float(_slope(b, job.call).reshape(-1)[0])
    _kernel(b, job, "LEAKY_RELU", "LeakyReluOptions", alpha=slope)


NATIVE: dict[str, Emitter] = {
    "sigmoid": _fixed_scale("LOGISTIC", _LOGISTIC),
    "tanh": _fixed_scale("TANH", _TANH),
    "hswish": _native_hswish,
    "leaky_relu": _native_leaky_relu,
    "prelu": _native_prelu,
}
