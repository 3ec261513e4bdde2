"""Observing the values of a batch, and putting together what was seen when the batch is whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qtrace.calibration.base import Watched
from qtrace.calibration.statistics import Statistics, arrays, checksum, fresh
from qtrace.errors import CalibrationError
from qtrace.fakequant.base import fold_channels
from qtrace.observers.base import Observer

__all__ = ["Observing"]


class Observing:
    """Shows values to observers of their own and puts these together when a batch is whole.

    A batch that is refused leaves no trace. Threads are no help here: they would hand Python's lock to each
    other at every call of numpy's, which takes longer than the call.

    Attributes:
        statistics: with all batches that were committed.
        nonfinite: the graph outputs that are no sites and hold NaN or infinity in the present batch.

    Args:
        statistics: what is added to.
        watched: what is observed.
        sites: group -> the name of its site, for errors.
        places: node -> its op and the line of it, for errors.
    """

    def __init__(
        self, statistics: Statistics, watched: Watched, sites: Mapping[str, str], places: Mapping[str, str]
    ) -> None:
        self.statistics, self._watched, self._sites = statistics, watched, sites
        self._places = places
        self._seen: dict[str, list[Observer]] = {}
        self._batch = self._checksum = 0
        self.nonfinite: list[str] = []

    def begin(self, number: int, batch: Any) -> None:
        """Begins a batch; what was observed since the last `commit` is dropped.

        Raises:
            CalibrationError: when an observer refuses a parameter, naming site and batch.
        """
        self._seen, self.nonfinite = {}, []
        self._batch, self._checksum = number, checksum(arrays(batch))
        for group, value in self._watched.constants:
            self._observe(group, value)

    def observe(self, node: str, value: np.ndarray) -> None:
        """Takes the value of a node for all its groups; of an output without a group, whether it is finite.

        Raises:
            CalibrationError: when an observer refuses it, naming site, batch, op and line.
        """
        groups = self._watched.nodes[node]
        if not groups and not np.isfinite(value).all():
            self.nonfinite.append(node)
        for group in groups:
            try:
                self._observe(group, fold_channels(value, self._watched.folded.get(group, ())))
            except CalibrationError as error:
                place = self._places.get(node)
                raise CalibrationError(f"{error} The value is {place}." if place else str(error)) from error

    def commit(self) -> None:
        """Ends the batch: adds it to the statistics."""
        # One assignment: whatever interrupts it, the statistics hold whole batches.
        self.statistics = self.statistics.plus(self._seen, {self._batch: self._checksum})
        self._seen = {}

    def _observe(self, group: str, value: np.ndarray) -> None:
        observer = fresh(self.statistics.observers[group])
        observer.observe(value, batch=self._batch, site=self._sites[group])
        self._seen.setdefault(group, []).append(observer)
