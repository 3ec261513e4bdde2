"""Passes with a contract: what they change, what they must leave, what they refuse; linear in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import GraphBuilder, GraphEditor, exprs, flatten, lint, set_parameter
from qtrace.graph.passes import (
    CONSTANTS_FOLDED,
    FLAT,
    NO_COMMON_SUBEXPRESSIONS,
    NO_DEAD_CODE,
    Condition,
    FoldConstants,
    GraphPass,
    MergeCommonSubexpressions,
    PassReport,
    RemoveDeadCode,
    run_passes,
)
from qtrace.graph.walk import op_label
from tests.graph.counting import count_calls
from tests.nets import net

X = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
ALL = (RemoveDeadCode(), MergeCommonSubexpressions(), FoldConstants())


def _flat(forward: Callable[..., Any], **children: Any) -> Any:
    return flatten(qtrace.trace(net(forward, **children), X, check=False))


def _ops(traced: Any) -> list[str]:
    return [op_label(e) for e in exprs(traced) if op_label(e) not in ("getattr", "constant")]


def _run(traced: Any, *passes: GraphPass) -> list[PassReport]:
    """Runs passes, after which the outputs must be the same to the last bit."""
    before = [y.numpy() for y in _leaves(traced(mge.Tensor(X)))]
    reports = run_passes(traced, passes)
    assert lint(traced) == []
    for old, new in zip(before, _leaves(traced(mge.Tensor(X))), strict=True):
        np.testing.assert_array_equal(new.numpy(), old)
    return reports


def _leaves(outputs: Any) -> Any:
    return outputs if isinstance(outputs, (tuple, list)) else [outputs]


def test_dead_attributes_and_exprs_go() -> None:
    traced = _flat(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(4, 4, 1), other=M.Conv2d(4, 4, 1))
    set_parameter(traced, "extra", mge.Parameter(np.ones(3, np.float32)))
    dead = F.exp
    with GraphEditor(traced) as editor:
        node = exprs(traced)[-1].outputs[0]
        editor.call_function(dead, node, after=node.expr, like=node)
        editor.commit = lambda: None  # type: ignore[method-assign]  # leaves the dead expr in the graph
    traced.graph._exprs.append(editor._after[node.expr][0])
    assert NO_DEAD_CODE.find(traced) == ["nothing uses exp_out", "no expr reads extra"]
    (report,) = _run(traced, RemoveDeadCode())
    assert report.changed == ("exp_out: nothing uses it", "extra: no expr reads it")
    assert {n for n, _ in traced.named_parameters()} == {"conv.weight", "conv.bias"}
    assert _run(traced, RemoveDeadCode())[0].changed == ()


def test_parts_of_a_module_that_are_read_stay() -> None:
    builder = GraphBuilder()
    x = builder.input("x", X.shape)
    builder.parameter("block.unread", np.ones(3, np.float32))
    gain = builder.parameter("block.gain", np.ones((1, 4, 1, 1), np.float32))
    traced = builder.finish(builder.call_function(F.mul, x, gain))
    (report,) = _run(traced, RemoveDeadCode())
    assert report.changed == ("block.unread: no expr reads it",)
    assert [n for n, _ in traced.named_parameters()] == ["block.gain"]


def test_equal_ops_are_merged_in_every_spelling() -> None:
    def forward(self: Any, x: Any) -> Any:
        a = F.relu(x + 1) * self.bn(x)
        b = F.mul(self.bn(x), F.relu(F.add(x, 1)))
        return a - b, F.concat([x[:, :2], x[:, :2], x[:, 1:]], 1)

    traced = _flat(forward, bn=M.BatchNorm2d(4))
    _, report = _run(traced, RemoveDeadCode(), MergeCommonSubexpressions())
    assert len(report.changed) == 5
    assert _ops(traced).count("BatchNorm2d") == 1
    assert _ops(traced).count("Tensor.__getitem__") == 2
    assert _ops(traced).count("F.relu") == 1


def test_constants_of_another_type_or_value_are_not_merged() -> None:
    def forward(self: Any, x: Any) -> Any:
        return x * 2.0, x * 3.0, F.flatten(x, 1), F.flatten(x, 2), x * self.a, x * self.b

    same = np.ones((1, 4, 1, 1), np.float32)
    traced = _flat(forward, a=mge.Parameter(same), b=mge.Parameter(same))
    _, report = _run(traced, RemoveDeadCode(), MergeCommonSubexpressions())
    assert report.changed == ()


def test_equal_outputs_are_left_with_the_reason() -> None:
    traced = _flat(lambda self, x: (F.relu(x), F.relu(x)))
    _, report = _run(traced, RemoveDeadCode(), MergeCommonSubexpressions())
    assert report.changed == ()
    assert report.left == ("relu_out_1: it is an output beside relu_out, which is equal",)


def _written(self: Any, x: Any) -> Any:
    a, b = x + 1, x + 1
    a[:, :2] = 0.0
    return a - b


def _random(self: Any, x: Any) -> Any:
    return F.nn.dropout(x, 0.5, True) - F.nn.dropout(x, 0.5, True)


@pytest.mark.parametrize(
    ("forward", "label", "count"), [(_written, "Tensor.__add__", 2), (_random, "F.dropout", 2)]
)
def test_what_is_written_into_or_random_is_not_merged(forward: Any, label: str, count: int) -> None:
    traced = _flat(forward)
    run_passes(traced, ALL)
    assert [op for op in _ops(traced) if op.endswith(label.removeprefix("F."))] == [label] * count


def _own(x: Any) -> Any:
    """A function of the user's own: it may count its calls."""
    return F.relu(x)


