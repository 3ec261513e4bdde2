"""Names the likely cause of an op whose integers differ between the graph and a runtime."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.onnxfile.kernels import products_saturate
from qtrace.scheme import QParams

__all__ = [
    "BFLOAT16",
    "SATURATION",
    "SATURATION_ELSEWHERE",
    "WRONG_PRODUCTS",
    "likely_causes",
    "optimized_kernel_cause",
]

SATURATION = (
    "products with int8 weights saturate in onnxruntime and OpenVINO on this processor, which has no VNNI: "
    "the file is right on processors that have it, and on ARM. For this one, export it with weights=uint8 "
    "(the same numbers, exact and slower; for unsigned activations), or give weights 7 bits, which fit"
)
"""Why an int8 file computes other integers with optimizations on a processor without VNNI, and what to do."""

SATURATION_ELSEWHERE = (
    "this file is for no runtime in particular (backend generic), and on x86 processors without VNNI its "
    "products with int8 weights saturate in onnxruntime and OpenVINO, which this run does not show: prepare "
    "for the runtime that it is for, export it with weights=uint8, or give weights 7 bits"
)
"""What may become of a file for an unknown processor that is right here."""

BFLOAT16 = (
    "on this processor OpenVINO computes floats as bfloat16 unless it is told otherwise, and outputs are "
    'then others than verified: compile the file with {"INFERENCE_PRECISION_HINT": "f32"}, as this run did'
)
"""What a client of OpenVINO has to set so that it computes what was verified."""

WRONG_PRODUCTS = (
    "onnxruntime's products of integers are wrong on this processor (AMX, onnxruntime issue 26324) from the "
    "32nd row on where a layer has 17 to 31 outputs, or so many more than a multiple of 32; bisect names the "
    "first: run the file by onnxruntime 1.25 or later or on a CPU without AMX, keep such layers in float by "
    "a rule, or export with amx=true where the file was made elsewhere"
)
"""Why a right file computes other integers with optimizations on a processor with AMX, and what to do."""

# The kinds of ops that onnxruntime computes as products of integer matrices.
_MATRIX_PRODUCTS = ("conv1d", "conv2d", "conv3d", "linear", "matmul")
_CPU_INFO = Path("/proc/cpuinfo")


def likely_causes(
    unrounded: np.ndarray, graph: np.ndarray, runtime: np.ndarray, qparams: QParams
) -> tuple[str, ...]:
    """Returns the likely causes of the differences between two arrays of integers, the most likely first.

    Args:
        unrounded: the graph's values before rounding, in LSB, with the zero point added.
        graph: the graph's integers.
        runtime: the runtime's integers, of the same shape.
        qparams: the parameters of both arrays of integers.
    """
    delta = runtime - graph
    differs = delta != 0
    low, high = qparams.scheme.qmin, qparams.scheme.qmax
    causes = []
    if (rule := _find_rounding(unrounded, graph, runtime, qparams)) is not None:
        return (f"rounding: {rule}",)
    if np.array_equal(np.sort(graph, axis=None), np.sort(runtime, axis=None)):
        causes.append("layout: the same integers stand at other places (a transpose, or an order of axes)")
    edge = np.isin(runtime[differs], (low, high)) ^ np.isin(graph[differs], (low, high))
    if edge.mean() > 0.9:
        causes.append(f"saturation: one side stops at {low} or {high}, the other does not")
    zero = int(qparams.zero_point) if not qparams.scale.ndim else low
    # Values that are neither saturated nor clamped at 0, as by a relu.
    inside = (runtime > low) & (runtime < high) & (runtime != zero) & (graph != zero)
    if (shift := _find_shift(delta[inside])) is not None:
        causes.append(
            f"zero point: every value is off by {shift:+d} LSB, as with no zero point or with another one"
        )
    elif (bias := _find_channel_shift(delta, inside)) is not None:
        causes.append(
            f"bias: each channel is off by a constant (up to {bias} LSB): it is missing or has another scale"
        )
    elif (ratio := _find_ratio(unrounded, runtime, qparams)) is not None:
        causes.append(f"scale: the runtime's values are {ratio:.4g} times the graph's")
    if np.abs(delta).max() == 1:
        ties = np.abs(np.abs(unrounded - np.floor(unrounded)) - 0.5)[differs] < 1e-3
        causes.append(
            "rounding: ties go the other way" if ties.mean() > 0.9 else "rounding: an intermediate is rounded"
        )
    return tuple(causes) or ("unknown: compare the op's attributes, padding and weights in the file",)


def optimized_kernel_cause(runtime: str, kind: str, side: Mapping[str, Any] | None = None) -> str:
    """Names the kernel at fault where a file is right without optimizations and wrong with them.

    Args:
        runtime: the name of the runtime.
        kind: the kind of the first op that differs with optimizations.
        side: versions and processor of a runtime on another host; None or empty for this interpreter's.
    """
    flags = set(side["flags"]) if side else _read_cpu_flags()
    if runtime == "onnxruntime" and kind in _MATRIX_PRODUCTS and "amx_int8" in flags:
        version = str(side["version"] if side else importlib.import_module("onnxruntime").__version__)
        if re.match(r"1\.2[1-4]\.", version):
            return (
                f"onnxruntime {version}'s integer kernel for this CPU (AMX, flag amx_int8), which is wrong "
                "for some numbers of columns (onnxruntime issue 26324): the file is right with optimizations "
                "off. Run it by onnxruntime 1.25 or later, with optimizations disabled or on a CPU without "
                "AMX, keep this op in float by a rule, or export it with amx=true if it was made elsewhere"
            )
    # A host is no more asked here: a processor with VNNI, or one that is not x86, adds up in 32 bits.
    saturates = "avx2" in flags and not any("vnni" in flag for flag in flags) if side else products_saturate()
    if runtime in ("onnxruntime", "openvino") and kind in _MATRIX_PRODUCTS and saturates:
        return SATURATION
    return (
        f"an optimized kernel of {runtime}: with optimizations off nothing differs. Run the file with "
        "optimizations disabled, or keep this op in float by a rule"
    )


def _read_cpu_flags() -> set[str]:
    """Returns the features of the CPU in Linux's names; none where the system does not list them."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


