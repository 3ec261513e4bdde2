"""Fits a packaged cost table to this processor: a dozen kernels scale the times of all of their class.

Of the packaged tables of onnxruntime, the one is scaled whose kernels are most like this processor's.
Processors differ by class of kernel: without VNNI instructions integer convolutions take three times as long,
while additions take as long as before. Weights of 7 bits do not saturate there, and take less time:
they are measured, too. Of convolutions they differ by size, too: large ones on integers took
6 times as long, convolutions of maps of 4 x 4 pixels 2.5 times. The factors are remembered for processor and
runtime, factors measured next to other programs for an hour.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from qtrace.benchmarking.cases import Case, alone, between_convs, boundaries, conv, join
from qtrace.benchmarking.kernels import measure_cases
from qtrace.benchmarking.load import watched_load
from qtrace.benchmarking.machine import describe_machine
from qtrace.costs import FLOAT, INTEGER, INTEGER_7, LOOKUP, CostTable, Machine, Measurement, OpShape
from qtrace.onnxfile.saturation import SAFE_BITS, products_saturate
from qtrace.storage.cache import read_cached, write_cached

__all__ = ["ProcessorFit", "Trend", "fit", "fit_processor", "fitted_table", "nearest", "scale"]

_RUNTIME = "onnxruntime"
# Changes with the kernels that are timed, whose factors differ from others'.
_KERNELS = "by size, weights of 7 bits, nearest table"
_LEAST, _MOST = 0.1, 10.0  # of a factor: what lies beyond was disturbed
_LEAST_KERNELS = 5  # of a class, from which on its factor depends on their sizes
Measure = Callable[[Sequence[Case]], list[Measurement]]


@dataclass(frozen=True)
class Trend:
    """The factor of a class of kernels, which may depend on their size.

    Attributes:
        constant: the logarithm of the factor of a kernel of one pixel and one multiplication at it.
        pixels: how much it grows with the logarithm of the pixels of the result.
        work: how much it grows with the logarithm of the multiplications at a pixel.
        low, high: the smallest and the largest factor that was measured, within which it stays.
    """

    constant: float
    pixels: float
    work: float
    low: float
    high: float

    @classmethod
    def of(cls, factors: Sequence[float], ops: Sequence[OpShape]) -> Trend:
        """Returns the trend of measured factors: their geometric mean, where there are few kernels."""
        logs = np.log(np.clip(factors, _LEAST, _MOST))
        mean = float(np.mean(logs))
        sizes = np.array([(1.0, *_size(op)) for op in ops])
        if len(factors) < _LEAST_KERNELS or np.linalg.matrix_rank(sizes) < sizes.shape[1]:
            return cls(mean, 0.0, 0.0, math.exp(mean), math.exp(mean))
        constant, pixels, work = map(float, np.linalg.lstsq(sizes, logs, rcond=None)[0])
        return cls(constant, pixels, work, math.exp(logs.min()), math.exp(logs.max()))

    def at(self, op: OpShape) -> float:
        """Returns the factor of an op."""
        pixels, work = _size(op)
        return min(
            max(math.exp(self.constant + self.pixels * pixels + self.work * work), self.low), self.high
        )


_UNKNOWN = Trend(0.0, 0.0, 0.0, 1.0, 1.0)


def _size(op: OpShape) -> tuple[float, float]:
    """Returns the logarithms of the pixels of an op's result, and of the multiplications at each of them."""
    shape = op.outputs[0] if op.outputs else ()
    pixels = math.prod((*shape[:1], *shape[2:]))
    return math.log(max(pixels, 1)), math.log(max(math.prod(op.weight), 1))


