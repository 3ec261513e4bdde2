"""Observation of a batch: its values join the statistics only when the batch is complete."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qtrace.calibration.base import Watched, range_group
from qtrace.calibration.spoiled import FAR, Values, read_far
from qtrace.calibration.statistics import Statistics, fresh
from qtrace.errors import CalibrationError
from qtrace.fakequant.base import fold_channels
from qtrace.observers.base import Observer

__all__ = ["Observing"]


class Observing:
    """Observes the values of a batch by new observers and merges these when the batch is complete.

    A refused batch leaves no trace. Threads would not help: they would pass Python's lock to each other at
    every numpy call, which takes longer than the call.

    Attributes:
        statistics: the statistics of all committed batches.
        nonfinite: the graph outputs that are no sites and hold NaN or infinity in the current batch.
        far: group -> its values that are far from all others, for `refuse_spoiled`.

    Args:
        statistics: the statistics to add to.
        watched: the nodes and parameters that are observed.
        sites: group -> the name of its site, for errors.
        places: node -> its op and source line, for errors.
    """

    def __init__(
        self, statistics: Statistics, watched: Watched, sites: Mapping[str, str], places: Mapping[str, str]
    ) -> None:
        self.statistics, self._watched, self._sites = statistics, watched, sites
        self._places = places
        self._observed: dict[str, list[Observer]] = {}
        self._batch = self._checksum = 0
        self.nonfinite: list[str] = []
        self.far: dict[str, Values] = {}

    def begin(self, number: int, checksum: int) -> None:
        """Begins a batch; what was observed since the last `commit` is dropped.

        Args:
            number: the number of the batch.
            checksum: the checksum of its arrays.

        Raises:
            CalibrationError: when an observer refuses a parameter, naming site and batch.
        """
        self._observed, self.nonfinite = {}, []
        self._batch, self._checksum = number, checksum
        for group, value in self._watched.constants:
            self._observe(group, value)

    def observe(self, node: str, value: np.ndarray) -> None:
        """Observes the value of a node for all its groups; an output without a group must be finite.

        Raises:
            CalibrationError: when an observer refuses the value; it names site, batch, op and line.
        """
        groups = self._watched.nodes[node]
        if node in self._watched.ends and not np.isfinite(value).all():
            self.nonfinite.append(node)
        for group in groups:
            if group == range_group(node):
                self._observe_range(group, value)
                continue
            try:
                observer = self._observe(group, fold_channels(value, self._watched.folded.get(group, ())))
            except CalibrationError as error:
                place = self._places.get(node)
                text = f"{error} The value is {place}." if place else str(error)
                raise CalibrationError(text + _meant(value)) from error
            if observer.largest >= FAR and (values := read_far(node, value)) is not None:
                earlier = self.far.get(group, values)
                self.far[group] = values if values.near >= earlier.near else earlier

    def commit(self) -> None:
        """Adds the batch to the statistics."""
        # One assignment: after an interruption the statistics still hold complete batches only.
        self.statistics = self.statistics.plus(self._observed, {self._batch: self._checksum})
        self._observed = {}

    def _observe_range(self, group: str, value: np.ndarray) -> None:
        """Observes the range of a node in float; what is not finite counts as the largest number."""
        if value.size:
            most = float(np.finfo(np.float32).max)
            self._observe(group, np.nan_to_num(value, nan=most, posinf=most, neginf=-most))

    def _observe(self, group: str, value: np.ndarray) -> Observer:
        observer = fresh(self.statistics.observers[group])
        observer.observe(value, batch=self._batch, site=self._sites.get(group, group))
        self._observed.setdefault(group, []).append(observer)
        return observer


def _meant(value: np.ndarray) -> str:
    """Returns what to do if infinity in a refused value is meant; nothing if it is NaN or finite."""
    if np.isnan(value).any() or np.isfinite(value).all():
        return ""
    return (
        " If the infinity is meant, as in a mask, call prepare with samples, or give the mask as a constant."
    )
