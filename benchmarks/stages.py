"""Times each stage of a run, beside an older version: ``python -m benchmarks.stages``.

    git worktree add ../old COMMIT
    python -m benchmarks.stages --old ../old network.onnx samples.npy

Both versions take turns, each run in a process of its own. Processor seconds are compared, since other work
on the machine disturbs them less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qtrace.display import format_table

__all__ = ["main"]

_HERE = Path(__file__).resolve().parent
_WORKER = _HERE / "workers" / "stages.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stages", description="Times each stage of a run."
    )
    parser.add_argument("model", type=Path, help="an ONNX file of one input")
    parser.add_argument("samples", type=Path, help="an .npy file of inputs")
    parser.add_argument("--old", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--recipe", default="int8", help="the recipe, or a config as JSON (int8)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each version (3)")
    options = parser.parse_args(arguments)
    trees = {"new": _HERE.parent} if options.old is None else {"old": options.old, "new": _HERE.parent}
    runs: dict[str, list[Mapping[str, float]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            runs[name].append(_run(tree, options.model, options.samples, options.recipe))
    print(_table(runs))
    return 0


def _run(tree: Path, model: Path, samples: Path, recipe: str) -> Mapping[str, float]:
    """Returns stage -> processor seconds of one run of the version in ``tree``."""
    command = [sys.executable, str(_WORKER), str(model.resolve()), str(samples.resolve()), recipe]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tree)
    if process.returncode:
        raise RuntimeError(f"{tree}: {process.stderr.strip()}")
    seconds: Mapping[str, float] = json.loads(process.stdout.splitlines()[-1])
    return seconds


def _table(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Returns a line for each stage: the smallest of the rounds and the largest, and the ratio of medians."""
    stages = next(iter(runs.values()))[0]
    rows = []
    for stage in stages:
        seconds = {name: [run[stage] for run in rounds] for name, rounds in runs.items()}
        medians = [statistics.median(values) for values in seconds.values()]
        spans = [f"{min(v):.2f} to {max(v):.2f}" for v in seconds.values()]
        rows.append((stage, *spans, f"{medians[-1] / max(medians[0], 1e-9):.2f}"))
    return format_table(("stage", *(f"{name}, s" for name in runs), "ratio"), rows, None)


if __name__ == "__main__":
    sys.exit(main())
