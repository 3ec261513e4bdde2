"""Measures the cost table of a runtime on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from benchmarks.kernels.grid_convs import conv_cases
from benchmarks.kernels.grid_others import other_cases
from benchmarks.kernels.onnxruntime_kernels import PASSES, measure_cases, measure_run
from qtrace.benchmarking.runners import describe_machine
from qtrace.costs import CostTable, Measurement
from qtrace.errors import ExportError, install

__all__ = ["DISTRIBUTIONS", "SUPPORTED", "measure_table"]

DISTRIBUTIONS = {
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "litert": "ai-edge-litert",
    "ncnn": "ncnn",
}
"""Runtime -> the distribution that holds it."""
# Runtime -> the packages that measuring it imports, and the extras of qtrace that install them.
_NEEDS = {
    "onnxruntime": (("onnx", "onnxruntime"), "onnx"),
    "openvino": (("onnx", "openvino"), "openvino"),
    "litert": (("ai_edge_litert", "flatbuffers"), "tflite"),
    "ncnn": (("ncnn",), "ncnn"),
}
_Progress = Callable[[int, int], None]
_Measured = tuple[list[Measurement], float]


def measure_table(runtime: str, progress: _Progress = lambda count, all: None) -> CostTable:
    """Measures kernels over a grid of shapes, with one thread.

    Args:
        runtime: the name of the runtime.
        progress: called with the number of networks that were timed since the last call, and of all.

    Raises:
        ExportError: when the kernels of the runtime cannot be measured, or it is not installed.
    """
    if runtime not in SUPPORTED:
        raise ExportError(
            f"the kernels of {runtime!r} cannot be measured; supported: {', '.join(SUPPORTED)}. Whole files "
            f"are timed by `qtrace bench FILE`."
        )
    packages, extra = _NEEDS[runtime]
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise ExportError(
            f"measuring the kernels of {runtime} needs the packages {' and '.join(packages)}: run "
            f"{install(extra)}."
        )
    measurements, per_run = _MEASURES[runtime](progress)
    return CostTable(describe_machine(runtime, DISTRIBUTIONS[runtime], 1), measurements, per_run)


def _measure_onnxruntime(progress: _Progress) -> _Measured:
    cases = [*conv_cases(), *other_cases()]
    per_run = measure_run()
    measurements = measure_cases(cases, per_run, lambda count: progress(count, PASSES * len(cases)))
    return measurements, per_run


def _measure_openvino(progress: _Progress) -> _Measured:
    from benchmarks.kernels.openvino_kernels import cases_of, measure

    cases = cases_of()
    return measure(cases, lambda count: progress(count, len(cases)))


def _measure_litert(progress: _Progress) -> _Measured:
    from benchmarks.kernels.litert_kernels import measure

    return measure(progress)


def _measure_ncnn(progress: _Progress) -> _Measured:
    from benchmarks.kernels.ncnn_kernels import measure

    return measure(progress)


_MEASURES: dict[str, Callable[[_Progress], _Measured]] = {
    "onnxruntime": _measure_onnxruntime,
    "openvino": _measure_openvino,
    "litert": _measure_litert,
    "ncnn": _measure_ncnn,
}
SUPPORTED = tuple(_MEASURES)
"""The runtimes whose kernels can be measured."""
