"""The rows of the table: what was measured, beside its target."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from benchmarks.timing import Spread

__all__ = ["Row", "Size", "render"]


@dataclass(frozen=True)
class Size:
    """The size of the measurements.

    Attributes:
        width: channels of the first stage of the ResNets; 64 is ResNet-18.
        mobile_width: channels of the first layer of MobileNetV2; 32 is the paper's.
        image: shape of a batch.
        batches: number of batches in a whole calibration.
        chain: times conv, BatchNorm, ReLU in the shorter chain of preparing; layers in the second of growing.
        repeats: rounds of cheap measurements.
        slow_repeats: rounds of expensive measurements.
        traced: whether training is measured under jit.trace too, which takes a while to compile.
        nncf: an interpreter that has NNCF; None to leave its rows out.
        torch: an interpreter that has torch; None to leave its rows out.
    """

    width: int = 64
    mobile_width: int = 32
    image: tuple[int, int, int, int] = (8, 3, 96, 96)
    batches: int = 8
    chain: int = 400
    repeats: int = 11
    slow_repeats: int = 5
    traced: bool = True
    nncf: str | None = None
    torch: str | None = None

    @classmethod
    def quick(cls) -> Size:
        """Returns a size so small that the figures mean nothing, to see whether the benchmarks run."""
        return cls(
            width=8,
            mobile_width=8,
            image=(2, 3, 32, 32),
            batches=2,
            chain=10,
            repeats=2,
            slow_repeats=1,
            traced=False,
        )

    @property
    def net(self) -> str:
        """The name of the ResNet in the rows."""
        return f"ResNet-18 {'x'.join(map(str, self.image))}" + (
            "" if self.width == 64 else f" width {self.width}"
        )


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: the measurement, with its network.
        value: the result.
        unit: "x" for a ratio, "s" or "ms".
        target: the largest median that is good enough; None for information.
        note: a remark that is shown beside the value.
    """

    name: str
    value: Spread
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.value.median <= self.target

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return {**dataclasses.asdict(self), "met": self.met}


_HEADER = ("check", "median", "min..max", "by CPU time", "target", "", "note")
_VERDICT = {True: "met", False: "MISSED", None: ""}


def render(rows: dict[str, list[Row]]) -> str:
    """The table as text, a block for each group."""
    lines: list[tuple[str, ...]] = [_HEADER]
    for group, members in rows.items():
        lines.append((f"[{group}]", *[""] * (len(_HEADER) - 1)))
        lines += [_cells(row) for row in members]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    v = row.value
    target = "" if row.target is None else f"<= {row.target:g} {row.unit}"
    spread = f"{_digits(v.low)}..{_digits(v.high)}"
    median = f"{_digits(v.median)} {row.unit}"
    return (f"  {row.name}", median, spread, _digits(v.cpu), target, _VERDICT[row.met], row.note)


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
