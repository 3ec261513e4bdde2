"""Plain ranges of several prepared graphs of one network, which are measured in one run of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.calibration.base import Watched, watched
from qtrace.calibration.choice import choose_engine
from qtrace.calibration.statistics import Statistics, fresh, no_statistics
from qtrace.data.batches import as_arguments, evaluating
from qtrace.graph.types import TracedModule
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase

__all__ = ["from_ranges", "measure_ranges"]

Ranges = Mapping[str, tuple[float, float]]


def measure_ranges(
    in_float: TracedModule, others: Iterable[TracedModule], batches: Sequence[Any]
) -> dict[str, tuple[float, float]]:
    """Returns the ranges of the activations that prepared graphs observe, as far as they are in the first.

    Args:
        in_float: a prepared graph, which runs.
        others: prepared graphs of the same network.
        batches: batches as for `qtrace.calibrate`.

    Raises:
        CalibrationError: when a batch does not fit the model.
    """
    model = QuantizedModel(in_float, "prepared")
    names = {name for other in others for name in watched(QuantizedModel(other, "prepared")).nodes}
    nodes: dict[str, tuple[str, ...]] = {name: (name,) for name in model.nodes if name in names}
    ranges: dict[str, tuple[float, float]] = {}

    def observe(node: str, value: Any) -> None:
        array = np.asarray(value if isinstance(value, np.ndarray) else value.numpy())
        low, high = (float(array.min()), float(array.max())) if array.size else (np.nan, np.nan)
        before = ranges.get(node, (low, high))
        ranges[node] = float(np.minimum(before[0], low)), float(np.maximum(before[1], high))

    calls = [as_arguments(batch, in_float, index) for index, batch in enumerate(batches)]
    if nodes and calls:
        with in_phase(in_float, "float"), evaluating(in_float):
            engine = choose_engine(model, Watched(nodes, (), (), {}), "auto", len(calls), first=calls[0])
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
