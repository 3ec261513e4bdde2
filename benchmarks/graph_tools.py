"""Time of the graph tools on chains of 2,500 and 5,000 exprs, of ops, of layers and of fusable pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.rows import Row, Size
from benchmarks.timing import run_interleaved
from qtrace.graph import exprs, flatten
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import TracedModule
from tests.graph.test_growth import CASES, TOOLS, X, pieces

__all__ = ["run"]

_SECONDS, _GROWTH = 3.0, 2.2
_EXPRS = {pieces: 1.6}  # of a chain, for one of its length


def run(size: Size) -> Iterator[Row]:
    """Each tool on a chain and on one twice as long; a tool changes a copy, made before the clock starts."""
    short, long = int(size.chain * 6.25), int(size.chain * 12.5)
    traced = {
        build: {n: trace(build(round(n / _EXPRS.get(build, 1))), X, check=False) for n in (short, long)}
        for build in dict.fromkeys(build for _, build in CASES)
    }
    for tool, build in CASES:
        rounds = max(size.slow_repeats - 2, 1)
        copies = {n: [flatten(model) for _ in range(rounds)] for n, model in traced[build].items()}
        counts = {n: len(exprs(models[0])) for n, models in copies.items()}
        sides = {str(n): partial(_on_next, TOOLS[tool], models) for n, models in copies.items()}
        samples = run_interleaved(sides, rounds, warm_up=0)
        label = f"{tool}, chain of {build.__name__}"
        yield Row(f"{label}, {counts[long]} exprs", samples.seconds(str(long)), "s", _SECONDS)
        growth = samples.ratio(str(long), str(short))
        yield Row(f"{label}, {counts[long]} / {counts[short]} exprs", growth, "x", _GROWTH)


def _on_next(tool: Callable[[TracedModule], object], models: list[TracedModule]) -> None:
    tool(models.pop())
