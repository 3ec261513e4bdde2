"""Finds who is to blame for a difference: an op is evaluated a second time.

Graph and runtime compute an op from the same integers, so one of them is wrong where they differ. It may be
the graph: some of MegEngine's kernels give wrong values for batches of several samples. The op is
therefore evaluated again: by MegEngine for each sample by itself, and by ONNX's reference evaluator.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.comparing.sums import errors_of
from qtrace.data.batches import first_samples
from qtrace.errors import ExportError, QtraceError
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.differences import NETWORK_RTOL
from qtrace.graph.failures import short
from qtrace.graph.interpreter import ENGINE_ERRORS, Interpreter
from qtrace.graph.nonfinite import SWALLOWS_NAN
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label, owner
from qtrace.numerics import dequantize, quantize
from qtrace.onnxfile.kernels import products_saturate
from qtrace.onnxfile.local_session import SessionError, SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.worker import describe_machine
from qtrace.scheme import QParams
from qtrace.verification.selections import FirstOfEquals
from qtrace.verification.tallies import CrossCheck

# Names the likely cause of an op whose integers differ between the graph and a runtime.

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
    flags = set((side or describe_machine())["flags"])
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


# Evaluates an op whose values differ between the graph and a runtime again, to see which side is wrong.

_NO_AXIS = -1
# The exceptions of MegEngine and the interpreter for shapes that a graph does not take.
_SHAPE_ERRORS = (QtraceError, *ENGINE_ERRORS)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RuntimeValues:
    """The integers of a runtime for a batch, dequantized, by the names of the graph's nodes.

    Attributes:
        names: node -> the name under which the runtime returns the node's integers.
        integers: name -> integers.
        qparams: node -> the parameters of the node's integers.
    """

    names: Mapping[str, str]
    integers: Mapping[str, np.ndarray]
    qparams: Mapping[str, QParams]

    def __contains__(self, node: str) -> bool:
        return node in self.names

    def __getitem__(self, node: str) -> np.ndarray:
        return dequantize(self.integers[self.names[node]], self.qparams[node])


@dataclass(frozen=True)
class Split:
    """How the values of a batch fall into samples.

    Attributes:
        count: the number of samples.
        axes: node -> the axis of its samples; None where all samples share the value.
    """

    count: int
    axes: Mapping[Node, int | None]

    def sample(self, value: np.ndarray, node: Node, number: int) -> np.ndarray:
        """Returns sample ``number`` of the value of ``node``."""
        axis = self.axes[node]
        return value if axis is None else np.split(value, self.count, axis)[number]

    def joins(self, node: Node) -> bool:
        """Whether the value of the batch consists of the values of its samples."""
        return self.axes[node] != _NO_AXIS

    def join(self, values: Sequence[np.ndarray], node: Node) -> np.ndarray:
        """Joins the values of the samples to the value of the batch."""
        axis = self.axes[node]
        return values[0] if axis is None else np.concatenate(values, axis)


@dataclass(frozen=True)
class Segment:
    """The exprs that compute one node from values that graph and runtime share.

    Attributes:
        model: the converted module.
        target: the node.
        exprs: the exprs, in graph order.
        sources: the nodes outside of the segment that the exprs read.
    """

    model: TracedModule
    target: TensorNode
    exprs: tuple[Expr, ...]
    sources: tuple[TensorNode, ...]

    @classmethod
    def ending_at(cls, model: TracedModule, name: str, values: RuntimeValues) -> Segment:
        """Returns the segment that computes the node ``name``."""
        inputs, order = {node: node for node in model.graph.inputs}, exprs(model)
        target = next(n for n in (*(n for e in order for n in e.outputs), *inputs.values()) if n.name == name)
        needed, segment, sources = {target}, [], {}
        for expr in reversed(order):
            if not any(node in needed for node in expr.outputs):
                continue
            segment.append(expr)
            for node in expr.inputs:
                if isinstance(node, TensorNode) and (node in inputs or node.name in values):
                    sources[node] = node
                else:
                    needed.add(node)
        if not segment:
            sources = {target: target}
        return cls(model, target, tuple(reversed(segment)), tuple(sources.values()))

    def input_values(self, arguments: Arguments, values: RuntimeValues) -> dict[Node, np.ndarray]:
        """Returns the value of each source: the runtime's integers, dequantized, or an input of the graph."""
        _, bound = Interpreter(self.model).bind(*arguments)
        inputs = dict(zip(self.model.graph.inputs, bound, strict=True))
        return {
            node: values[node.name] if node.name in values else inputs[node].numpy() for node in self.sources
        }

    def split(self, arguments: Arguments, values: Mapping[Node, np.ndarray]) -> Split | None:
        """Splits the batch into samples; None if there are none, or the graph takes no single sample."""
        first = first_samples(arguments, 1)
        if first is None:
            return None
        _, (_, leading, *_) = Interpreter(self.model).bind(*arguments)
        count, shapes = int(leading.shape[0]), _Shapes(self.model)
        try:
            shapes.run(*first[0], **first[1])
            batch = {node: value.shape for node, value in {**values, **self.evaluate(values)}.items()}
        except _SHAPE_ERRORS:
            return None
        axes = {node: _sample_axis(shape, shapes.shapes[node.name], count) for node, shape in batch.items()}
        split = Split(count, axes)
        return split if all(split.joins(node) for node in (*self.sources, self.target)) else None

    @property
    def computed(self) -> tuple[TensorNode, ...]:
        """The tensors that the exprs compute, in graph order."""
        return tuple(n for e in self.exprs for n in e.outputs if isinstance(n, TensorNode))

    def evaluate(self, inputs: Mapping[Node, np.ndarray]) -> dict[Node, np.ndarray]:
        """Computes the segment in MegEngine; returns node -> value without the inputs."""
        values: dict[Node, Any] = {key: Tensor(value) for key, value in inputs.items()}
        values[self.model.graph.inputs[0]] = self.model
        ranking = FirstOfEquals(self.model)
        for expr in self.exprs:
            results = ranking.run_expr(expr, [values[node] for node in expr.inputs]) or ()
            computed = zip(expr.outputs, results, strict=True)
            values.update((node, value) for node, value in computed if node not in inputs)
        return {node: values[node].numpy() for node in self.computed if node not in inputs}


