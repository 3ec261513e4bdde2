"""Measures the networks of the zoo with the recipes of their families, for the docs' page on families.

    python -m scripts.families                    # every network: some minutes
    python -m scripts.families resnet vit         # some families or networks
    python -m scripts.families --write resnet vit # and store their rows in benchmarks/results/families.json

For each network: the part of its MACs that is computed on integers, the signal above the error of its worst
output after calibration (random weights, W8A8), and the float islands between integers.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import qtrace
from scripts.stored import FamilyRow, store, table, today
from tests.zoo.catalog import CNN
from tests.zoo.checks import Case
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.shares import whole_share
from tests.zoo.transformers.entries import TRANSFORMERS

__all__ = ["NETWORKS", "main", "measure"]

NETWORKS: tuple[Any, ...] = (*CNN, *DETECTORS, *TRANSFORMERS)


def measure(entry: Any) -> FamilyRow:
    """Prepares a network of the zoo by its recipe, calibrates it and compares its outputs."""
    case = Case(entry)
    islands = qtrace.explain(case.calibrated).to_dict()["summary"]["islands"]
    share, sqnr = whole_share(case.calibrated), min(case.ratios())
    return FamilyRow(entry.family, entry.recipe, entry.name, share, sqnr, islands, today())


def main(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    # MegEngine sets the processor to flush subnormals, of which numpy warns.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    known = {name for entry in NETWORKS for name in (entry.name, entry.family)}
    write, names = "--write" in arguments, {name for name in arguments if name != "--write"}
    if unknown := names - known:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    rows = []
    for entry in NETWORKS:
        if not names or {entry.name, entry.family} & names:
            print(entry.name, "...", file=sys.stderr, flush=True)
            rows.append(measure(entry))
    print(table(rows, FamilyRow))
    if write:
        store(rows, FamilyRow)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
