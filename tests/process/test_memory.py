"""Memory that was freed goes back: behind each stage, and while a graph with large weights runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import process
from qtrace.graph import kernels
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import Expr
from qtrace.graph.walk import exprs
from qtrace.preparation.passes.expand import expand
from qtrace.process import LargeFrees, returns_memory
from tests.nets import images, net


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the times that memory is given back."""
    calls: list[int] = []
    monkeypatch.setattr(process, "return_free_memory", lambda: calls.append(len(calls)))
    return calls


def test_a_stage_gives_memory_back_and_keeps_its_result(returned: list[int]) -> None:
    @returns_memory
    def stage(a: int, *, b: int) -> int:
        """Adds."""
        return a + b

    assert stage(1, b=2) == 3
    assert (stage.__name__, stage.__doc__, len(returned)) == ("stage", "Adds.", 1)


def test_memory_goes_back_each_time_that_much_was_freed(returned: list[int]) -> None:
    frees = LargeFrees(100)
    for _ in range(5):
        frees.note(40)
    assert len(returned) == 1
    LargeFrees(100).note(100)
    assert len(returned) == 2


def test_a_run_of_large_parameters_gives_back_on_its_way(
    returned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: M.Module, x: Any) -> Any:
        return self.b(F.relu(self.a(x)))

    x = images(1, 3, 6, 6)
    flat = flatten(trace(net(forward, a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 2, 1)), x, check=False))
    expand(flat)
    monkeypatch.setattr(kernels, "_LARGE_BYTES", 64)
    sizes = kernels.large_reads(flat.graph)
    assert {e.outputs[0].name: size for e, size in sizes.items()}["a_out"] == 4 * 4 * 3 * 9
    runner = Interpreter(flat)
    runner._memory = LargeFrees(400)
    want = flat(mge.Tensor(x)).numpy()
    np.testing.assert_array_equal(runner.run(mge.Tensor(x)).numpy(), want)
    assert returned


def test_large_weights_are_rounded_right_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: M.Module, x: Any) -> Any:
        return self.b(F.relu(self.a(x)))

    x = images(2, 3, 6, 6)
    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 2, 1)), x, check=False)
    prepared = qtrace.prepare(traced, {"backend": "onnxruntime"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    want = converted(mge.Tensor(x)).numpy()
    monkeypatch.setattr(kernels, "_LARGE_BYTES", 16)
    ran: list[str] = []

    class Watch(Interpreter):
        def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
            ran.append(expr.outputs[0].name)
            return super().run_expr(expr, inputs)

    np.testing.assert_array_equal(Watch(converted).run(mge.Tensor(x)).numpy(), want)
    assert sorted(ran) == sorted(expr.outputs[0].name for expr in exprs(converted))
    assert ran.index("a_weight_q") < ran.index("a_out") < ran.index("b_weight_q") < ran.index("b_out")
