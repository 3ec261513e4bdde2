"""Judges outputs from end to end: the runtime must come as close to float as the graph does.

From end to end, ties and the order of sums move single integers, and a deep network amplifies them, so the
outputs of graph and runtime differ although no op is wrong. Both differ from float by the noise of
quantization anyway. A file is as good as its graph if its noise is no larger and its predictions equal
float's as often.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.metrics import add_fields, decibels, finite_or_none, inner
from qtrace.outputs.replay import SelectedShares

__all__ = ["Closeness", "fewer_rows", "is_as_wrong", "more_than_chance", "sum_up"]

# How much more noise than the graph the runtime may have.
_MAX_LOSS_DB = 1.0
# Outputs of runtime and graph that are as close as the outputs of two float engines are equal.
_EQUAL_DB = 60.0
# What chance explains, in standard deviations.
_DEVIATIONS = 2.0


@dataclass
class Closeness:
    """The distances between float, graph and runtime at one column group, in sums over all batches.

    Predictions are the indices of the largest scores, or the values of an output of integers.

    Attributes:
        signal: the sum of the squares of float's values.
        graph: the sum of the squares of graph minus float.
        runtime: the sum of the squares of runtime minus float.
        difference: the sum of the squares of runtime minus graph.
        spread: the sum of the squares of what each value adds to `runtime` minus `graph`.
        predictions: the number of predictions.
        graph_agreeing: the number of the graph's predictions that are float's.
        runtime_agreeing: the number of the runtime's predictions that are float's.
        discordant: the number of predictions that are float's on only one of both sides.
    """

    signal: float = 0.0
    graph: float = 0.0
    runtime: float = 0.0
    difference: float = 0.0
    spread: float = 0.0
    predictions: int = 0
    graph_agreeing: int = 0
    runtime_agreeing: int = 0
    discordant: int = 0

    def add(
        self, exact: np.ndarray, graph: np.ndarray, runtime: np.ndarray, replayed: np.ndarray | None = None
    ) -> None:
        """Adds the values of one batch, arrays of one shape; values that are not finite are left out.

        Args:
            exact: float's values.
            graph: the graph's values.
            runtime: the runtime's values.
            replayed: float's values for what the runtime selects, if it selects otherwise than the graph.
        """
        replayed = exact if replayed is None else replayed
        integers = exact.dtype.kind != "f"
        if integers or _looks_like_scores(exact):
            values = (exact, graph, runtime, replayed)
            self._add_predictions(*(v if integers else v.argmax(axis=-1) for v in values))
        if integers:
            return
        f, a, b, g = (v.astype(np.float64).ravel() for v in (exact, graph, runtime, replayed))
        finite = np.isfinite(f) & np.isfinite(a) & np.isfinite(b) & np.isfinite(g)
        f, a, b, g = f[finite], a[finite], b[finite], g[finite]
        by_graph, by_runtime = np.square(a - f), np.square(b - g)
        self.signal += inner(f, f)
        self.graph += float(by_graph.sum())
        self.runtime += float(by_runtime.sum())
        self.difference += float(np.square(b - a).sum())
        self.spread += float(np.square(by_runtime - by_graph).sum())

    def _add_predictions(
        self, exact: np.ndarray, graph: np.ndarray, runtime: np.ndarray, replayed: np.ndarray
    ) -> None:
        by_graph, by_runtime = graph == exact, runtime == replayed
        self.predictions += exact.size
        self.graph_agreeing += int(by_graph.sum())
        self.runtime_agreeing += int(by_runtime.sum())
        self.discordant += int((by_graph != by_runtime).sum())

    @property
    def graph_db(self) -> float:
        """The signal-to-noise ratio of the graph to float, in dB."""
        return decibels(self.signal, self.graph)

    @property
    def runtime_db(self) -> float:
        """The signal-to-noise ratio of the runtime to float, in dB."""
        return decibels(self.signal, self.runtime)

    def problems(self) -> Iterator[str]:
        """Yields in what the runtime is worse than the graph, by more than chance explains, as clauses."""
        allowed = self.graph * 10.0 ** (_MAX_LOSS_DB / 10.0) + _DEVIATIONS * math.sqrt(self.spread)
        if self.runtime > allowed and decibels(self.signal, self.difference) < _EQUAL_DB:
            yield (
                f"is {self.runtime_db:.1f} dB from float in the runtime and {self.graph_db:.1f} dB in the "
                f"graph, {_MAX_LOSS_DB:.1f} dB less allowed"
            )
        # McNemar 1947, "Note on the sampling error of the difference between correlated proportions": were
        # both equally good, either side would have half of the discordant predictions.
        lost = self.graph_agreeing - self.runtime_agreeing
        if more_than_chance(lost, self.discordant):
            yield (
                f"has float's prediction {self.runtime_agreeing} times in the runtime and "
                f"{self.graph_agreeing} times in the graph, of {self.predictions}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the ratios in dB and the counts of predictions."""
        return {
            "graph_db": finite_or_none(self.graph_db),
            "runtime_db": finite_or_none(self.runtime_db),
            "predictions": self.predictions,
            "graph_agreeing": self.graph_agreeing,
            "runtime_agreeing": self.runtime_agreeing,
        }


def is_as_wrong(float_db: float, file_db: float) -> bool:
    """Returns whether a runtime computes a float network wrong, and by as much as a file of the network.

    Args:
        float_db: the ratio of the runtime's float outputs to another engine's.
        file_db: the ratio of the file's outputs in the runtime to the graph's.
    """
    return float_db < _EQUAL_DB and float_db <= file_db + _MAX_LOSS_DB


def more_than_chance(count: float, variance: float) -> bool:
    """Returns whether a count is larger than chance explains.

    Args:
        count: how much larger the count is than expected.
        variance: its variance; 0 where nothing happens by chance.
    """
    return count > (1 + _DEVIATIONS * math.sqrt(variance) if variance else 0)


def sum_up(outputs: Iterable[Closeness]) -> Closeness:
    """Returns the sums over several outputs, each of which keeps its own power."""
    return add_fields(Closeness, outputs)


def fewer_rows(graph: SelectedShares, runtime: SelectedShares, mode: str) -> Iterator[str]:
    """Yields where the runtime selects fewer of float's rows than the graph, by more than chance explains.

    Rows that float does not select are not compared, so a runtime that selects nothing else would be exact.

    Args:
        graph: how many of the rows that the graph selects are float's.
        runtime: the same of the runtime.
        mode: the comparison, for the text.
    """
    for number in sorted(frozenset().union(*graph.reaching)):
        sides = zip(graph.counts(number), runtime.counts(number), strict=True)
        for (by_graph, of_graph), (by_runtime, of_runtime) in reversed(list(sides)):  # clear places first
            # Discordant rows are wrong on one side at least.
            discordant = (of_graph - by_graph) + (of_runtime - by_runtime)
            if more_than_chance(by_graph - by_runtime, discordant):
                yield (
                    f"{graph.names[number]} ({mode}) selects {by_runtime} of float's rows in the runtime and "
                    f"{by_graph} in the graph, of {of_runtime}"
                )
                break


def _looks_like_scores(exact: np.ndarray) -> bool:
    """Returns whether the last axis has scores of classes: of samples x classes, or probabilities."""
    if exact.ndim < 2 or not exact.size or exact.shape[-1] < 2:
        return False
    return exact.ndim == 2 or bool((exact >= 0).all() and np.allclose(exact.sum(axis=-1), 1.0, atol=1e-3))
