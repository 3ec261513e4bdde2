#!/usr/bin/env python3
"""Export the networks of tests/export/networks.py to every form, verify each file, print one table.

``python scripts/verify_networks.py [NAME ...]``; a name is the beginning of a network's. docs/exports.md has
the table of a whole run.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore", message="The value of the smallest subnormal")

from qtrace.process import engine  # noqa: E402

engine.quiet()

from tests.export.networks import NETWORKS, Result, measure  # noqa: E402

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
_OTHERS = ("openvino", "litert", "ncnn", "megengine")


def main() -> int:
    """Measures the networks that are named, or all; the exit code is 1 if a check fails."""
    wanted = tuple(sys.argv[1:])
    chosen = [n for n in NETWORKS if not wanted or n.name.startswith(wanted)]
    print("| " + " | ".join(HEADER) + " |")
    print("| " + " | ".join("---" for _ in HEADER) + " |", flush=True)
    results = []
    for network in chosen:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(network, Path(folder)))
        print("| " + " | ".join(row(results[-1])) + " |", flush=True)
    for result in results:
        for name, op, why in result.floats:
            print(f"\n- {result.network.name}: {op} `{name}` in float: {why}", end="")
    print()
    return 0


def row(result: Result) -> list[str]:
    """One line of the table."""
    main = result.reports["onnxruntime"]
    noise = main.sqnr_db("deployed")
    cells = [
        _lsb(result, "onnxruntime"),
        f"{main.agreement():.1%}",
        f"{noise:.1f}" if noise < 999 else "exact",
    ]
    ends = f", {result.ends} end in float" if result.ends else ""
    cells.append(
        f"{result.integer} of {result.counted} ({result.integer / max(result.counted, 1):.0%}{ends})"
    )
    return [result.network.name, *cells, *(_lsb(result, r) for r in _OTHERS)]


def _lsb(result: Result, runtime: str) -> str:
    report = result.reports.get(runtime)
    return "" if report is None else f"{report.worst_lsb()}, {report.equal_share():.3%}"


if __name__ == "__main__":
    raise SystemExit(main())