class _Shapes(Interpreter):
    """Records the shape of every tensor."""

    def __init__(self, model: TracedModule) -> None:
        super().__init__(model)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Records the shape of ``value``."""
        if isinstance(node, TensorNode):
            self.shapes[node.name] = tuple(int(n) for n in value.shape)
        return value


def _sample_axis(batch: Sequence[int], sample: Sequence[int], count: int) -> int | None:
    """Finds the axis along which ``count`` values of shape ``sample`` make up the shape ``batch``.

    Returns:
        The axis; None if both shapes are the same, `_NO_AXIS` if there is no such axis.
    """
    if tuple(batch) == tuple(sample):
        return None
    axes = [i for i, (a, b) in enumerate(zip(batch, sample, strict=False)) if a != b]
    fits = len(batch) == len(sample) and len(axes) == 1 and batch[axes[0]] == count * sample[axes[0]]
    return axes[0] if fits else _NO_AXIS


class Recording(FirstOfEquals):
    """Runs the whole graph on the runtime's integers and keeps the values of a segment.

    Only this run shows a kernel that is wrong for some memory layouts: an op by itself may read another.
    """

    def __init__(self, segment: Segment, values: RuntimeValues) -> None:
        super().__init__(segment.model)
        self.values, self.nodes = values, set(segment.computed)
        self.recorded: dict[Node, Any] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the value of a node of the segment; replaces the graph's integers by the runtime's."""
        if node in self.nodes:
            self.recorded[node] = value
        return type(value)(self.values[node.name]) if node.name in self.values else value

    def record(self, arguments: Arguments) -> dict[Node, np.ndarray]:
        """Runs the batch; returns node -> value for the nodes of the segment."""
        self.run(*arguments[0], **arguments[1])
        return {key: value.numpy() for key, value in self.recorded.items()}


