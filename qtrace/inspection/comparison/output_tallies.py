"""Sums over batches, from which the figures of outputs and of their column groups are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qtrace.inspection.comparison.rows import GroupComparison, OutputComparison
from qtrace.metrics import ErrorSums, comparable
from qtrace.outputs import GroupedErrors, GroupFigures, find_groups
from qtrace.outputs.replay import SelectedShares
from qtrace.preparation.model import QuantizedModel

__all__ = ["OutputTallies"]

_FIRST_BATCHES = 8  # that show the ranges of columns


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
        errors = GroupedErrors(find_groups(self.model.module, [reference for reference, _ in self._first]))
        for reference, test in self._first:
            errors.add(reference, test)
        self._first.clear()
        return errors

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
