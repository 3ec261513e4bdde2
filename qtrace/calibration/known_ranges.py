"""Plain ranges of prepared graphs of one network: its float graph's are known, others are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.calibration.base import Arguments, EngineError, watched
from qtrace.calibration.choice import reason_against_export
from qtrace.calibration.megengine import MegEngine
from qtrace.calibration.onnxruntime import OnnxRuntime
from qtrace.calibration.statistics import Statistics, fresh, no_statistics
from qtrace.data.batches import evaluating
from qtrace.export.converted.open_axes import SharedAxes
from qtrace.graph.types import TracedModule
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase

__all__ = ["from_ranges", "measure_ranges"]

Ranges = Mapping[str, tuple[float, float]]


def measure_ranges(
    prepared: TracedModule,
    known: Ranges,
    calls: Sequence[Arguments],
    axes: SharedAxes | None = None,
) -> Ranges:
    """Returns the ranges of what a prepared graph observes.

    A node of the float graph has the same values in every prepared graph of the network, however that is
    placed. What only one graph has, such as the pieces of an activation function, is measured in a run of it.

    Args:
        prepared: a prepared graph.
        known: node of the float graph that it was prepared from -> its range.
        calls: the arguments of calls with the images on which these ranges were measured.
        axes: the open axes of the files of the network; None to find them.

    Raises:
        CalibrationError: when a call does not fit the model.
    """
    model = QuantizedModel(prepared, "prepared")
    own = [name for name in watched(model).nodes if name not in known]
    return {**known, **_run(model, own, calls, axes)}


def _run(
    model: QuantizedModel, nodes: Sequence[str], calls: Sequence[Arguments], axes: SharedAxes | None
) -> Ranges:
    """Returns the ranges of ``nodes`` in one run of the calls."""
    ranges: dict[str, tuple[float, float]] = {}
    if not nodes or not calls:
        return ranges

    def observe(node: str, value: Any) -> None:
        array = np.asarray(value if isinstance(value, np.ndarray) else value.numpy())
        low, high = (float(array.min()), float(array.max())) if array.size else (np.nan, np.nan)
        before = ranges.get(node, (low, high))
        ranges[node] = float(np.minimum(before[0], low)), float(np.maximum(before[1], high))

    graph = model.module
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
