"""Rules rewrite what they match, leave a clean graph, and report what they did and did not do."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.lint import check, lint
from qtrace.graph.pattern import Anything, Const, Op
from qtrace.graph.rewrite import RewriteRule, RuleResult, apply_rules
from qtrace.graph.walk import op_label
from tests.graph.samples import IMAGE, ConvBnRelu, chain, function, traced_model
from tests.growth import assert_linear, calls_of


class Fold(RewriteRule):
    """(x + a) + b -> x + (a + b)."""

    pattern = Op(
        "__add__", Op("__add__", Anything("x"), Const(name="a"), name="inner"), Const(name="b"), name="outer"
    )

    def rewrite(self, match, editor):
        out = match.node
        new = editor.call_function(F.add, match["x"], match["a"] + match["b"], after=match.exprs[0], like=out)
        return {out: new}


class FoldFurther(Fold):
    """Folds what ``Fold`` wrote, too."""

    pattern = Op(
        ("__add__", F.add),
        Op(("__add__", F.add), Anything("x"), Const(name="a")),
        Const(name="b"),
        name="outer",
    )


class Double(RewriteRule):
    """relu(x) -> relu(x) * 2: the replacement reads the node that it replaces, two exprs deep."""

    pattern = Op(F.relu, Anything("x"), name="relu")

    def rewrite(self, match, editor):
        out, after = match.node, match.exprs[0]
        first = editor.call_function(F.add, out, out, after=after, like=out)
        return {out: editor.call_function(F.add, first, 0.0, after=first.expr, like=out)}


class DropBn(RewriteRule):
    """A rule whose check has a word to say."""

    pattern = Op(M.BatchNorm2d, Op(M.Conv2d, name="conv"))

    def __init__(self, reason=None):
        self.reason = reason

    def check(self, match):
        return self.reason

    def rewrite(self, match, editor):
        return {match.node: match["conv"]}


def labels(traced):
    return [op_label(e) for e in traced.graph._exprs]


def run(traced):
    return Interpreter(traced).run(mge.Tensor(IMAGE)).numpy()


def test_rewrites_and_leaves_a_clean_graph():
    traced = function(lambda x: F.relu(x + 1.0 + 2.0))
    expected = run(traced)
    assert apply_rules(traced, [Fold()]) == [
        RuleResult("Fold", "add_out", False, "x: is a graph input, expected Tensor.__add__"),
        RuleResult("Fold", "add_out_1", True),
    ]
    assert labels(traced) == ["F.add", "F.relu"]
    check(traced, leftovers=True)
    np.testing.assert_allclose(run(traced), expected, rtol=1e-6)


def test_an_expr_belongs_to_one_match():
    traced = function(lambda x: x + 1.0 + 2.0 + 4.0)
    expected = run(traced)
    results = apply_rules(traced, [Fold()])
    assert labels(traced) == ["F.add", "Tensor.__add__"]
    # The third add reads what the match put in, and that is no __add__.
    assert results[-1].reason == "add_out_3: produced by F.add, expected Tensor.__add__"
    assert [r.applied for r in results] == [False, True, False]
    np.testing.assert_allclose(run(traced), expected, rtol=1e-6)
    assert lint(traced) == []


def test_rules_match_results_of_earlier_rules():
    traced = function(lambda x: x + 1.0 + 2.0 + 4.0 + 8.0)
    expected = run(traced)
    results = apply_rules(traced, [FoldFurther()])
    assert labels(traced) == ["F.add"]
    assert [r.applied for r in results] == [False, True, True, True]
    assert results[0].reason == "x: is a graph input, expected Tensor.__add__ or F.add"
    np.testing.assert_allclose(run(traced), expected, rtol=1e-6)
    assert lint(traced) == []


def test_a_replacement_may_read_what_it_replaces():
    traced = function(lambda x: F.relu(F.relu(x)))
    relu = np.maximum(IMAGE, 0)
    assert [r.applied for r in apply_rules(traced, [Double()])] == [True, True]
    np.testing.assert_array_equal(run(traced), relu * 4)
    assert labels(traced) == ["F.relu", "F.add", "F.add"] * 2
    assert lint(traced) == []


def test_graph_outputs_are_replaced_too():
    def forward(x):
        y = F.relu(x)
        return y, (y, F.sigmoid(y))

    traced = function(forward)
    apply_rules(traced, [Double()])
    a, (b, _) = Interpreter(traced).run(mge.Tensor(IMAGE))
    assert traced.graph.outputs[0] is traced.graph.outputs[1]
    np.testing.assert_array_equal(a.numpy(), np.maximum(IMAGE, 0) * 2)
    np.testing.assert_array_equal(b.numpy(), a.numpy())
    assert lint(traced) == []


def test_a_check_says_why_not():
    traced = traced_model(ConvBnRelu)
    before = labels(traced)
    assert apply_rules(traced, [DropBn("its statistics are computed")]) == [
        RuleResult("DropBn", "bn_out", False, "its statistics are computed")
    ]
    assert labels(traced) == before


def test_dropping_leaves_only_the_module_behind():
    traced = traced_model(ConvBnRelu)
    assert apply_rules(traced, [DropBn()]) == [RuleResult("DropBn", "bn_out", True)]
    assert labels(traced) == ["getattr", "Conv2d", "F.relu"]
    assert [(p.code, p.where) for p in lint(traced)] == [("stale-module", "bn")]


def test_rules_apply_in_order_and_see_each_other():
    traced = function(lambda x: F.relu(x + 1.0 + 2.0))
    results = apply_rules(traced, [Double(), Fold(), Double()])
    assert [r.rule for r in results if r.applied] == ["Double", "Fold", "Double"]
    assert lint(traced) == []


def test_the_larger_pattern_first():
    class Larger(DropBn):
        pattern = Op(F.relu, Op(M.BatchNorm2d, Op(M.Conv2d, name="conv")))

    traced = traced_model(ConvBnRelu)
    results = apply_rules(traced, [Larger(), DropBn()])
    assert [(r.rule, r.applied) for r in results] == [("Larger", True)]
    assert labels(traced) == ["getattr", "Conv2d"]


def test_only_near_misses_of_rules_are_reported():
    traced = function(lambda x: F.relu(F.sigmoid(x)))

    class Miss(DropBn):
        pattern = Op(F.relu, Op(F.relu))

    assert apply_rules(traced, [Miss()]) == [
        RuleResult("Miss", "relu_out", False, "sigmoid_out: produced by F.sigmoid, expected F.relu")
    ]
    assert apply_rules(traced, [DropBn()]) == []


def test_overlapping_matches_say_so():
    traced = function(lambda x: F.relu(F.relu(F.relu(x))))

    class Keep(RewriteRule):
        pattern = Op(F.relu, Op(F.relu, shared=True))

        def rewrite(self, match, editor):
            return {}

    assert [(r.applied, r.reason) for r in apply_rules(traced, [Keep()])] == [
        (False, "x: is a graph input, expected F.relu"),
        (True, ""),
        (False, "relu_out_1: F.relu was rewritten already"),
    ]


def test_only_outputs_of_the_match_are_replaced():
    class Wrong(RewriteRule):
        pattern = Op(F.relu, Anything("x"))

        def rewrite(self, match, editor):
            return {match["x"]: match.node}

    with pytest.raises(GraphError, match="rule Wrong replaces x, which is not an output of its match"):
        apply_rules(function(lambda x: F.relu(x)), [Wrong()])


def test_takes_another_editor():
    editors = []

    class Editor(GraphEditor):
        def __init__(self, traced):
            super().__init__(traced)
            editors.append(self)

    apply_rules(function(lambda x: F.relu(x)), [Double(), Fold()], editor=Editor)
    assert len(editors) == 1  # Fold matches nothing


def test_work_is_linear():
    counts = {}
    for length in (50, 200):
        traced = chain(length)
        results = []
        counts[length] = calls_of(lambda: results.extend(apply_rules(traced, [Double()])))  # noqa: B023
        assert sum(r.applied for r in results) == length
        assert lint(traced) == []
    assert_linear(counts)


def test_is_deterministic():
    def names():
        traced = function(lambda x: F.relu(x + 1.0 + 2.0) + F.relu(x))
        return apply_rules(traced, [Fold(), Double()]), [n.name for n in traced.graph.nodes(False)]

    assert names() == names()
