"""The rows of the table: what was measured of a network, beside its target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Row", "markdown", "recovered", "sqnr_db"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: what is tried.
        net: the network.
        method: how it was quantized, or which tool did it.
        sqnr: of the outputs on the test inputs, in dB; None where it was not measured.
        metric: accuracy or mAP on the test part, in percent.
        loss: how many points less that is than in float; below 0 for a gain.
        target: what is asked for, in words; empty for a row that is there for comparison.
        met: whether it is.
        note: what else a reader must know.
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
        """The row with more to its note."""
        return dataclasses.replace(self, note=f"{self.note}, {more}" if self.note else more)


def recovered(row: Row, lost: float | None, target: float | None = None) -> Row:
    """The row with the share of a loss that it has back.

    Args:
        row: what was done against the loss.
        lost: the loss without it, in points; where nothing was lost, no share can be said.
        target: the share that is asked for; None where the row is there for comparison.
    """
    asked = "" if target is None else f"{100 * target:.0f} % of the loss recovered"
    if lost is None or lost <= 0 or row.loss is None:
        return dataclasses.replace(row.noted("nothing was lost"), target=asked)
    share = 1 - row.loss / lost
    noted = row.noted(f"{100 * share:.0f} % of the loss recovered")
    return dataclasses.replace(noted, target=asked, met=None if target is None else share >= target)


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


def sqnr_db(want: Sequence[np.ndarray], have: Sequence[np.ndarray]) -> float:
    """The signal to quantization noise ratio of outputs in dB: the mean over the outputs.

    Raises:
        ValueError: for outputs that are not of the same shapes.
    """
    found = []
    for exact, rounded in zip(want, have, strict=True):
        if exact.shape != rounded.shape:
            raise ValueError(f"outputs of shapes {exact.shape} and {rounded.shape} cannot be compared.")
        signal = np.sum(np.square(exact, dtype=np.float64))
        noise = np.sum(np.square(exact.astype(np.float64) - rounded))
        found.append(10 * np.log10(signal / max(noise, 1e-30)))
    return float(np.mean(found))
