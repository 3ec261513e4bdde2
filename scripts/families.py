"""What each family's recipe makes of the zoo's networks of that family: the table of docs/families.md.

    python -m scripts.families            # every network: some minutes
    python -m scripts.families resnet vit # some families or networks

For each network: the part of its MACs that is computed on integers, the signal above the error of its worst
output after calibration (random weights, W8A8), and the float islands between integers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import qtrace
from tests.zoo.cases import Case as ImageCase
from tests.zoo.catalog import CNN
from tests.zoo.catalog import Entry as ImageEntry
from tests.zoo.detectors.checks import Case
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.shares import whole_share
from tests.zoo.transformers.entries import TRANSFORMERS

__all__ = ["NETWORKS", "Row", "measure", "render"]

NETWORKS: tuple[Any, ...] = (*CNN, *DETECTORS, *TRANSFORMERS)


@dataclass(frozen=True)
class Row:
    """What was measured of one network.

    Attributes:
        family: of the network.
        recipe: how it was quantized.
        network: its name in the zoo.
        share: the part of the whole graph's MACs on integers.
        sqnr: of the worst output, in dB.
        islands: kinds of ops -> how many float islands between integers are made of these.
    """

    family: str
    recipe: str
    network: str
    share: float
    sqnr: float
    islands: dict[str, int]

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        islands = ", ".join(f"{n} x {kinds}" for kinds, n in self.islands.items())
        share, recipe = f"{100 * self.share:.1f} %", f"`{self.recipe}`"
        return self.family, recipe, self.network, share, f"{self.sqnr:.1f}", islands or "none"


def measure(entry: Any) -> Row:
    """Prepares a network of the zoo by its recipe, calibrates it and compares its outputs."""
    case: Any = ImageCase(entry) if isinstance(entry, ImageEntry) else Case(entry)
    islands = qtrace.explain(case.calibrated).to_dict()["summary"]["islands"]
    share, sqnr = whole_share(case.calibrated), min(case.ratios())
    return Row(entry.family, entry.recipe, entry.name, share, sqnr, islands)


def render(rows: Iterable[Row]) -> str:
    """A Markdown table."""
    head = ("family", "recipe", "network", "MACs on integers", "SQNR in dB", "float islands")
    lines = [head, ("---",) * len(head), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(wanted: list[str]) -> int:
    """The command; returns the exit code."""
    # MegEngine sets the processor to flush subnormals, of which numpy warns.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    known = {name for entry in NETWORKS for name in (entry.name, entry.family)}
    if unknown := set(wanted) - known:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    rows = []
    for entry in NETWORKS:
        if not wanted or {entry.name, entry.family} & set(wanted):
            print(entry.name, "...", file=sys.stderr, flush=True)
            rows.append(measure(entry))
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
