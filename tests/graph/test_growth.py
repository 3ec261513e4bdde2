"""The work of every graph tool grows with the length of a graph, counted in calls at two lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph import (
    GraphEditor,
    MergeCommonSubexpressions,
    RemoveDeadCode,
    Transformer,
    check_samples,
    compose,
    dot,
    exprs,
    find,
    flatten,
    lint,
    propagate_shapes,
    split,
)
from qtrace.graph.types import CallMethod, TracedModule
from qtrace.inspection.analysis import analyze
from qtrace.preparation.normalize import normalize
from qtrace.preparation.passes.absorb import absorb
from tests.growth import assert_linear, calls_of
from tests.nets import net

X = np.linspace(-1, 1, 8, dtype="float32").reshape(2, 4)
LENGTHS = (150, 600)


def plain(length: int) -> M.Module:
    def forward(self: Any, x: Any) -> Any:
        for _ in range(length // 2):
            x = F.relu(x) + 1.0
        return x

    return net(forward)


def layers(length: int) -> M.Module:
    def forward(self: Any, x: Any) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x) * self.gain)
        return x

    gain = mge.Parameter(np.full(4, 0.5, "float32"))
    return net(forward, layers=[M.Linear(4, 4) for _ in range(length // 4)], gain=gain)


def pieces(length: int) -> M.Module:
    """Half of a chain is SiLU in pieces; every op has two readers, and dead and equal ones are beside it."""

    def forward(self: Any, x: Any) -> Any:
        for _ in range(length // 5):
            F.exp(x)
            x = x * F.sigmoid(x) + F.tanh(F.abs(x)) * F.tanh(F.abs(x))
        return x

    return net(forward)


def _insert_everywhere(traced: TracedModule) -> None:
    with GraphEditor(traced) as edit:
        for expr in find(traced, function=F.relu):
            readers = list(expr.outputs[0].users)
            new = edit.call_method("__mul__", expr.outputs[0], 2.0, after=expr)
            edit.replace_uses(expr.outputs[0], new, users=readers)


def _split(traced: TracedModule) -> None:
    steps = [e for e in exprs(traced) if isinstance(e, CallMethod)]
    first, middle = (steps[len(steps) * i // 8].outputs[0]._name for i in (1, 4))
    split(traced, [first, middle])


def _merge(traced: TracedModule) -> None:
    RemoveDeadCode().run(traced)
    MergeCommonSubexpressions().run(traced)


TOOLS: dict[str, Callable[[TracedModule], object]] = {
    "lint": lint,
    "infer": propagate_shapes,
    "run": lambda traced: propagate_shapes(traced, X),
    "find": lambda traced: find(traced, function=F.relu),
    "insert": _insert_everywhere,
    "transform": lambda traced: Transformer(traced).run(),
    "dot": dot,
    "analyze": analyze,
    "absorb": lambda traced: absorb(normalize(traced)),
    "compose": compose,
    "split": _split,
    "dead code": lambda traced: RemoveDeadCode().run(traced),
    "equal exprs": _merge,
    "samples": lambda traced: check_samples(traced, X),
}


# Modules matter to the tools that look at them, and repeated and dead ops to those that look for them.
CASES = [
    *((tool, plain) for tool in TOOLS if tool not in ("dead code", "equal exprs")),
    *((tool, layers) for tool in ("lint", "insert", "transform", "analyze", "absorb", "split", "samples")),
    *((tool, pieces) for tool in ("compose", "dead code", "equal exprs")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "build"), CASES)
def test_the_tools_are_linear_in_a_long_chain(tool: str, build: Callable[[int], M.Module]) -> None:
    chains = {n: flatten(qtrace.trace(build(n), X, check=False)) for n in LENGTHS}
    sizes = {len(exprs(chain)): chain for chain in chains.values()}
    assert [size >= length * 0.9 for size, length in zip(sizes, LENGTHS, strict=True)] == [True, True]
    assert_linear({size: calls_of(lambda c=chain: TOOLS[tool](c)) for size, chain in sizes.items()})
