"""Runs the demos and stores their results, which the docs' page on demos shows.

python -m scripts.demos                  # all; that of the detector takes some minutes, and ocr ten
python -m scripts.demos digits           # make demo
python -m scripts.demos detector         # make detector-demo
python -m scripts.demos ocr              # make ocr-demo ARGS=--only-client
python -m scripts.demos --write digits   # and store its results in benchmarks/results/demo.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.stored import RESULTS

__all__ = ["DEMOS", "main", "run", "store_results"]

# Name -> the arguments of Python that run the demo, and the file that its results are stored in.
DEMOS = {
    "digits": (("examples/demo.py",), "demo.json"),
    "detector": (("-m", "examples.detector.demo"), "detector_demo.json"),
    "ocr": (("-m", "examples.ocr.demo", "--only-client"), "ocr_client.json"),
}
_ROOT = Path(__file__).resolve().parent.parent


def run(name: str, *options: str) -> dict[str, Any]:
    """Runs a demo in a temporary folder and returns its results.json, with facts about the machine.

    Args:
        name: a key of ``DEMOS``.
        options: further options of the demo.

    Raises:
        subprocess.CalledProcessError: when a step of the demo fails, or a target is missed.
    """
    from benchmarks import machine  # loads MegEngine

    facts = machine.facts()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *DEMOS[name][0], "--out", folder, *options]
        subprocess.run(command, check=True, cwd=_ROOT)
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    facts["load_after"] = machine.load()
    return {"machine": facts, **results}


def store_results(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Replaces the stored results of a demo; returns the file."""
    path = folder / DEMOS[name][1]
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return path


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    write, names = "--write" in arguments, [name for name in arguments if name != "--write"]
    if unknown := set(names) - set(DEMOS):
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(DEMOS)}", file=sys.stderr)
        return 2
    for name in names or DEMOS:
        try:
            results = run(name)
        except subprocess.CalledProcessError as error:
            print(f"{name}: the demo ended with {error.returncode}: nothing is stored", file=sys.stderr)
            return 1
        if write:
            print(store_results(name, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
