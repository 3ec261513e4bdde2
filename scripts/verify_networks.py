#!/usr/bin/env python3
"""Export the networks of tests/export/networks.py to every form, verify each file, print one table.

``python scripts/verify_networks.py [--write] [NAME ...]``; a name is the beginning of a network's. --write
stores the rows in benchmarks/results/exports.json, which the docs show.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore", message="The value of the smallest subnormal")

from qtrace import process  # noqa: E402

process.quiet()

from scripts.stored import ExportRow, store, table, today  # noqa: E402
from tests.export.networks import NETWORKS, Result, measure  # noqa: E402


def main() -> int:
    """Measures the networks that are named, or all; the exit code is 1 if a check fails."""
    write, beginnings = "--write" in sys.argv[1:], tuple(name for name in sys.argv[1:] if name != "--write")
    chosen = [n for n in NETWORKS if not beginnings or n.name.startswith(beginnings)]
    results = []
    for network in chosen:
        print(network.name, "...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(network, Path(folder)))
    rows = [row(result) for result in results]
    print(table(rows, ExportRow))
    if write:
        store(rows, ExportRow)
    for result in results:
        for name, op, why in result.floats:
            print(f"\n- {result.network.name}: {op} `{name}` in float: {why}", end="")
    print()
    return 0


def row(result: Result) -> ExportRow:
    """Returns the row that is stored for a network."""
    deployed = result.reports["onnxruntime"]
    noise = deployed.sqnr_db("deployed")
    compared = {name: [report.worst_lsb(), report.equal_share()] for name, report in result.reports.items()}
    return ExportRow(
        network=result.network.name,
        agreement=deployed.agreement(),
        sqnr=noise if noise < 999 else None,
        integer=result.integer,
        counted=result.counted,
        ends=result.ends,
        compared=compared,
        measured=today(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
