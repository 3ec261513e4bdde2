"""Evaluates an op whose values differ between the graph and a runtime again, to see which side is wrong.

Graph and runtime compute an op from the same integers, so one of them is wrong where they differ. It may be
the graph: some of MegEngine's kernels give wrong values for batches of several samples. The op is
therefore evaluated again: by MegEngine for each sample by itself, and by ONNX's reference evaluator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qtrace.comparing.sums import errors_of
from qtrace.errors import ExportError
from qtrace.export.onnx.segment import segment_model
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.failures import short
from qtrace.graph.nonfinite import SWALLOWS_NAN
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.graph.walk import op_label, owner
from qtrace.numerics import quantize
from qtrace.onnxfile.local_session import SessionError, SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.scheme import QParams
from qtrace.verification.crosscheck._segment import Arguments, Recording, RuntimeValues, Segment, Split
from qtrace.verification.tallies import CrossCheck

__all__ = ["Disagreement", "RuntimeValues", "cross_check"]

# A second evaluation agrees with a side when at least this share of the compared values is near that side's.
_AGREEMENT_SHARE = 0.9
# Values are compared where the two sides differ by more than this share of their largest difference.
_COMPARED_SHARE = 0.1
# A value is near a side's value when its distance is at most this share of that between the two sides.
_NEAR_SHARE = 0.25
# Two evaluations of an op in float32 differ by less than this share of its largest value.
_FLOAT_NOISE_SHARE = 1e-3

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
    return bool(np.abs(errors_of(together, alone)).max(initial=0.0) > _FLOAT_NOISE_SHARE * largest)


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