# A second evaluation agrees with a side when at least this share of the compared values is near that side's.
_AGREEMENT_SHARE = 0.9
# Values are compared where the two sides differ by more than this share of their largest difference.
_COMPARED_SHARE = 0.1
# A value is near a side's value when its distance is at most this share of that between the two sides.
_NEAR_SHARE = 0.25

_REMEDY = "use batches of one sample, or write this op in another way"


@dataclass(frozen=True)
class Disagreement:
    """The values of a node at which graph and runtime differ.

    Attributes:
        node: the name of the node.
        graph: the graph's values: integers, or floats where ``qparams`` is None.
        runtime: the runtime's values, of the same shape.
        qparams: the parameters of the integers; None for a node in float.
    """

    node: str
    graph: np.ndarray
    runtime: np.ndarray
    qparams: QParams | None = None

    def side_of(self, value: np.ndarray) -> str:
        """Returns which side a second evaluation agrees with: "graph", "runtime" or "neither".

        Args:
            value: the node's floats in the second evaluation.
        """
        value = value if self.qparams is None else quantize(value, self.qparams)
        if value.shape != self.graph.shape:
            return "neither"
        distance = np.abs(errors_of(self.graph, self.runtime))
        infinite = np.isinf(distance)
        compared = infinite if infinite.any() else distance > _COMPARED_SHARE * distance.max(initial=0.0)
        limit = np.minimum(_NEAR_SHARE * distance[compared], np.finfo(np.float64).max)
        for side, values in (("graph", self.graph), ("runtime", self.runtime)):
            if np.mean(np.abs(errors_of(value, values))[compared] <= limit) >= _AGREEMENT_SHARE:
                return side
        return "neither"


def cross_check(
    converted: TracedModule, arguments: Arguments, values: RuntimeValues, disagreement: Disagreement
) -> CrossCheck:
    """Evaluates an op again and returns which side of a disagreement is wrong.

    Args:
        converted: the converted module, in eval mode.
        arguments: the batch, as ``qtrace.data.batches.as_arguments`` gives it.
        values: the runtime's integers of the batch.
        disagreement: the first node, in graph order, that differs.
    """
    segment = Segment.ending_at(converted, disagreement.node, values)
    inputs = segment.input_values(arguments, values)
    split = segment.split(arguments, inputs)
    in_graph = Recording(segment, values).record(arguments)
    alone, op = _evaluate_alone(segment, inputs, split, in_graph, disagreement)
    where = "by itself" if split is None else f"for each of the {split.count} samples of the batch alone"
    blame = f"MegEngine computes {op} differently in this batch and {where}"
    if alone == "runtime":
        return CrossCheck("graph", f"{blame}, and the runtime has the values of the latter: {_REMEDY}")
    verdict, evaluator = _evaluate_in_onnx(segment, inputs, split, disagreement)
    if verdict == "graph":
        return CrossCheck("runtime", f"the op, exported anew, gives the graph's values in {evaluator}")
    if verdict == "runtime" and alone == "neither":
        return CrossCheck("graph", f"{blame}, and {evaluator} gives the runtime's values: {_REMEDY}")
    if verdict == "runtime" and np.isnan(disagreement.runtime).any() > np.isnan(disagreement.graph).any():
        return CrossCheck("graph", f"{op_label(segment.target.expr)} {SWALLOWS_NAN}")
    same = f"MegEngine gives the graph's values {where}, too; " if alone == "graph" else ""
    if verdict == "runtime":
        return CrossCheck(
            "unknown",
            f"{same}the op, exported anew, gives the runtime's values in {evaluator}: the file is as qtrace "
            "writes it, and either MegEngine's kernel or the rule that exports the op is wrong",
        )
    if verdict == "neither":
        return CrossCheck("unknown", f"{same}the op, exported anew, gives other values still in {evaluator}")
    return CrossCheck("unknown", f"{same}it could not be evaluated outside of MegEngine: {verdict}")