# How a runtime may round instead of to the nearest integer, ties to even.
_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ties go away from zero": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "ties go up": lambda x: np.floor(x + 0.5),
    "ties go to the even integer": np.rint,
    "the runtime rounds down": np.floor,
    "the runtime rounds up": np.ceil,
    "the runtime rounds towards zero": np.trunc,
}


def _find_rounding(
    unrounded: np.ndarray, graph: np.ndarray, runtime: np.ndarray, qparams: QParams
) -> str | None:
    """Returns the rounding that gives nearly all of the runtime's integers, where the graph's does not."""
    if np.abs(runtime - graph).max() != 1:
        return None
    zero = int(qparams.zero_point) if not qparams.scale.ndim else 0
    for name, rule in _ROUNDINGS.items():
        rounded = np.clip(rule(unrounded - zero) + zero, qparams.scheme.qmin, qparams.scheme.qmax)
        if np.mean(rounded == runtime) > max(0.999, np.mean(graph == runtime)):
            return name
    return None


def _find_shift(delta: np.ndarray) -> int | None:
    """Returns the constant, above 1 LSB, that nearly all of ``delta`` is equal to; None without one."""
    if delta.size < 2:
        return None
    shift = round(float(np.median(delta)))
    return shift if abs(shift) > 1 and np.mean(np.abs(delta - shift) <= 1) > 0.95 else None


def _find_channel_shift(delta: np.ndarray, inside: np.ndarray) -> int | None:
    """Returns the largest shift if each channel differs by a constant of its own, else None."""
    if delta.ndim < 2:
        return None
    flat = np.moveaxis(delta, 1, 0).reshape(delta.shape[1], -1)
    used = np.moveaxis(inside, 1, 0).reshape(delta.shape[1], -1)
    shifts = np.array(
        [round(float(np.median(d[u]))) if u.any() else 0 for d, u in zip(flat, used, strict=True)]
    )
    rest = np.abs(flat - shifts[:, None])[used]
    constant = rest.size > delta.shape[1] and np.mean(rest <= 1) > 0.95 and np.abs(shifts).max() > 1
    return int(np.abs(shifts).max()) if constant else None


def _find_ratio(unrounded: np.ndarray, runtime: np.ndarray, qparams: QParams) -> float | None:
    """Returns the factor between the values of runtime and graph; None where no factor explains them."""
    if qparams.scale.ndim:
        return None
    inside = (runtime > qparams.scheme.qmin) & (runtime < qparams.scheme.qmax)
    zero = int(qparams.zero_point)
    a, b = (v[inside].astype(np.float64) - zero for v in (unrounded, runtime))
    if not a.size or not a @ a:
        return None
    factor = float(a @ b) / float(a @ a)
    fits = np.mean(np.abs(b - factor * a) <= 1) > 0.95
    return factor if fits and abs(factor - 1) > 1e-3 else None
