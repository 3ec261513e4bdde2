"""What the three runs of each batch add up: the figures of sites, of outputs and of their column groups.

A batch runs in float, each site by itself, and quantized. All sums are in numpy and float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.comparing.groups import find_groups
from qtrace.comparing.selections import SelectedShares, TapedRun
from qtrace.comparing.sums import ErrorSums, GroupedErrors, GroupFigures, column_errors, comparable
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.inspection.comparison.report import GroupComparison, Histogram, OutputComparison
from qtrace.numerics import dequantize, quantize
from qtrace.observers.mse import MeanSquaredError
from qtrace.observers.statistics import origin_of
from qtrace.preparation.model import QuantizedModel, QuantizedSite
from qtrace.scheme import QParams, QScheme

_FIRST_BATCHES = 8  # that show the ranges of columns


class SiteTally:
    """The sums of one site of activations.

    Args:
        name: the name of the site.
        qparams: the parameters of the site.
    """

    def __init__(self, name: str, qparams: QParams) -> None:
        self.name, self.qparams = name, qparams
        self.total, self.own, self.inherited = ErrorSums(), ErrorSums(), ErrorSums()
        self.values = self.clipped = self.unequal = 0
        self.lowest, self.highest = qparams.scheme.qmax, qparams.scheme.qmin
        # The distribution covers the whole tensor, also if its parameters are per channel.
        self.distribution = MeanSquaredError(_per_tensor(qparams.scheme))

    def add(self, reference: np.ndarray, own: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Adds one batch, unless a selection (NMS, a mask) keeps other rows.

        Args:
            reference: the float graph's value.
            own: the rounded value of the site with everything before it in float.
            before, after: the quantized graph's value, unrounded and rounded.
        """
        if reference.shape == own.shape:
            self.own.add(reference, own)
        if reference.shape == own.shape == after.shape:
            self.total.add(reference, after)
            self.inherited.add(own, after)
        else:
            self.unequal += 1
        self.distribution.observe(reference, site=self.name)
        integers = quantize(before, self.qparams)
        self.lowest = min(self.lowest, int(integers.min()))
        self.highest = max(self.highest, int(integers.max()))
        self.values += before.size
        self.clipped += clipped(before, integers, self.qparams)

    @property
    def used(self) -> float:
        """The share of the integers' range between the smallest and the largest that occurred."""
        scheme = self.qparams.scheme
        return max(self.highest - self.lowest, 0) / (scheme.qmax - scheme.qmin)

    def histogram(self, bins: int = 128) -> Histogram:
        """The distribution in about ``bins`` bins."""
        state = self.distribution.state_dict()
        counts = np.asarray(state["counts"])[0]
        occupied = int(np.flatnonzero(counts)[-1]) + 1
        group = max(1, -(-occupied // bins))
        padded = np.pad(counts[:occupied], (0, -occupied % group)).reshape(-1, group).sum(axis=1)
        width = float(np.ldexp(1.0, int(np.asarray(state["exponent"])[0])))
        origin = origin_of(np.asarray(state["lo"]), np.asarray(state["exponent"]))
        lo, hi = range_of(self.qparams)
        step = float(np.max(self.qparams.scale))
        return Histogram(float(origin[0]) * width, width * group, tuple(int(c) for c in padded), lo, hi, step)


def clipped(values: np.ndarray, integers: np.ndarray, qparams: QParams) -> int:
    """Counts the values that lie outside the range of the integers by more than rounding."""
    scheme = qparams.scheme
    ends = (integers == scheme.qmin) | (integers == scheme.qmax)
    if not ends.any():
        return 0
    scale = qparams.scale
    if scale.ndim:
        shape = [1] * values.ndim
        shape[scheme.axis or 0] = -1
        scale = scale.reshape(shape)
    return int(np.count_nonzero(np.abs(values - dequantize(integers, qparams)) > 0.5000001 * scale))


def range_of(qparams: QParams) -> tuple[float, float]:
    """The smallest and the largest value that integers with these parameters stand for, over all channels."""
    scheme, zero_point = qparams.scheme, qparams.zero_point.astype(np.float64)
    lo, hi = ((end - zero_point) * qparams.scale for end in (scheme.qmin, scheme.qmax))
    return float(np.min(lo)), float(np.max(hi))


def _per_tensor(scheme: QScheme) -> QScheme:
    return scheme.replace(axis=None) if scheme.per_channel else scheme


class OutputTallies:
    """The sums of all outputs of a graph.

    Column groups are those that the first batches show, which are kept until there are enough of them.

    Args:
        model: the quantized graph.
        selected: the shares of right rows, which the owner adds up.
    """

    def __init__(self, model: QuantizedModel, selected: SelectedShares) -> None:
        self.model, self.selected = model, selected
        self.equal: list[int] = []  # for each output of integers, the values that are float's
        self.integers: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.sums: list[ErrorSums] = []
        self.unequal: list[int] = []  # for each output, the batches with other rows
        self._first: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        self._errors: GroupedErrors | None = None

    def add(self, reference: list[np.ndarray], test: list[np.ndarray]) -> None:
        """Adds one batch.

        Args:
            reference: the float values of every output.
            test: the quantized graph's values.
        """
        for index, (f, q) in enumerate(zip(reference, test, strict=True)):
            if index == len(self.sums):
                self.shapes.append(f.shape[1:])
                self.sums.append(ErrorSums())
                self.unequal.append(0)
                self.equal.append(0)
                self.integers.append(0)
            if comparable(f, q):
                self.sums[index].add(f, q, classes=f.ndim == 2)
            elif f.shape == q.shape:
                self.equal[index] += int((f == q).sum())
                self.integers[index] += f.size
            self.unequal[index] += f.shape != q.shape
        if self._errors is not None:
            self._errors.add(reference, test)
            return
        self._first.append((reference, test))
        if len(self._first) == _FIRST_BATCHES:
            self._errors = self._add_first()

    def _add_first(self) -> GroupedErrors:
        """Finds the column groups, and adds the batches that were kept."""
        reference, test = ([batch[side] for batch in self._first] for side in (0, 1))
        self._first.clear()
        return column_errors(reference, test, find_groups(self.model.module, reference))

    def result(self) -> tuple[OutputComparison, ...]:
        """Returns the error of each output; no more batches can be added then."""
        if self._errors is None:
            self._errors = self._add_first()
        errors = self._errors.errors()
        return tuple(
            self._output(index, [e for e in errors if e.group.output == index])
            for index in range(len(self.sums))
        )

    def _output(self, index: int, errors: Sequence[GroupFigures]) -> OutputComparison:
        shape, sums, unequal = self.shapes[index], self.sums[index], self.unequal[index]
        share = self.selected.output(index)
        if unequal and not sums.values:
            return OutputComparison(index, shape, math.nan, math.nan, None, unequal, selected=share)
        if sums.values and not sums.signal and share == 0.0:
            return OutputComparison(
                index, shape, -math.inf, math.nan, None, unequal, informative=False, selected=share
            )
        equal = self.equal[index] / self.integers[index] if self.integers[index] else None
        worst = min((e.sqnr_db for e in errors), default=sums.sqnr_db)
        groups = tuple(
            GroupComparison(e.group.place, e.group.axis, e.group.runs, e.sqnr_db, e.informative)
            for e in errors
            if e.group.axis is not None
        )
        informative = all(e.informative for e in errors)
        return OutputComparison(
            index, shape, worst, sums.cosine, sums.agreement, unequal, groups, informative, equal, share
        )


class _SiteRun(TapedRun):
    """Runs a graph with the selections of another run, and keeps its outputs."""

    def __init__(
        self, model: TracedModule, sites: Mapping[str, QuantizedSite], places: Sequence[np.ndarray] | None
    ) -> None:
        super().__init__(model, places)
        self.before: dict[str, list[str]] = {}  # node -> the sites that round it
        for site in sites.values():
            self.before.setdefault(site.node.name, []).append(site.name)
        self.after = {s.value.name: name for name, s in sites.items() if s.value is not None}

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray]:
        """Runs the graph on the arguments of one call; returns its outputs."""
        return [t.numpy() for t in self.run_flat(*args, **kwargs)]

    def on_node(self, node: Node, value: Any) -> Any:
        if not isinstance(node, TensorNode):
            return value
        for name in self.before.get(node.name, ()):
            self.on_value(name, value)
        name = self.after.get(node.name, "")
        return self.on_rounded(name, value) if name else value

    def on_value(self, name: str, value: Tensor) -> None:
        """Receives the value that a site rounds next."""

    def on_rounded(self, name: str, value: Tensor) -> Tensor:
        """Receives the rounded value of a site; returns the value that the graph goes on with."""
        return value


class FloatRun(_SiteRun):
    """Keeps the value of every site; the graph is in the phase ``float``."""

    def __init__(
        self, model: TracedModule, sites: Mapping[str, QuantizedSite], places: Sequence[np.ndarray] | None
    ) -> None:
        super().__init__(model, sites, places)
        self.values: dict[str, np.ndarray] = {}

    def on_value(self, name: str, value: Tensor) -> None:
        """Keeps the value of a site."""
        self.values[name] = value.numpy()


class AloneRun(_SiteRun):
    """Keeps the rounded value of every site with everything before it in float: only its own error."""

    def __init__(
        self,
        model: TracedModule,
        sites: Mapping[str, QuantizedSite],
        values: Mapping[str, np.ndarray],
        places: Sequence[np.ndarray] | None,
    ) -> None:
        super().__init__(model, sites, places)
        self.values, self.own = values, dict[str, np.ndarray]()

    def on_rounded(self, name: str, value: Tensor) -> Tensor:
        """Keeps the rounded value of a site, and goes on with the value in float."""
        self.own[name] = value.numpy()
        return Tensor(self.values[name])


class QuantizedRun(_SiteRun):
    """Adds the values of each site to the site's tally."""

    def __init__(
        self,
        model: TracedModule,
        sites: Mapping[str, QuantizedSite],
        values: dict[str, np.ndarray],
        own: dict[str, np.ndarray],
        tallies: Mapping[str, SiteTally],
        places: Sequence[np.ndarray] | None,
    ) -> None:
        super().__init__(model, sites, places)
        self.values, self.own, self.tallies = values, own, tallies
        self.unrounded: dict[str, np.ndarray] = {}
        self.parameters: dict[str, np.ndarray] = {}  # rounded parameters, which lack a tally

    def on_value(self, name: str, value: Tensor) -> None:
        """Keeps the value of a site with a tally until it is rounded."""
        if name in self.tallies:
            self.unrounded[name] = value.numpy()

    def on_rounded(self, name: str, value: Tensor) -> Tensor:
        """Adds the values of a site to its tally; keeps a parameter's."""
        if name not in self.tallies:
            self.parameters[name] = value.numpy()
            return value
        # The values of a site are dropped as soon as they are counted.
        reference, own = self.values.pop(name), self.own.pop(name)
        self.tallies[name].add(reference, own, self.unrounded.pop(name), value.numpy())
        return value
