"""Rules that are written as functions replace what they say, and nothing that only looks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.functional import add, relu

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import AnyNumber, GraphEditor, Interpreter, apply_rules, flatten, function_rule, lint
from qtrace.graph.notes import source_line
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import op_label
from tests.each import each_of
from tests.graph.samples import IMAGE, function
from tests.growth import assert_linear, calls_of
from tests.nets import net

SILU = (lambda x: x * F.sigmoid(x), lambda x: F.silu(x))


def labels(traced: TracedModule) -> list[str]:
    return [op_label(e) for e in traced.graph._exprs]


def run(traced: TracedModule, x: np.ndarray = IMAGE) -> list[np.ndarray]:
    outputs = Interpreter(traced).run(mge.Tensor(x))
    return [t.numpy() for t in (outputs if isinstance(outputs, tuple) else (outputs,))]


def replaced(
    forward: Callable[[Any], Any], pattern: Any, replacement: Any, count: int, **options: Any
) -> TracedModule:
    """Applies the rule, which must match ``count`` times, to the trace of ``forward``; values stay."""
    traced = function(forward)
    before = run(traced)
    results = apply_rules(traced, [function_rule(pattern, replacement, **options)])
    assert sum(r.applied for r in results) == count, results
    assert lint(traced) == []
    for old, new in zip(before, run(traced), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)
    return traced


def test_a_chain_becomes_one_op() -> None:
    traced = replaced(lambda x: F.silu(x) + (x + 1) * F.sigmoid(x + 1), *SILU, count=0)
    assert "F.sigmoid" in labels(traced)  # the two sums are two nodes

    def forward(x: mge.Tensor) -> mge.Tensor:
        y = x * F.sigmoid(x) + 1
        return F.sigmoid(y) * y

    traced = replaced(forward, *SILU, count=2)
    assert labels(traced) == ["F.silu", "Tensor.__add__", "F.silu"]
    assert [n.name for n in traced.graph.outputs] == ["silu_out_1"]


def test_several_calls_take_the_place_of_one() -> None:
    """As the documentation of torch.fx has it: add(m1, m2) in the place of cat and sum."""

    def pattern(a: mge.Tensor, b: mge.Tensor) -> mge.Tensor:
        return F.concat([a, b], axis=1).sum(axis=1)

    def replacement(a: mge.Tensor, b: mge.Tensor) -> mge.Tensor:
        return a.sum(axis=1) + F.sum(b, 1)

    def forward(x: mge.Tensor) -> mge.Tensor:
        y = F.sum(F.concat([x, x + 1], 1), axis=1)
        return F.concat([y, F.abs(y)], axis=1).sum(1)

    traced = replaced(forward, pattern, replacement, count=2)
    assert "F.concat" not in labels(traced)
    assert [tuple(n.shape) for n in traced.graph.outputs] == [(2, 6)]


SPELLINGS: list[tuple[Any, Any]] = [
    (lambda x: x + 2.0, lambda x: F.add(2.0, x)),
    (lambda x: F.sub(x, 2.0), lambda x: x - 2.0),
    (lambda x: 2.0 - x, lambda x: F.sub(2.0, x)),
    (lambda x: F.div(2.0, x), lambda x: 2.0 / x),
    (lambda x: x.reshape(2, -1), lambda x: F.reshape(x, (2, -1))),
    (lambda x: F.transpose(x, (0, 2, 1, 3)), lambda x: x.transpose(0, 2, 1, 3)),
    (lambda x: x.mean(axis=1, keepdims=True), lambda x: F.mean(x, 1, True)),
    (lambda x: F.flatten(x, 2), lambda x: x.flatten(2)),
    (lambda x: -x, lambda x: F.neg(x)),
    (lambda x: F.abs(x), lambda x: abs(x)),
    (lambda x: x @ x, lambda x: F.matmul(x, x)),
    (lambda x: x**2, lambda x: F.pow(x, 2)),
    (lambda x: F.softmax(x, axis=1), lambda x: F.softmax(x, 1)),
    (lambda x: F.maximum(x, 0.5), lambda x: F.maximum(0.5, x)),
    (lambda x: x[:, 1:3], lambda x: x[:, slice(1, 3)]),
    (lambda x: x.reshape(x.shape[0], -1), lambda x: F.reshape(x, (x.shape[0], -1))),
    (lambda x: F.split(x, 2, axis=1)[1], lambda x: F.split(x, 2, 1)[1]),
]


@each_of("index", range(len(SPELLINGS)))
@each_of("swap", [False, True])
def test_spellings_of_one_operation_match_alike(index: int, swap: bool) -> None:
    spellings = SPELLINGS[index]
    pattern, source = spellings[::-1] if swap else spellings
    traced = replaced(source, pattern, lambda x: F.minimum(pattern(x), 1e9), count=1)
    assert labels(traced)[-1] == "F.minimum"


def test_functions_that_were_imported_by_name_match() -> None:
    replaced(lambda x: F.relu(x + 2), lambda x: relu(add(x, 2)), lambda x: relu(add(2, x)), count=1)


def test_in_place_operators_match() -> None:
    def forward(x: mge.Tensor) -> mge.Tensor:
        y = F.relu(x)
        y += 3
        return y / 6

    traced = replaced(forward, lambda x: (x + 3) / 6, lambda x: x / 6 + 0.5, count=1)
    assert labels(traced) == ["F.relu", "Tensor.__truediv__", "Tensor.__add__"]


NEAR_MISSES: list[tuple[Any, Any, str]] = [
    (lambda x: x * F.sigmoid(x + 1), SILU[0], "must be the same"),
    (lambda x: F.relu6(x + 3.5) / 6, lambda x: F.relu6(x + 3) / 6, "is an argument that must be 3"),
    (lambda x: F.relu(x + 3) / 6, lambda x: F.relu6(x + 3) / 6, "produced by F.relu, expected F.relu6"),
    (lambda x: F.neg(x - 1), lambda x: F.neg(1 - x), "x: is computed, expected a constant argument"),
    (lambda x: F.relu(x[None, None, None]), lambda x: F.relu(x[:]), "produced by Tensor.__getitem__"),
    (lambda x: F.relu(x.reshape(2, -1, 2)), lambda x: F.relu(x.reshape(2, -1)), "has 4 arguments"),
    (lambda x: F.relu(x.mean(1, True)), lambda x: F.relu(x.mean(1)), "must be False"),
    (lambda x: F.neg(F.split(x, 2, 1)[0]), lambda x: F.neg(F.split(x, 2, 1)[1]), "another output of F.split"),
    (lambda x: F.relu(x * 2), lambda x, y: F.relu(x * y), "is a constant argument, expected a tensor"),
]


@each_of("index", range(len(NEAR_MISSES)))
def test_a_near_miss_is_left_with_its_reason(index: int) -> None:
    source, pattern, reason = NEAR_MISSES[index]
    traced = function(source)
    before = labels(traced)
    results = apply_rules(traced, [function_rule(pattern, pattern)])
    assert labels(traced) == before
    assert not any(r.applied for r in results)
    assert any(reason in r.reason for r in results), results


def test_a_call_that_is_used_outside_stays() -> None:
    def shared(x: mge.Tensor) -> mge.Tensor:
        gate = F.sigmoid(x)
        return x * gate + gate

    traced = function(shared)
    results = apply_rules(traced, [function_rule(*SILU, name="silu")])
    assert [(r.rule, r.applied) for r in results if "users" in r.reason] == [("silu", False)]
    assert "sigmoid_out: has 2 users (mul_out, add_out)" in "".join(r.reason for r in results)

    def returned(x: mge.Tensor) -> Any:
        gate = F.sigmoid(x)
        return x * gate, gate

    traced = function(returned)
    results = apply_rules(traced, [function_rule(*SILU)])
    assert any("is a graph output" in r.reason for r in results)
    assert not any(r.applied for r in results)


def test_a_match_may_be_every_output_of_the_graph() -> None:
    def forward(x: mge.Tensor) -> Any:
        y = x * F.sigmoid(x)
        return y, y, F.relu(y)

    traced = replaced(forward, *SILU, count=1)
    assert [n.name for n in traced.graph.outputs] == ["silu_out", "silu_out", "relu_out"]


def test_a_replacement_may_return_a_parameter() -> None:
    traced = replaced(lambda x: F.relu(F.neg(F.neg(x))), lambda x: F.neg(F.neg(x)), lambda x: x, count=1)
    assert labels(traced) == ["F.relu"]


def test_a_pattern_with_several_results_is_replaced_as_a_whole() -> None:
    def pattern(x: mge.Tensor, k: float) -> Any:
        y = F.exp(x)
        return y * k, y + k

    def forward(x: mge.Tensor) -> Any:
        y = F.exp(x)
        z = y * 2
        early = F.relu(z)  # reads a result before the other one is computed
        other = F.neg(x)
        w = 2 + y
        return early + w, F.abs(z), other * w

    def replacement(x: mge.Tensor, k: float) -> Any:
        y = F.exp(x - 1) * np.e
        return y * k, y + k

    example = (IMAGE, AnyNumber(2))
    traced = replaced(forward, pattern, replacement, count=1, example=example)
    assert labels(traced).count("Tensor.__sub__") == 1
    assert labels(traced).index("F.relu") > labels(traced).index("Tensor.__sub__")


def test_results_may_share_arguments_only_and_be_steps_of_each_other() -> None:
    def products(x: mge.Tensor, a: mge.Tensor, b: mge.Tensor) -> Any:
        return F.matmul(x, a), F.matmul(x, b)

    def merged(x: mge.Tensor, a: mge.Tensor, b: mge.Tensor) -> Any:
        return F.split(F.matmul(x, F.concat([a, b], axis=3)), [a.shape[3]], axis=3)

    shapes = ((2, 4, 6, 6), (2, 4, 6, 6), (2, 4, 6, 3))
    example = [np.ones(shape, np.float32) for shape in shapes]
    traced = replaced(
        lambda x: (F.matmul(x, x + 1).sum(), F.relu(F.matmul(x, x[:, :, :, 3:]))),
        products,
        lambda x, a, b: tuple(merged(x, a, b)),
        count=1,
        example=example,
    )
    assert labels(traced).count("F.matmul") == 1

    def steps(x: mge.Tensor) -> Any:
        y = F.exp(x)
        return F.neg(y), y

    replaced(lambda x: F.exp(x) * 1 - F.neg(F.exp(x)), steps, lambda x: (-F.exp(x), F.exp(x)), count=1)
    parts = replaced(
        lambda x: F.split(F.abs(x), 2, 1)[1] - F.split(x, 2, axis=1)[0] * F.split(x, 2, 1)[1],
        lambda x: F.split(x, 2, 1),
        lambda x: (x[:, :2], x[:, 2:]),
        count=3,
    )
    assert "F.split" not in labels(parts)


def test_results_that_need_each_other_through_other_calls_stay() -> None:
    pattern = (lambda x, y: (F.exp(x), x * y), lambda x, y: (F.exp(x), y * x))

    def forward(x: mge.Tensor) -> mge.Tensor:
        y = F.relu(x)
        return y * F.sin(F.exp(y))

    traced = function(forward)
    before = labels(traced)
    results = apply_rules(traced, [function_rule(*pattern)])
    assert labels(traced) == before
    assert "exp_out: another call of the match needs it through calls outside" in {r.reason for r in results}


def test_two_inputs_and_a_shared_inner_node() -> None:
    def pattern(x: mge.Tensor, y: mge.Tensor) -> mge.Tensor:
        total = x - y
        return total * total + total

    traced = replaced(
        lambda x: (F.exp(x) - x) + (F.exp(x) - x) * (F.exp(x) - x), pattern, lambda x, y: x - y, count=0
    )

    def forward(x: mge.Tensor) -> mge.Tensor:
        total = F.exp(x) - x
        return total + total * total

    traced = replaced(forward, pattern, lambda x, y: (x - y) * (x - y + 1), count=1)
    assert labels(traced).count("F.exp") == 1


def test_numbers_may_be_wildcards() -> None:
    def pattern(x: mge.Tensor, slope: float) -> mge.Tensor:
        return F.maximum(x, x * slope)

    example = (IMAGE, AnyNumber(0.1))
    traced = replaced(
        lambda x: F.maximum(F.maximum(x, 0.25 * x), F.relu(x) * 0.5),
        pattern,
        lambda x, slope: F.leaky_relu(x, slope),
        count=1,
        example=example,
    )
    (leaky,) = (e for e in traced.graph._exprs if op_label(e) == "F.leaky_relu")
    assert leaky.args[1] == 0.25

    def axes(x: mge.Tensor, axis: int) -> mge.Tensor:
        return F.exp(x).sum(axis, True)

    example = (IMAGE, AnyNumber(1))
    replaced(lambda x: F.sum(F.exp(x), axis=3, keepdims=True), axes, axes, count=1, example=example)


def test_one_number_in_two_places_must_be_one_value() -> None:
    def pattern(x: mge.Tensor, k: float) -> mge.Tensor:
        return F.relu(x + k) / k

    rule = function_rule(pattern, pattern, example=(IMAGE, AnyNumber(2.0)))
    assert [r.applied for r in apply_rules(function(lambda x: F.relu(x + 3.0) / 3.0), [rule])] == [True]
    results = apply_rules(function(lambda x: F.relu(x + 3.0) / 6.0), [rule])
    assert [r.reason for r in results] == ["6.0: differs from 3.0, but must be the same"]


def test_a_check_sees_tensors_and_numbers_by_name() -> None:
    matches: list[Any] = []

    def check(match: Any) -> str | None:
        matches.append((match["x"].name, match["k"]))
        return None if match["k"] > 1 else "k is too small"

    rule = function_rule(
        lambda x, k: F.relu(x * k), lambda x, k: F.relu(x) * k, example=(IMAGE, AnyNumber()), check=check
    )
    results = apply_rules(function(lambda x: F.relu(F.relu(x * 0.5) * 2)), [rule])
    assert matches == [("x", 0.5), ("relu_out", 2)]
    assert [(r.applied, r.reason) for r in results] == [(False, "k is too small"), (True, "")]


def test_replacements_are_traced_at_the_shapes_of_their_match() -> None:
    def replacement(x: mge.Tensor) -> mge.Tensor:
        rows = F.arange(x.ndim)  # of the match's rank, not of the example's
        return F.neg(x) + rows.sum() * 0

    traced = replaced(
        lambda x: F.neg(x.reshape(2, -1)) + F.neg(x.reshape(2, -1)[:, :1]), lambda x: F.neg(x), replacement, 2
    )
    by_name = {n.name: tuple(n.shape) for e in traced.graph._exprs for n in e.outputs}
    assert {shape for name, shape in by_name.items() if name.startswith("neg_out")} == {(2, 144), (2, 1)}


def test_a_replacement_that_does_not_fit_is_a_reason() -> None:
    rule = function_rule(lambda x: F.neg(x), lambda x: F.neg(x).reshape(2, 4, 4, 4), name="fixed")
    results = apply_rules(function(lambda x: F.neg(x)), [rule])
    assert [r.applied for r in results] == [False]
    assert results[0].reason.startswith("the replacement fails (test_function_rule.py:")
    assert "on (2, 4, 6, 6) float32: RuntimeError" in results[0].reason
    rule = function_rule(lambda x: F.neg(x), lambda x: F.neg(x)[:, :4, :4, :4])
    (result,) = apply_rules(function(lambda x: F.neg(x)), [rule])
    assert result.reason == ("the replacement gives (2, 4, 4, 4) float32, the pattern (2, 4, 6, 6) float32")


def test_the_result_is_a_graph_like_any_other(tmp_path: Any) -> None:
    traced = replaced(
        lambda x: F.softmax(x * F.sigmoid(x), axis=1),
        *(SILU[0], lambda x: F.silu(x.reshape(x.shape))),
        count=1,
    )
    qtrace.save(traced, tmp_path / "net.mge")
    again = qtrace.load(tmp_path / "net.mge")
    assert labels(again) == labels(traced)
    np.testing.assert_array_equal(run(again)[0], run(traced)[0])
    np.testing.assert_allclose(run(again, IMAGE[:1])[0], run(traced)[0][:1], rtol=1e-6)


def test_a_replacement_has_the_source_line_of_what_it_replaces() -> None:
    traced = flatten(qtrace.trace(net(lambda self, x: F.relu(x * F.sigmoid(x))), IMAGE, check=False))
    lines = {op_label(e): source_line(e) for e in traced.graph._exprs}
    apply_rules(traced, [function_rule(*SILU)])
    assert [source_line(e) for e in traced.graph._exprs] == [lines["Tensor.__mul__"], lines["F.relu"]]
    assert "test_function_rule.py:" in lines["Tensor.__mul__"]


@each_of(
    ("pattern", "replacement", "example", "message"),
    [
        (lambda x: (x, x + 1), lambda x: x, None, "the pattern returns its parameter x as it is"),
        (lambda x: F.split(x, 2, 1), lambda x: x, None, "the replacement gives 1 results, the pattern 2"),
        (lambda x, y: (-x, -y), lambda x, y: (x, y), None, "the results of the pattern share no tensor"),
        (lambda x: 3, lambda x: x, None, "the pattern returns a int: it must return a tensor, or a tuple"),
        (lambda x: {"y": -x}, lambda x: x, None, "the pattern returns a dict"),
        (lambda x: (), lambda x: x, None, "the pattern returns a tuple"),
        (lambda x: x, lambda x: x, None, "the pattern returns its parameter x as it is"),
        (lambda x, y: x + 1, lambda x, y: x, None, "no call of the pattern reads y"),
        (lambda x, k: x * (2 * k), lambda x, k: x, (IMAGE, AnyNumber(2.0)), "no call of the pattern reads k"),
        (lambda x: x + 1, lambda x, y: x, None, r"takes other parameters than the pattern \(x\)"),
        (lambda *x: x[0] + 1, lambda *x: x[0], None, r"without \* and \*\*"),
        (lambda x: x + 1, lambda x: x[:1], None, r"on the example, the replacement gives \(1, 4, 4, 4\)"),
        (
            lambda x: F.matmul(x, x[:, :3, :3]),
            lambda x: x,
            None,
            r"fails \(test_function.*4\) float32: \w*Error",
        ),
        (
            lambda x: x + mge.Tensor(np.ones(4, "float32")),
            lambda x: x,
            None,
            "reads a tensor that is neither",
        ),
        (lambda x: M.Linear(4, 4)(x), lambda x: x, None, "neither a parameter nor|calls a module"),
        (lambda x: x + 1, lambda x: x, (), "takes 1 parameters .* there are 0 examples"),
        (lambda x: x + 1, lambda x: x, (2.0,), "the example of x is a float"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: Any, replacement: Any, example: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        function_rule(pattern, replacement, example=example, name="mine")
    apply_rules(function(lambda x: x + 1), [function_rule(lambda x: x + 1, lambda x: 1 + x)])  # all is well


def test_any_number_stands_for_numbers() -> None:
    with pytest.raises(GraphError, match="stands for an int or a float, not for True"):
        AnyNumber(True)


def _gates(count: int) -> TracedModule:
    traced = function(lambda x: x * F.sigmoid(x))
    first = last = traced.graph.outputs[0]
    with GraphEditor(traced) as editor:
        for _ in range(count - 1):
            gate = editor.call_function(F.sigmoid, last, after=last.expr, like=first)
            last = editor.call_function(F.mul, last, gate, after=gate.expr, like=first)
        traced.graph.outputs[:] = [last]
    return traced


def test_work_is_linear() -> None:
    rule = function_rule(*SILU)
    counts = {}
    for length in (50, 200):
        traced = _gates(length)
        counts[length] = calls_of(lambda: apply_rules(traced, [rule]))  # noqa: B023
        assert labels(traced) == ["F.silu"] * length
    assert_linear(counts)
