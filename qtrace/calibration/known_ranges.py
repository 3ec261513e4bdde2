"""Plain ranges of several prepared graphs of one network, which are measured in one run of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.calibration.base import EngineError, watched
from qtrace.calibration.choice import reason_against_export
from qtrace.calibration.megengine import MegEngine
from qtrace.calibration.onnxruntime import OnnxRuntime
from qtrace.calibration.statistics import Statistics, fresh, no_statistics
from qtrace.data.batches import as_arguments, evaluating
from qtrace.export.converted.open_axes import SharedAxes
from qtrace.graph.types import TracedModule
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase

__all__ = ["from_ranges", "measure_ranges"]

Ranges = Mapping[str, tuple[float, float]]


def measure_ranges(
    in_float: TracedModule,
    graphs: Iterable[TracedModule],
    batches: Sequence[Any],
    axes: SharedAxes | None = None,
) -> list[dict[str, tuple[float, float]]]:
    """Returns for each of several prepared graphs of one network the ranges of what it observes.

    A node of the graph in float has the same values in each, and is measured once. What a graph has alone,
    such as the pieces of an activation function, is measured in a run of that graph: elsewhere, their names
    are those of other functions.

    Args:
        in_float: the prepared graph that has all ops in float.
        graphs: prepared graphs of the network.
        batches: batches as for `qtrace.calibrate`.
        axes: the open axes of the files of the network; None to find them.

    Raises:
        CalibrationError: when a batch does not fit the model.
    """
    first, models = QuantizedModel(in_float, "prepared"), [QuantizedModel(g, "prepared") for g in graphs]
    needed = [dict.fromkeys(watched(model).nodes) for model in models]
    shared = [name for name in first.nodes if any(name in names for names in needed)]
    ranges = _run(first, shared, batches, axes)
    results = []
    for model, names in zip(models, needed, strict=True):
        own = [name for name in names if name not in ranges]
        results.append({**ranges, **_run(model, own, batches, axes)})
    return results


def _run(
    model: QuantizedModel, nodes: Sequence[str], batches: Sequence[Any], axes: SharedAxes | None
) -> dict[str, tuple[float, float]]:
    """Returns the ranges of ``nodes`` in one run of the batches."""
    ranges: dict[str, tuple[float, float]] = {}
    if not nodes or not batches:
        return ranges

    def observe(node: str, value: Any) -> None:
        array = np.asarray(value if isinstance(value, np.ndarray) else value.numpy())
        low, high = (float(array.min()), float(array.max())) if array.size else (np.nan, np.nan)
        before = ranges.get(node, (low, high))
        ranges[node] = float(np.minimum(before[0], low)), float(np.maximum(before[1], high))

    graph = model.module
    calls = [as_arguments(batch, graph, index) for index, batch in enumerate(batches)]
    with in_phase(graph, "float"), evaluating(graph):
        if not reason_against_export(model, len(calls), calls[0]):
            # Files of the graphs run in onnxruntime, too: its values are not compared with MegEngine's.
            try:
                fast = OnnxRuntime(graph, nodes, axes=axes)
                for index, arguments in enumerate(calls):
                    fast.run(arguments, index, observe)
                return ranges
            except EngineError:
                ranges.clear()
        engine = MegEngine(graph, nodes)
        for index, arguments in enumerate(calls):
            engine.run(arguments, index, observe)
    return ranges


def from_ranges(prepared: TracedModule, ranges: Ranges) -> Statistics | None:
    """Returns the statistics of activations whose ranges are known.

    Args:
        prepared: a prepared graph.
        ranges: name of a node -> its smallest and largest value.

    Returns:
        The statistics; None where ranges are not all that the observers need, or one is missing.
    """
    model = QuantizedModel(prepared, "prepared")
    statistics, observed = no_statistics(model), watched(model)
    values = [(group, ranges.get(node)) for node, groups in observed.nodes.items() for group in groups]
    if observed.folded or any(ends is None or not np.isfinite(ends).all() for _, ends in values):
        return None
    known = [(group, np.array(ends, np.float32)) for group, ends in values]
    observers: dict[str, list[Observer]] = {}
    for group, value in (*known, *observed.constants):
        observer = fresh(statistics.observers[group])
        if type(observer) is not MinMax or observer.scheme.axis is not None:
            return None
        observer.observe(value)
        observers.setdefault(group, []).append(observer)
    return statistics.plus(observers, {0: 0})
