"""Times whole runs, from file to file, beside other tools: ``python -m benchmarks.whole``.

    python -m benchmarks.whole network.onnx samples.npy --nncf NNCF/bin/python
    python -m benchmarks.whole network.onnx samples.npy --old ../old --only default

Every tool takes a turn in each round, in a process of its own, with its default number of threads. The start
of the interpreter and all imports count. Other work on the machine disturbs processor seconds less than the
clock's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import machine
from benchmarks.accuracy.peers import quantize_by_nncf, quantize_by_onnxruntime
from qtrace.display import format_table

__all__ = ["VARIANTS", "Run", "main", "table"]

_HERE = Path(__file__).resolve().parent
_WORKER = _HERE / "workers" / "whole.py"
_OWN = ("default", "minmax")
_PEERS = {"onnxruntime MinMax": "MinMax", "NNCF fast": "fast", "NNCF full": "full"}
VARIANTS = (*_OWN, *_PEERS)
_RATIOS = (
    ("default", "NNCF full"),
    ("default", "NNCF fast"),
    ("minmax", "onnxruntime MinMax"),
    ("default", "default, old"),
    ("minmax", "minmax, old"),
)
_NNCF_BATCH = 4  # it takes means of the ranges of batches, and does better with some samples in each


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        wall: its seconds.
        processor: the processor seconds of its process.
        stages: stage -> wall and processor seconds, of qtrace.
    """

    wall: float
    processor: float
    stages: Mapping[str, Sequence[float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole", description="Times whole runs beside other tools."
    )
    parser.add_argument("model", type=Path, help="an ONNX file of one input, of opset 13 or later")
    parser.add_argument("samples", type=Path, help="an .npy file of inputs")
    parser.add_argument("--count", type=int, help="how many of the inputs to take (all)")
    parser.add_argument("--nncf", metavar="PYTHON", help="an interpreter that has NNCF; left out otherwise")
    parser.add_argument("--old", type=Path, help="a checkout of another version of qtrace")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="one variant; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (3)")
    options = parser.parse_args(arguments)
    # A user's second run has the bytecode of all modules, whatever the tool; without, imports take a second.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    chosen = [v for v in VARIANTS if not options.only or v in options.only]
    with tempfile.TemporaryDirectory(prefix="qtrace-whole-") as name:
        folder, samples = Path(name), Path(name) / "samples.npy"
        np.save(samples, np.load(options.samples)[: options.count])
        calls: dict[str, Callable[[], Run]] = {}
        for variant in chosen:
            if variant in _OWN:
                calls.update(_own(variant, options.model, samples, folder, options.old))
            elif options.nncf or not variant.startswith("NNCF"):
                calls[variant] = _peer(variant, options.model, samples, folder, options.nncf)
        runs: dict[str, list[Run]] = {variant: [] for variant in calls}
        for number in range(options.rounds):
            for variant in list(calls)[:: 1 if number % 2 == 0 else -1]:
                runs[variant].append(calls[variant]())
    print(f"{options.model.name}, {options.count or 'all'} inputs, load {machine.load()}")
    print(table(runs))
    return 0


def _own(
    variant: str, model: Path, samples: Path, folder: Path, old: Path | None
) -> dict[str, Callable[[], Run]]:
    """Returns the calls of one of qtrace's variants, by name: in this version, and in the old one."""
    trees = {variant: _HERE.parent, **({} if old is None else {f"{variant}, old": old})}

    def call(tree: Path) -> Run:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree.resolve()),
        }
        out = folder / "own.onnx"
        command = [sys.executable, str(_WORKER), str(model.resolve()), str(samples), variant, str(out)]
        return _measure(lambda: _stages(command, environment, tree))

    def warm(tree: Path) -> Run:
        if not (folder / tree.name).exists():
            (folder / tree.name).mkdir()
            call(tree)
        return call(tree)

    return {name: functools.partial(warm, tree) for name, tree in trees.items()}


def _stages(
    command: Sequence[str], environment: Mapping[str, str], tree: Path
) -> Mapping[str, Sequence[float]]:
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tree)
    if process.returncode:
        raise RuntimeError(f"{tree}: {process.stderr.strip()}")
    stages: Mapping[str, Sequence[float]] = json.loads(process.stdout.splitlines()[-1])
    return stages


def _peer(variant: str, model: Path, samples: Path, folder: Path, nncf: str | None) -> Callable[[], Run]:
    """Returns the call of another tool."""

    def quantize() -> Mapping[str, Sequence[float]]:
        inputs = np.load(samples)
        if variant.startswith("NNCF"):
            kinds = (_PEERS[variant],)
            (made,) = quantize_by_nncf(model, inputs, folder, nncf or "", kinds=kinds, batch=_NNCF_BATCH)
        else:
            made = quantize_by_onnxruntime(model, inputs, _PEERS[variant], folder)
        if made.file is None:
            raise RuntimeError(f"{variant}: {made.reason}")
        return {}

    return lambda: _measure(quantize)


def _measure(call: Callable[[], Mapping[str, Sequence[float]]]) -> Run:
    """Measures a call that waits for processes of its own."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    stages = call()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, stages)


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    """Returns the medians with their spread, the ratios of medians, and the stages of qtrace's own runs."""
    rows = [
        (variant, _spread([r.processor for r in own]), _spread([r.wall for r in own]))
        for variant, own in runs.items()
    ]
    parts = [format_table(("run", "processor, s", "wall, s"), rows, None)]
    ratios = [
        (f"{a} / {b}", _ratio(runs[a], runs[b], "processor"), _ratio(runs[a], runs[b], "wall"))
        for a, b in _RATIOS
        if a in runs and b in runs
    ]
    if ratios:
        parts.append(format_table(("ratio", "processor", "wall"), ratios, None))
    for variant, own in runs.items():
        stages = dict.fromkeys(stage for run in own for stage in run.stages)
        shares = [
            (stage, *(_spread([run.stages.get(stage, (0.0, 0.0))[i] for run in own]) for i in (1, 0)))
            for stage in stages
        ]
        if shares:
            parts.append(format_table((f"{variant}: stage", "processor, s", "wall, s"), shares, None))
    return "\n\n".join(parts)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _ratio(own: Sequence[Run], other: Sequence[Run], what: str) -> str:
    first, second = (statistics.median(getattr(run, what) for run in side) for side in (own, other))
    return f"{first / max(second, 1e-9):.2f}"


if __name__ == "__main__":
    sys.exit(main())
