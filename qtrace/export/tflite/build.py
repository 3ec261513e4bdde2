"""Writes operators and what they fuse: activation functions, roundings, clamps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.layout import Order, file_shape
from qtrace.export.tflite.plan import Job, Plan
from qtrace.export.tflite.store import Held, Store
from qtrace.export.tflite.writer import TYPES, Grid, Inputs, Stored
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite

__all__ = ["Build", "Emitter", "Held", "Options", "Target", "allowing", "bounds", "integer_type"]

# Bounds of the activation functions that an operator fuses -> the schema's number of the function.
_NONE = 0
_FUSED: dict[tuple[Any, Any], int] = {(0.0, None): 1, (-1.0, 1.0): 2, (0.0, 6.0): 3}


@dataclass(frozen=True)
class Options:
    """What the caller of an export chooses.

    Attributes:
        io: "float32" or "int8": the type of the model's float inputs and outputs.
        functions: how functions of one value between integers are written: "float", "table" or "native".
        allow_float: op kinds that may compute in float where the graph computes on integers.
    """

    io: str = "float32"
    functions: str = "float"
    allow_float: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Target:
    """Where an operator writes.

    Attributes:
        stored: its tensor.
        order: the order of the tensor's axes.
        activation: the number of the activation function that it fuses.
        clamp: the activation function that it does not fuse.
    """

    stored: Stored
    order: Order
    activation: int = _NONE
    clamp: OpCall | None = None


class Build(Store):
    """One file in the making, op by op."""

    def __init__(self, plan: Plan, options: Options, batch: int) -> None:
        super().__init__(plan, batch)
        self.options = options

    def result(self, node: TensorNode, order: Order, source: Stored | None = None) -> Stored:
        """A tensor for the value of a node: integers if ``source`` is, else floats."""
        shape = file_shape(self.shape(node), order)
        if source is not None and source.grid is not None:
            return self.like(source, f"{node.name}_int", shape)
        kind = np.dtype(node.dtype) if source is None else source.dtype
        if kind not in TYPES:
            raise ExportError(
                f"{node.name} is {kind.name}, which is not written to TFLite: use float32 or int32"
            )
        return self.writer.tensor(node.name, shape, kind)

    def site_grid(self, job: Job) -> tuple[str, np.dtype, Grid]:
        """Name, type and grid of the integers that a job gives."""
        assert job.site is not None
        return f"{job.site.name}_int", integer_type(job.site), Grid.of(job.site.qparams)

    def target(self, job: Job, order: Order, fuses: bool = True) -> Target:
        """The tensor that a job's operator fills: the integers of its site, floats where it has none.

        Args:
            job: an op.
            order: the order of the result's axes.
            fuses: whether the operator can fuse an activation function.
        """
        if job.site is None:
            return Target(self.result(job.out, order), order)
        name, kind, grid = self.site_grid(job)
        shape = file_shape(self.shape(job.out), order)
        number = _NONE if job.clamp is None else _FUSED.get(bounds(job.clamp))
        if job.clamp is None or (number is not None and fuses):
            return Target(self.writer.tensor(name, shape, kind, grid), order, number or _NONE)
        opened = self.writer.tensor(f"{job.call.out.name}_open", shape, kind, grid)
        return Target(opened, order, clamp=job.clamp)

    def done(self, job: Job, target: Target) -> None:
        """Takes what `target` gave as the job's result, behind the clamp that its operator did not fuse."""
        stored = target.stored
        if target.clamp is not None:
            stored = self.clamped(stored, bounds(target.clamp), self.site_grid(job)[0])
        self.put(job.out, stored, target.order)

    def compute(
        self,
        job: Job,
        order: Order,
        code: str,
        inputs: Inputs,
        kind: str,
        fuses: bool = True,
        **options: Any,
    ) -> None:
        """Adds the operator of a job, which gives the integers of the job's site or floats."""
        target = self.target(job, order, fuses)
        if fuses:
            options["fusedActivationFunction"] = target.activation
        self.writer.op(code, inputs, [target.stored], kind, **options)
        self.done(job, target)

    def emit(
        self,
        node: TensorNode,
        order: Order,
        code: str,
        inputs: Inputs,
        kind: str = "",
        source: Stored | None = None,
        **options: Any,
    ) -> None:
        """Adds the operator that gives the value of a node: of the type of ``source``, else of the node's."""
        out = self.result(node, order, source)
        self.writer.op(code, inputs, [out], kind, **options)
        self.put(node, out, order)

    def clamped(self, stored: Stored, limits: tuple[float | None, float | None], name: str) -> Stored:
        """Integers within bounds, on their own grid: rounding and clamping may change places."""
        assert stored.grid is not None
        info, steps = np.iinfo(stored.dtype), []
        for code, limit, last in zip(("MAXIMUM", "MINIMUM"), limits, (info.min, info.max), strict=True):
            bound = last if limit is None else int(stored.grid.integers(limit, stored.dtype))
            if bound != last:  # beyond it, the type saturates
                steps.append((code, np.array(bound, stored.dtype)))
        for number, (code, place) in enumerate(steps, 1):
            end = self.writer.constant(f"{name}_bound", place, stored.grid)
            step = name if number == len(steps) else f"{name}_low"
            stored = self.add(code, [stored, end], step, stored.shape, kind="MaximumMinimumOptions")
        return stored

    def requantized(self, stored: Stored, grid: Grid, name: str) -> Stored:
        """The same numbers on another grid of the same type.

        A sum with zero: XNNPACK's QUANTIZE between integers has a multiplier of 8 bits, and is off by one in
        up to a tenth of the values; its ADD has one of 20 bits.
        """
        made = self.writer.tensor(name, stored.shape, stored.dtype, grid)
        assert stored.grid is not None
        zero = self.writer.constant("zero", np.array(stored.grid.zero_point[0], stored.dtype), stored.grid)
        self.writer.op("ADD", [stored, zero], [made], "AddOptions")
        return made

    def quantized(self, stored: Stored, grid: Grid, kind: np.dtype, name: str) -> Stored:
        """Floats, or integers of another grid, rounded to a grid."""
        if stored.grid == grid and stored.dtype == kind:
            return stored
        if stored.grid is not None and stored.dtype == kind == np.int8:
            return self.requantized(stored, grid, name)
        return self.writer.add("QUANTIZE", [stored], name, stored.shape, kind, grid, kind="QuantizeOptions")


Emitter = Callable[[Build, Job], None]


def integer_type(site: QuantizedSite) -> np.dtype:
    """The type of a site's integers in a file."""
    return np.dtype(np.int16 if site.qparams.scheme.bits == 16 else np.int8)


def allowing(kind: str) -> str:
    """How to say that ops of a kind may compute in float."""
    return f"allow {kind} in float (allow_float={kind!r}, on the command line --allow-float {kind})"


def bounds(clamp: OpCall) -> tuple[float | None, float | None]:
    """The lowest and the highest value that an activation function gives."""
    if clamp.kind == "relu":
        return 0.0, None
    if clamp.kind == "relu6":
        return 0.0, 6.0
    return clamp.attrs["lower"], clamp.attrs["upper"]