@dataclass(frozen=True)
class ProcessorFit:
    """How many times as long the kernels of a processor take as in the packaged table.

    Attributes:
        machine: the machine that the factors were measured on.
        factors: class and form of kernels -> their factor; 1 for those that are absent.
        base: the packaged table that is scaled, by its name in `CostTable.packaged`.
    """

    machine: Machine
    factors: Mapping[tuple[str, str], Trend]
    base: str = _RUNTIME

    def table(self, weight_bits: int = 8) -> CostTable:
        """Returns the packaged table, scaled to the processor.

        Args:
            weight_bits: the bits of weights: 7 or fewer take other kernels where products saturate.
        """
        table = CostTable.packaged(_RUNTIME)[self.base]
        if self.machine == table.machine:
            return table
        factors = dict(self.factors)
        if weight_bits <= SAFE_BITS:
            factors |= {(kind, INTEGER): f for (kind, form), f in factors.items() if form == INTEGER_7}
        return scale(table, factors, self.machine)

    @property
    def gains_by_fewer_bits(self) -> bool:
        """Whether weights of 7 bits take other kernels than weights of 8."""
        return any(form == INTEGER_7 for _, form in self.factors)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fit as plain data."""
        return {
            "machine": asdict(self.machine),
            "table": self.base,
            "factors": _write_factors(self.factors),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProcessorFit:
        """Reads what `to_dict` returned, here or in earlier versions.

        Raises:
            ValueError: when the table that was scaled is not packaged.
        """
        machine = Machine(**{**data["machine"], "flags": tuple(data["machine"]["flags"])})
        base = data.get("table", _RUNTIME)
        if base not in CostTable.packaged(_RUNTIME):
            raise ValueError(f"there is no packaged cost table {base!r}")
        return cls(machine, _read_factors(data["factors"]), base)


def fit_processor(measure: Measure = measure_cases) -> ProcessorFit:
    """Returns the fit of a packaged table of onnxruntime to this processor.

    Args:
        measure: times kernels; it is called once for each processor and version of the runtime, and not at
            all if a table was measured on this one.

    Raises:
        ExportError: when the runtime is not installed.
    """
    tables = CostTable.packaged(_RUNTIME)
    here = describe_machine(_RUNTIME, _RUNTIME, 1)
    for name, table in tables.items():
        if table.machine.runs_like(here):
            return ProcessorFit(table.machine, {}, name)
    dates = (table.machine.date for table in tables.values())
    key = [_KERNELS, here.processor, here.version, list(here.flags), *dates]
    stored = read_cached("fit", key)
    if stored is None:
        stored = _read_of_this_hour(key)
    if stored is None:
        with watched_load() as others:
            base, factors = nearest(tables, measure(_cases()))
        stored = ProcessorFit(here, factors, base).to_dict()
        if others.is_busy:
            write_cached("busy-fit", key, {"hour": _hour(), "fit": stored})
        else:
            write_cached("fit", key, stored)
    return replace(ProcessorFit.from_dict(stored), machine=here)


def _hour() -> int:
    return int(time.time() // 3600)


def _read_of_this_hour(key: Any) -> Any:
    """Returns the fit that was measured next to other programs: a later hour measures it anew."""
    stored = read_cached("busy-fit", key) or {}
    return stored.get("fit") if stored.get("hour") == _hour() else None


def _write_factors(factors: Mapping[tuple[str, str], Trend]) -> dict[str, dict[str, float]]:
    return {f"{kind}, {form}": asdict(trend) for (kind, form), trend in factors.items()}


def _read_factors(stored: Mapping[str, Any]) -> dict[tuple[str, str], Trend]:
    """Reads factors; factors in files of earlier versions are one number each."""
    factors = {}
    for name, value in stored.items():
        kind, form = name.rsplit(", ", 1)
        factors[kind, form] = Trend(**value) if isinstance(value, dict) else Trend.of([value], [])
    return factors


def fitted_table(measure: Measure = measure_cases, weight_bits: int = 8) -> CostTable:
    """Returns a packaged table of onnxruntime, scaled to this processor if it was measured on another one.

    Args:
        measure: times kernels; see `fit_processor`.
        weight_bits: the bits of weights, as for `ProcessorFit.table`.

    Raises:
        ExportError: when the runtime is not installed.
    """
    return fit_processor(measure).table(weight_bits)


def nearest(
    tables: Mapping[str, CostTable], measured: Sequence[Measurement]
) -> tuple[str, dict[tuple[str, str], Trend]]:
    """Returns the table that differs least from the measured times once it is scaled, and its factors."""
    factors = {name: fit(table, measured) for name, table in tables.items()}
    best = min(tables, key=lambda name: _missed(tables[name], factors[name], measured))
    return best, factors[best]


def _missed(
    table: CostTable, factors: Mapping[tuple[str, str], Trend], measured: Sequence[Measurement]
) -> tuple[int, float]:
    """Returns how many measured times a table lacks, and by how much it differs from the others once scaled.

    The difference is the mean square of the logarithms.
    """
    misses = [
        math.log(own.seconds / (expected * factors[_class(own.op), own.form].at(own.op))) ** 2
        for own in measured
        if (expected := _expected(table, own))
    ]
    return len(measured) - len(misses), sum(misses) / max(len(misses), 1)


def _expected(table: CostTable, own: Measurement) -> float | None:
    return table.seconds(own.op, INTEGER if own.form == INTEGER_7 else own.form)


def fit(table: CostTable, measured: Sequence[Measurement]) -> dict[tuple[str, str], Trend]:
    """Returns for each class and form how many times as long its kernels take as ``table`` says."""
    factors: dict[tuple[str, str], list[tuple[float, OpShape]]] = {}
    for own in measured:
        if expected := _expected(table, own):
            factors.setdefault((_class(own.op), own.form), []).append((own.seconds / expected, own.op))
    return {key: Trend.of(*zip(*pairs, strict=True)) for key, pairs in factors.items()}


def scale(table: CostTable, factors: Mapping[tuple[str, str], Trend], machine: Machine) -> CostTable:
    """Returns ``table`` with its times multiplied by the factors of their classes.

    Args:
        table: the table.
        factors: class and form -> factor; 1 for those that are absent.
        machine: the machine that the factors were measured on.
    """
    scaled = [
        replace(m, seconds=m.seconds * factors.get((_class(m.op), m.form), _UNKNOWN).at(m.op))
        for m in table.measurements
    ]
    return CostTable(machine, scaled, table.per_run)


def _class(op: OpShape) -> str:
    """Returns the class of the kernels of an op."""
    if op.kind.startswith("conv"):
        return "depthwise" if op.groups > 1 else "conv"
    if op.kind in ("linear", "matmul"):
        return "product"
    if op.kind in ("quantize", "dequantize", "reorder", "max_pool2d, plain"):
        return op.kind
    return "pool" if "pool" in op.kind else "elementwise"


def _cases() -> list[Case]:
    """Returns the kernels that are timed, the kernels of one form in one network."""
    cases = [*(join(tuple(_in_form(form))) for form in (FLOAT, INTEGER)), boundaries(64, 28)]
    return [*cases, join(tuple(_layers(INTEGER_7)))] if products_saturate() else cases


# Input and output channels, kernel and height of convolutions from small ones to large ones.
_CONVS = (
    (16, 16, 3, 56),
    (64, 64, 3, 28),
    (64, 64, 3, 7),
    (128, 128, 1, 14),
    (32, 96, 1, 4),
    (320, 1280, 1, 4),
)


def _in_form(form: str) -> Iterator[Case]:
    shape, pooled = (1, 64, 28, 28), (1, 64, 14, 14)
    yield from _layers(form)
    yield conv(form, 96, 96, 3, 28, 96)
    yield between_convs(OpShape("add", (shape, shape), (shape,)), form)
    yield between_convs(OpShape("max_pool2d", (shape,), (pooled,), (3, 3), (2, 2)), form)
    yield between_convs(OpShape("sigmoid", (shape,), (shape,)), FLOAT if form == FLOAT else LOOKUP)


def _layers(form: str) -> Iterator[Case]:
    """Yields the layers whose integer kernels depend on the bits of their weights."""
    for channels, size, kernel, pixels in _CONVS:
        yield conv(form, channels, size, kernel, pixels)
    yield alone(OpShape("linear", ((1, 100, 256),), ((1, 100, 256),), weight=(256, 256)), form)
