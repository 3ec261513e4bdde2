"""Observation of a batch: its values join the statistics only when the batch is complete.

Sites whose range a number that stands for infinity spoils, such as a mask that is given at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from qtrace.calibration.base import Watched, range_group
from qtrace.calibration.statistics import Statistics, fresh
from qtrace.errors import CalibrationError
from qtrace.fakequant.base import fold_channels
from qtrace.observers.base import Observer

__all__ = ["LARGE", "Observing", "Values", "read_large", "refuse_spoiled"]


class Observing:
    """Observes the values of a batch by new observers and merges these when the batch is complete.

    A refused batch leaves no trace. Threads would not help: they would pass Python's lock to each other at
    every numpy call, which takes longer than the call.

    Attributes:
        statistics: the statistics of all committed batches.
        nonfinite: the graph outputs that are no sites and hold NaN or infinity in the current batch.
        large: group -> its values that are far larger than all others, for `refuse_spoiled`.

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
        self.large: dict[str, Values] = {}

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
            if observer.largest >= LARGE and (values := read_large(node, value)) is not None:
                earlier = self.large.get(group, values)
                self.large[group] = values if values.near >= earlier.near else earlier

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
    """Returns what to do if NaN or infinity in a refused value is meant; nothing if it is finite."""
    if np.isfinite(value).all():
        return ""
    kind = "NaN" if np.isnan(value).any() else "infinity"
    return f" If the {kind} is meant, no integer stands for it: call prepare with samples that hold it."


LARGE = 1e4  # smaller numbers do not stand for infinity, unless the graph shows it
_GAP = 8.0  # between the numbers that stand for infinity and all others
_LEAST_STEPS = 4.0  # of the grid within the others: fewer than 3 bits


@dataclass(frozen=True)
class Values:
    """The values of a node that are far larger than all others, and these others.

    Attributes:
        node: the name of the node.
        large: the value of the largest magnitude.
        near: the largest magnitude of the others.
    """

    node: str
    large: float
    near: float


def read_large(node: str, value: np.ndarray) -> Values | None:
    """Reads a value that reaches `LARGE`; None if no gap parts its large numbers from the others.

    Zeros do not count: a mask of two numbers needs two integers.
    """
    sizes = np.abs(value)
    largest = float(sizes.max())
    near = float(sizes.max(where=sizes < largest / _GAP, initial=0.0))
    if largest < LARGE or near == 0.0:
        return None
    return Values(node, float(value.flat[int(sizes.argmax())]), near)


def refuse_spoiled(
    values: Mapping[str, Values],
    observers: Mapping[str, Observer],
    places: Mapping[str, str],
    readers: Callable[[str], Iterable[str]],
) -> None:
    """Refuses statistics in which large values leave the others of their site next to no integers.

    Args:
        values: group of sites -> its large values.
        observers: group -> its observer, which chooses the range.
        places: node -> its op and source line.
        readers: returns the results of the ops that write the value of a node or read it as their site.

    Raises:
        CalibrationError: naming the site, its range, the magnitude of the other values, and the cure.
    """
    for group, entry in values.items():
        observer = observers[group]
        if observer.scheme.per_channel:
            continue
        step = float(observer.qparams().scale.max())
        if entry.near >= _LEAST_STEPS * step:
            continue
        lo, hi = (float(end) for end in observer.range())
        place = f", {places[entry.node]}" if entry.node in places else ""
        names = ", ".join(readers(entry.node))
        raise CalibrationError(
            f"site {entry.node}{place}: its range is {lo:.4g} to {hi:.4g} with a step of {step:.3g}, but "
            f"without numbers such as {entry.large:.4g} no value exceeds {entry.near:.3g}. Call prepare with "
            "samples, or give a mask as a constant, so that qtrace reads the number as infinity. "
            f"Or keep the site in float by a rule {{match: {{name: [{names}]}}, quantize: false}}."
        )