def _evaluate_alone(
    segment: Segment,
    inputs: Mapping[Node, np.ndarray],
    split: Split | None,
    in_graph: Mapping[Node, np.ndarray],
    disagreement: Disagreement,
) -> tuple[str, str]:
    """Evaluates the segment in MegEngine, for each sample by itself if the batch falls into samples.

    Returns:
        The side that the evaluation agrees with, as `Disagreement.side_of` gives it, and the label of the
        first op whose values differ from those in the whole graph.
    """
    if split is None:
        alone = segment.evaluate(inputs)
    else:
        samples = [
            segment.evaluate({key: split.sample(value, key, number) for key, value in inputs.items()})
            for number in range(split.count)
        ]
        alone = {
            key: split.join([sample[key] for sample in samples], key)
            for key in samples[0]
            if split.joins(key)
        }
    changed = (
        f"{op_label(expr)} ({node.name})"
        for expr in segment.exprs
        for node in expr.outputs
        if node in alone and _changed(in_graph[node], alone[node])
    )
    last = segment.exprs[-1] if segment.exprs else segment.target.expr
    op = next(changed, f"{op_label(last)} ({segment.target.name})")
    value = alone[segment.target] if segment.exprs else inputs[segment.target]
    return disagreement.side_of(value), op


def _changed(together: np.ndarray, alone: np.ndarray) -> bool:
    """Whether two evaluations in float32 differ by more than the order of sums explains."""
    largest = np.abs(np.nan_to_num(together)).max(initial=0.0)
    return bool(np.abs(errors_of(together, alone)).max(initial=0.0) > NETWORK_RTOL * largest)


def _evaluate_in_onnx(
    segment: Segment, inputs: Mapping[Node, np.ndarray], split: Split | None, disagreement: Disagreement
) -> tuple[str, str]:
    """Evaluates the segment as an ONNX model: on the batch, or on the sample in it that differs most.

    Returns:
        The side that the evaluation agrees with, as `Disagreement.side_of` gives it, or why there is none;
        and the name of the evaluator.
    """
    values = dict(inputs)
    if split is not None and (axis := split.axes[segment.target]) is not None:
        distances = np.split(np.abs(errors_of(disagreement.graph, disagreement.runtime)), split.count, axis)
        worst = int(np.argmax([piece.max(initial=0.0) for piece in distances]))
        values = {key: split.sample(value, key, worst) for key, value in inputs.items()}
        graph, runtime = (
            split.sample(batch, segment.target, worst) for batch in (disagreement.graph, disagreement.runtime)
        )
        disagreement = replace(disagreement, graph=graph, runtime=runtime)
    steps, output = segment.exprs, segment.target
    if steps and isinstance(owner(steps[-1]), FakeQuant):  # numpy rounds instead
        output = next(node for node in steps[-1].inputs if isinstance(node, TensorNode))
        steps = steps[:-1]
    if output in values:
        return disagreement.side_of(values[output]), "numpy"
    sources = {node: values[node] for node in segment.sources}
    try:
        from qtrace.export.onnx.segment import segment_model  # here: it needs the package onnx

        data, names = segment_model(segment.model, steps, sources, output)
    except ExportError as error:
        return str(error).rstrip("."), ""
    feeds = dict(zip(names, sources.values(), strict=True))
    reasons = []
    for evaluator, run in (("onnx.reference", _run_reference), ("onnxruntime", _run_onnxruntime)):
        try:
            value = run(data, feeds)
        except ExportError as error:
            reasons.append(f"{evaluator} refuses it ({error})")
        else:
            return disagreement.side_of(value), evaluator
    return "; ".join(reasons), ""


def _run_reference(data: bytes, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    try:
        results: Any = ReferenceEvaluator(data).run(None, dict(feeds))
    except Exception as error:  # its ops are Python functions that raise whatever numpy raises
        raise ExportError(short(error)) from error
    return np.asarray(results[0])


def _run_onnxruntime(data: bytes, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    try:
        return np.asarray(open_session(data, SessionSettings(optimize=False)).run(None, feeds)[0])
    except SessionError as error:
        raise ExportError(error.reason) from error
