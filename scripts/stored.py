"""What was measured of networks, as it is stored in benchmarks/results.

The scripts that measure write these files, the docs site reads them; neither table is typed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["RESULTS", "ExportRow", "FamilyRow", "load", "store", "table"]

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@dataclass(frozen=True)
class FamilyRow:
    """What a family's recipe makes of one network of the zoo.

    ``share`` is the part of the whole graph's MACs on integers, ``sqnr`` that of the worst output in dB, and
    ``islands`` says of which kinds of ops how many float islands between integers are made.
    """

    family: str
    recipe: str
    network: str
    share: float
    sqnr: float
    islands: dict[str, int]

    HEADER = ("family", "recipe", "network", "MACs on integers", "SQNR in dB", "float islands")
    FILE = "families.json"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        islands = ", ".join(f"{n} x {kinds}" for kinds, n in self.islands.items())
        share, recipe = f"{100 * self.share:.1f} %", f"`{self.recipe}`"
        return self.family, recipe, self.network, share, f"{self.sqnr:.1f}", islands or "none"


@dataclass(frozen=True)
class ExportRow:
    """What verify finds of one network's files.

    ``compared`` says for each runtime the largest difference of an integer in LSB, op by op, and the share of
    equal integers. ``agreement`` (share of equal predictions) and ``sqnr`` (dB; None where all outputs
    are equal bit for bit) are onnxruntime's as deployed, ``integer`` of ``counted`` ops run on its integer
    kernels, and ``ends`` of the others have results that the recipe leaves in float.
    """

    network: str
    agreement: float
    sqnr: float | None
    integer: int
    counted: int
    ends: int
    compared: dict[str, list[float]] = field(default_factory=dict)

    HEADER = (
        "network",
        "ops off: worst LSB, equal",
        "fused: same prediction",
        "fused: SQNR dB",
        "integer kernels",
        "OpenVINO",
        "LiteRT",
        "ncnn",
        "MegEngine",
    )
    FILE = "exports.json"
    OTHERS = ("openvino", "litert", "ncnn", "megengine")

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        ends = f", {self.ends} end in float" if self.ends else ""
        share = f"{self.integer / max(self.counted, 1):.0%}"
        return (
            self.network,
            self._compared("onnxruntime"),
            f"{self.agreement:.1%}",
            "exact" if self.sqnr is None else f"{self.sqnr:.1f}",
            f"{self.integer} of {self.counted} ({share}{ends})",
            *(self._compared(runtime) for runtime in self.OTHERS),
        )

    def _compared(self, runtime: str) -> str:
        if runtime not in self.compared:
            return ""
        worst, equal = self.compared[runtime]
        return f"{worst:.0f}, {equal:.3%}"


_R = TypeVar("_R", FamilyRow, ExportRow)


def table(rows: Iterable[FamilyRow] | Iterable[ExportRow], kind: type[FamilyRow] | type[ExportRow]) -> str:
    """Rows as a Markdown table."""
    lines = [kind.HEADER, ("---",) * len(kind.HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def load(kind: type[_R], folder: Path = RESULTS) -> list[_R]:
    """The rows that are stored."""
    found: list[dict[str, Any]] = json.loads((folder / kind.FILE).read_text(encoding="utf-8"))
    return [kind(**row) for row in found]


def store(rows: Iterable[_R], kind: type[_R], folder: Path = RESULTS) -> None:
    """Replaces the stored rows of the same networks, and adds those of others at the end."""
    path = folder / kind.FILE
    kept = {row.network: row for row in (load(kind, folder) if path.exists() else ())}
    kept.update({row.network: row for row in rows})
    data = [dataclasses.asdict(row) for row in kept.values()]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
