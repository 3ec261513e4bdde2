"""Runs the benchmarks and prints one table: ``python -m benchmarks [--quick] [--only NAME] [--check]``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.rows import Row, Size, render

__all__ = ["main"]

GROUPS = (
    "preparing",
    "growing",
    "calibrating",
    "collecting",
    "memory",
    "training",
    "ranges",
    "tools",
    "beside",
)
LATEST = Path(__file__).parent / "results" / "latest.json"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parse(arguments)
    # MegEngine sets the processor to flush subnormals, of which numpy warns.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    size = Size.quick() if options.quick else Size()
    size = dataclasses.replace(size, nncf=options.nncf_python, torch=options.torch_python)
    facts = machine.facts()
    rows: dict[str, list[Row]] = {}
    start = time.perf_counter()
    for group in options.only or GROUPS:
        print(f"{group} ...", file=sys.stderr, flush=True)
        rows[group] = list(importlib.import_module(f"benchmarks.{group}").run(size))
    facts["load_after"] = machine.load()
    facts["seconds"] = round(time.perf_counter() - start)
    print(render(rows))
    print("\n" + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    target = options.json
    if target is None and not options.quick and not options.only:
        target = LATEST  # it holds whole runs only
    if target is not None:
        _write(target, facts, options.quick, rows)
    missed = [row.name for members in rows.values() for row in members if row.met is False]
    if missed:
        print(f"{len(missed)} of the targets missed", file=sys.stderr)
    return 1 if missed and options.check else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the figures mean nothing")
    parser.add_argument("--only", action="append", choices=GROUPS, help="one group; may be repeated")
    parser.add_argument("--json", type=Path, help=f"where to write; {LATEST.name} for a whole run")
    parser.add_argument("--nncf-python", metavar="PATH", help="an interpreter that has NNCF, for its rows")
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch, for its rows")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    return parser.parse_args(arguments)


def _write(path: Path, facts: dict[str, Any], quick: bool, rows: dict[str, list[Row]]) -> None:
    document = {
        "machine": facts,
        "quick": quick,
        "rows": [{"group": group, **row.to_dict()} for group, members in rows.items() for row in members],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
