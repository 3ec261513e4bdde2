"""Times the ops of a cost table in OpenVINO, by its own profile.

OpenVINO joins ops as it compiles a network. What it joins elementwise ops with depends on their neighbours,
so those on integers stand between convolutions. An op that became part of a convolution costs what this
convolution takes longer than the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.kernels import graphs
from benchmarks.kernels.cases import Case, Slot, alone, between_convs, boundaries, conv, conv_branches, feeds
from benchmarks.kernels.graphs import FUNCTIONS
from benchmarks.kernels.grid_small import small_grid
from qtrace.costs import FLOAT, INTEGER, Measurement, OpShape

__all__ = ["KernelTime", "cases_of", "measure", "run_profiled"]

_OPTIONS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "PERFORMANCE_HINT": "LATENCY",
    "INFERENCE_NUM_THREADS": "1",
    "PERF_COUNT": "YES",
}
_LEAST_RUNS, _MOST_RUNS, _SECONDS_PER_CASE = 20, 300, 0.06
_HALF = 0.5e-6  # the profile rounds down to microseconds
_LEAST_SECONDS = 3e-7
_NOT_RUN = ("Input", "Output", "Parameter", "Result", "Const", "Constant")
_CONVS = ("Convolution", "GroupConvolution", "Deconvolution")


@dataclass(frozen=True)
class KernelTime:
    """A node of a compiled network.

    Attributes:
        names: the names of the ops of the file that it computes.
        kind: its type in OpenVINO.
        kernel: the name of its kernel, which ends with the type that it computes in.
        seconds: the mean time of a run.
    """

    names: tuple[str, ...]
    kind: str
    kernel: str
    seconds: float


def cases_of() -> list[Case]:
    """Returns the networks that are timed: one for each op and form that OpenVINO may have."""
    return [case for op, form in small_grid() for case in _case(op, form)]


def measure(
    cases: Sequence[Case], progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Measurement], float]:
    """Returns the times of the ops that run in the form that their case wants, and the time of a run besides.

    Args:
        cases: the networks to time.
        progress: called with the number of networks that were timed since the last call.
    """
    times: dict[tuple[OpShape, str], list[float]] = {}
    for case in cases:
        nodes, _ = run_profiled(*case.write_onnx("openvino"))
        for slot in case.slots:
            if (seconds := _seconds(slot, nodes)) is not None:
                times.setdefault((slot.op, slot.form), []).append(seconds)
        progress(1)
    tiny = Case({"": (graphs.stand_alone, OpShape("sigmoid", ((1, 16),), ((1, 16),)))}, FLOAT)
    nodes, whole = run_profiled(*tiny.write_onnx("openvino"))
    per_run = max(whole - sum(node.seconds for node in nodes), 0.0)
    return [Measurement(op, form, statistics.median(all)) for (op, form), all in times.items()], per_run


def run_profiled(model: bytes, inputs: dict[str, tuple[int, ...]]) -> tuple[list[KernelTime], float]:
    """Runs a network and returns its nodes, and the least time of a whole run.

    Args:
        model: the serialized ONNX network.
        inputs: input -> shape.
    """
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", _OPTIONS)
    request = compiled.create_infer_request()
    for name, values in feeds(inputs).items():
        request.set_tensor(name, openvino.Tensor(values))
    whole, spent = np.inf, 0.0
    for number in range(_MOST_RUNS):
        if number >= _LEAST_RUNS and spent > _SECONDS_PER_CASE:
            break
        start = time.perf_counter()
        request.infer()
        seconds = time.perf_counter() - start
        whole, spent = min(whole, seconds), spent + seconds
    names = {node.get_friendly_name(): _names(node) for node in compiled.get_runtime_model().get_ops()}
    return [
        KernelTime(
            names.get(each.node_name) or (each.node_name,),
            each.node_type,
            each.exec_type,
            each.real_time.total_seconds() + _HALF,
        )
        for each in request.profiling_info
        if each.node_type not in _NOT_RUN  # the profile calls less than a microsecond not run
    ], float(whole)


def _names(node: Any) -> tuple[str, ...]:
    info = dict(node.get_rt_info().items())
    names = info.get("originalLayersNames")
    return () if names is None else tuple(name for name in str(names.value).split(",") if name)


def _seconds(slot: Slot, nodes: Sequence[KernelTime]) -> float | None:
    """Returns the time of a slot; None if OpenVINO does not compute it in the form of the slot."""
    if slot.op.kind in ("quantize", "dequantize"):
        return _rounding(slot.op.kind, nodes)
    own = [node for node in nodes if any(name.startswith(slot.prefix) for name in node.names)]
    if not own:
        return None
    integer = any(node.kernel.endswith(("_I8", "_U8", "_i8", "_u8")) for node in own)
    if integer != (slot.form != FLOAT):
        return None
    if slot.op.kind.startswith("conv"):
        return sum(node.seconds for node in own)
    joined = [node for node in own if node.kind in _CONVS]
    plain = [n.seconds for n in nodes if n.kind in _CONVS and n not in own]
    surplus = [node.seconds - statistics.median(plain) for node in joined] if plain else []
    alone = [node.seconds for node in own if node not in joined]
    return max(sum((*surplus, *alone)), _LEAST_SECONDS)


def _rounding(kind: str, nodes: Sequence[KernelTime]) -> float:
    """Returns the time of a change of type between convolutions, of which a kernel may do a part."""
    ends = "_f32_u8_" if kind == "quantize" else "_u8_f32_"
    own = [node.seconds for node in nodes if node.kind == "Reorder" and ends in node.names[0]]
    return statistics.median(own) if own else _LEAST_SECONDS


def _case(op: OpShape, form: str) -> Iterator[Case]:
    """Yields the network of an op; none for a form that OpenVINO does not have."""
    shape = op.inputs[0]
    if op.kind == "conv2d":
        inputs, outputs, side, kernel = shape[1], op.outputs[0][1], op.outputs[0][2], op.weight[-1]
        if op.stride == (1, 1):
            yield conv(form, inputs, outputs, kernel, side, op.groups)
        else:
            yield conv_branches(form, inputs, outputs, kernel, side, op.groups, op.stride[0])
    elif op.kind == "quantize":
        yield boundaries(shape[1], shape[2])
    elif form != INTEGER or op.kind not in FUNCTIONS:  # which it computes in float, also between integers
        between = form == INTEGER and len(shape) == 4 and op.kind not in ("reshape", "transpose")
        yield between_convs(op, form) if between else alone(op, form)