def test_a_function_of_ones_own_is_not_merged() -> None:
    builder = GraphBuilder()
    x = builder.input("x", X.shape)
    first, second = (builder.call_function(_own, x) for _ in range(2))
    traced = builder.finish(builder.call_function(F.add, first, second))
    run_passes(traced, ALL)
    assert sum(op.endswith("_own") for op in _ops(traced)) == 2


def test_a_module_in_training_is_not_merged() -> None:
    traced = _flat(lambda self, x: self.bn(x) + self.bn(x), bn=M.BatchNorm2d(4))
    traced.train()
    run_passes(traced, ALL)
    assert _ops(traced).count("BatchNorm2d") == 2


def test_constants_and_buffers_are_folded_but_no_parameter_or_shape() -> None:
    def forward(self: Any, x: Any) -> Any:
        scale = F.exp(self.buffer) + 1
        grid = F.arange(6) * 2
        return x * scale + grid, x * F.exp(self.gain), x.reshape(x.shape[0], -1)

    buffer = mge.Tensor(np.ones((1, 4, 1, 1), np.float32))
    gain = mge.Parameter(np.ones((1, 4, 1, 1), np.float32))
    traced = _flat(forward, buffer=buffer, gain=gain)
    *_, report = _run(traced, *ALL)
    assert [line.partition(": stored as ")[2] for line in report.changed] == [
        "folded_add_out",
        "folded_mul_out",
    ]
    assert _ops(traced).count("F.exp") == 1  # of the parameter
    assert any("GetVarShape" in op for op in _ops(traced))
    assert {n for n, _ in traced.named_buffers()} == {"folded_add_out", "folded_mul_out"}
    other = traced(mge.Tensor(X[:1]))  # another batch size
    assert tuple(other[2].shape) == (1, 144)
    *_, report = _run(traced, *(RemoveDeadCode(), FoldConstants(parameters=True)))
    assert "F.exp" not in _ops(traced)
    assert len(report.changed) == 1


def test_a_folded_name_that_is_taken_gets_another() -> None:
    buffer = mge.Tensor(np.ones(1, np.float32))
    traced = _flat(
        lambda self, x: (x + F.exp(self.buffer)) * self.folded_exp_out,
        buffer=buffer,
        folded_exp_out=buffer * 2,
    )
    *_, report = _run(traced, RemoveDeadCode(), FoldConstants())
    assert report.changed == ("exp_out: stored as folded_exp_out_1",)


def test_a_graph_that_lacks_what_a_pass_requires_is_refused_unchanged() -> None:
    class Block(M.Module):
        def forward(self, x: Any) -> Any:
            return F.relu(x)

    nested = qtrace.trace(net(lambda self, x: self.block(x), block=Block()), X, check=False)
    with pytest.raises(
        GraphError, match=r"RemoveDeadCode takes a graph that is flat, but .* use qtrace.graph.flatten"
    ):
        RemoveDeadCode().run(nested)
    assert FLAT.find(None) == ["a NoneType was given"]  # type: ignore[arg-type]
    traced = _flat(lambda self, x: F.relu(x))
    set_parameter(traced, "extra", mge.Parameter(np.ones(3, np.float32)))
    with pytest.raises(
        GraphError, match="that has no dead code, but no expr reads extra: run RemoveDeadCode first"
    ):
        MergeCommonSubexpressions().run(traced)
    assert traced.extra is not None


def test_a_pass_that_breaks_its_contract_is_named() -> None:
    class Broken(GraphPass):
        ensures = (Condition("has no relu", lambda traced: [op for op in _ops(traced) if op == "F.relu"]),)

        def change(self, traced: Any) -> PassReport:
            return PassReport(self.name)

    with pytest.raises(
        GraphError, match="Broken broke its contract: afterwards a graph has no relu, but F.relu"
    ):
        Broken().run(_flat(lambda self, x: F.relu(x)))


def test_the_conditions_name_what_contradicts_them() -> None:
    buffer = mge.Tensor(np.ones(1, np.float32))
    traced = _flat(lambda self, x: F.relu(x) + F.relu(x) + F.exp(self.buffer), buffer=buffer)
    assert NO_COMMON_SUBEXPRESSIONS.find(traced) == ["relu_out_1 equals relu_out"]
    assert CONSTANTS_FOLDED.find(traced) == ["exp_out is computed from constants"]


def _chain(length: int) -> Any:
    builder = GraphBuilder()
    y = builder.input("x", (1, 2))
    for index in range(length):
        fixed = builder.call_function(F.exp, builder.parameter(f"b{index}", np.zeros(2, np.float32), False))
        y = builder.call_function(
            F.add, y, builder.call_function(F.mul, fixed, builder.call_function(F.relu, y))
        )
        y = builder.call_function(F.sub, y, builder.call_function(F.relu, y))
    return builder.finish(y)


def test_the_work_grows_in_step_with_the_graph() -> None:
    short, long = _chain(20), _chain(80)
    assert count_calls(lambda: run_passes(long, ALL)) < 5 * count_calls(lambda: run_passes(short, ALL))
    assert all(not p.change(long).changed for p in ALL)


@pytest.mark.slow
def test_a_chain_of_thousands_of_exprs_passes() -> None:
    traced = _chain(900)  # 6,300 exprs
    assert len(exprs(traced)) > 5_000
    reports = run_passes(traced, ALL)
    assert len(reports[2].changed) == 900
