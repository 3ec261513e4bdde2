"""Runs the benchmarks and prints one table: ``python -m benchmarks [--quick] [--only NAME] [--check]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.groups import measure, measure_apart
from benchmarks.limits import markdown
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
    "graph_tools",
    "beside",
)
LATEST = Path(__file__).parent / "results" / "latest.json"

# Facts about the machine, and what was measured on it.
_Result = tuple[dict[str, Any], list[Row]]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parse(arguments)
    if options.table:
        print(markdown(json.loads((options.json or LATEST).read_text(encoding="utf-8"))))
        return 0
    size = Size.quick() if options.quick else Size()
    size = dataclasses.replace(size, nncf=options.nncf_python, torch=options.torch_python)
    results: dict[str, _Result] = {}
    groups = options.only or GROUPS
    for group in groups:
        print(f"{group} ...", file=sys.stderr, flush=True)
        facts, start = machine.facts(), time.perf_counter()
        rows = measure(group, size) if len(groups) == 1 else measure_apart(group, size)
        facts.update(load_after=machine.load(), seconds=round(time.perf_counter() - start))
        results[group] = facts, rows
    print(render({group: rows for group, (_, rows) in results.items()}))
    print("\n" + ", ".join(f"{key}: {value}" for key, value in facts.items()))
    target = options.json or (None if options.quick else LATEST)
    if target is not None:
        _write(target, options.quick, results)
    missed = [row.name for _, members in results.values() for row in members if row.met is False]
    if missed:
        print(f"{len(missed)} of the targets missed", file=sys.stderr)
    return 1 if missed and options.check else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: the figures mean nothing")
    parser.add_argument("--only", action="append", choices=GROUPS, help="one group; may be repeated")
    parser.add_argument(
        "--json", type=Path, help=f"where to keep the rows; {LATEST.name}, or nowhere with --quick"
    )
    parser.add_argument("--nncf-python", metavar="PATH", help="an interpreter that has NNCF, for its rows")
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch, for its rows")
    parser.add_argument("--table", action="store_true", help="print the stored rows, in Markdown")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    return parser.parse_args(arguments)


def _write(path: Path, quick: bool, results: dict[str, _Result]) -> None:
    """Replaces the stored rows of the measured groups; each group has facts about its machine."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for group, (facts, rows) in results.items():
        known[group] = {"machine": facts, "quick": quick, "rows": [row.to_dict() for row in rows]}
    document = {group: known[group] for group in GROUPS if group in known}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
