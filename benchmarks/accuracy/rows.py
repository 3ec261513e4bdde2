"""The rows of the table: what was measured of a network, beside its target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Row", "add_recovered_share", "markdown", "sqnr_db"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: the question that the row answers, such as "W8A8 PTQ".
        net: the network.
        method: the way of quantization, or the tool.
        sqnr: SQNR of the outputs on the test inputs, in dB; None if it was not measured.
        metric: accuracy or mAP on the test part, in percent.
        loss: points that the metric is below float; negative for a gain.
        target: the target in words; empty for a row that is there for comparison.
        met: whether the target is met.
        note: a remark that is shown beside the figures.
    """

    check: str
    net: str
    method: str
    sqnr: float | None = None
    metric: float | None = None
    loss: float | None = None
    target: str = ""
    met: bool | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return dataclasses.asdict(self)

    def noted(self, more: str) -> Row:
        """Returns the row with `more` added to its note."""
        return dataclasses.replace(self, note=f"{self.note}, {more}" if self.note else more)


def add_recovered_share(row: Row, lost: float | None, target: float | None = None) -> Row:
    """Returns the row with the share of a loss that it recovers.

    Args:
        row: the row of a method that reduces the loss.
        lost: the loss without the method, in points; there is no share if it is not positive.
        target: the share that is the target; None where the row is there for comparison.
    """
    goal = "" if target is None else f"{100 * target:.0f} % of the loss recovered"
    if lost is None or lost <= 0 or row.loss is None:
        return dataclasses.replace(row.noted("nothing was lost"), target=goal)
    share = 1 - row.loss / lost
    noted = row.noted(f"{100 * share:.0f} % of the loss recovered")
    return dataclasses.replace(noted, target=goal, met=None if target is None else share >= target)


_HEADER = ("check", "network", "method", "SQNR dB", "metric", "loss", "target", "", "note")
_VERDICT = {True: "met", False: "MISSED", None: ""}


def markdown(rows: Iterable[Row]) -> str:
    """The table in Markdown."""
    lines = [_HEADER, ("---",) * len(_HEADER), *(_cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    figures = (_number(row.sqnr, 1), _number(row.metric, 2), _number(row.loss, 2))
    return (row.check, row.net, row.method, *figures, row.target, _VERDICT[row.met], row.note)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def sqnr_db(references: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
    """Returns the mean SQNR of some outputs, in dB.

    Raises:
        ValueError: for outputs that are not of the same shapes.
    """
    ratios = []
    for exact, rounded in zip(references, outputs, strict=True):
        if exact.shape != rounded.shape:
            raise ValueError(f"outputs of shapes {exact.shape} and {rounded.shape} cannot be compared.")
        signal = np.sum(np.square(exact, dtype=np.float64))
        noise = np.sum(np.square(exact.astype(np.float64) - rounded))
        ratios.append(10 * np.log10(signal / max(noise, 1e-30)))
    return float(np.mean(ratios))
