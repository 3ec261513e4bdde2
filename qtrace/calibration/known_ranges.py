"""Statistics of plain ranges that were measured before, so that no batch runs for them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qtrace.calibration.base import watched
from qtrace.calibration.statistics import Statistics, fresh, no_statistics
from qtrace.graph.types import TracedModule
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from qtrace.preparation.model import QuantizedModel

__all__ = ["from_ranges"]


def from_ranges(prepared: TracedModule, ranges: Mapping[str, tuple[float, float]]) -> Statistics | None:
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
