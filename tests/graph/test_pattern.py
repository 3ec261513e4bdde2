"""Patterns match where they should, and say in words why they do not match elsewhere."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

from qtrace.errors import GraphError
from qtrace.graph.pattern import Anything, Const, Mismatch, Op, Param, PatternMatch, match
from tests.each import each_of
from tests.graph.samples import ConvBnRelu, chain, expr, function, node, traced_model

CONV = Op(M.Conv2d, Anything("x"), name="conv")
BN = Op(M.BatchNorm2d, CONV, name="bn")
CONV_BN_RELU = Op(F.relu, BN, name="relu")


def assert_matches(pattern, traced, name=None):
    result = match(pattern, node(traced, name) if name else traced.graph.outputs[0])
    assert isinstance(result, PatternMatch), result
    return result


def mismatch_text(pattern, traced, name=None):
    result = match(pattern, node(traced, name) if name else traced.graph.outputs[0])
    assert isinstance(result, Mismatch)
    assert not result
    return str(result)


def test_conv_bn_relu():
    traced = traced_model(ConvBnRelu)
    result = assert_matches(CONV_BN_RELU, traced)
    assert result
    assert result["x"] is node(traced, "x")
    assert result["relu"] is result.node is node(traced, "relu_out")
    assert result.expr("bn") is expr(traced, "bn_out")
    assert [e.outputs[0].name for e in result.exprs] == ["relu_out", "bn_out", "conv_out"]
    assert set(result.bound) == {"x", "conv", "bn", "relu"}


class Shared(M.Module):
    """conv -> relu, and conv -> exp."""

    def __init__(self):
        super().__init__()
        self.conv = M.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        return F.relu(y) + F.sigmoid(y)


def test_a_node_inside_has_no_other_user():
    traced = traced_model(Shared)
    assert mismatch_text(Op(F.relu, CONV), traced, "relu_out") == (
        "conv_out: has 2 users (relu_out, sigmoid_out); the pattern needs it to be used only inside"
    )
    assert_matches(Op(F.relu, Op(M.Conv2d, shared=True)), traced, "relu_out")
    assert_matches(Op("__add__", Op(F.relu, CONV), Op(F.sigmoid, CONV)), traced)


def test_a_node_inside_is_no_graph_output():
    def forward(x):
        y = F.relu(x)
        return F.sigmoid(y), y

    traced = function(forward)
    assert mismatch_text(Op(F.sigmoid, Op(F.relu)), traced) == (
        "relu_out: is a graph output; the pattern needs it to be used only inside"
    )
    assert_matches(Op(F.sigmoid, Op(F.relu, shared=True)), traced)


@each_of(
    ("pattern", "text"),
    [
        (Op(M.Conv2d), "relu_out: produced by F.relu, expected Conv2d"),
        (Op(F.relu, Op(F.sigmoid)), "bn_out: produced by BatchNorm2d, expected F.sigmoid"),
        (Op(F.relu, Op((F.sigmoid, "__mul__", M.Linear))), "expected F.sigmoid or Tensor.__mul__ or Linear"),
        (Op(F.relu, Op(M.BatchNorm2d, Op(M.Conv2d, Op(None)))), "x: is a graph input, expected a call"),
        (Op(F.relu, Anything(), Anything()), "relu_out: has 1 arguments, the pattern has 2"),
        (Op(F.relu, Const()), "bn_out: is computed, expected a constant argument"),
        (Op(F.relu, Param()), "bn_out: produced by BatchNorm2d, expected a parameter"),
        (
            Op(F.relu, Op(M.BatchNorm2d, Op(M.Conv2d, args={"stride": (2, 2)}))),
            "conv_out: argument stride of Conv2d is (1, 1), expected (2, 2)",
        ),
        (Op(F.relu, args={"stride": 1}), "relu_out: F.relu has no argument stride"),
        (Op(F.relu, when=lambda e: False), "relu_out: a condition on F.relu does not hold"),
        (Op(F.relu, when=lambda e: "too late"), "relu_out: too late"),
    ],
)
def test_mismatch_text_says_why_a_pattern_fails(pattern, text):
    assert text in mismatch_text(pattern, traced_model(ConvBnRelu))


def test_patterns_do_not_match_subclasses():
    class Special(M.Conv2d):
        pass

    assert "expected Special" in mismatch_text(
        Op(F.relu, Op(M.BatchNorm2d, Op(Special))), traced_model(ConvBnRelu)
    )


def test_conditions_that_hold():
    traced = traced_model(ConvBnRelu)
    assert_matches(Op(F.relu, when=lambda e: None), traced)
    assert_matches(Op(F.relu, when=lambda e: True), traced)
    assert_matches(Op(None, when=lambda e: e.outputs[0].name == "relu_out"), traced)


def test_arguments_of_functions_and_methods():
    traced = function(lambda x: F.concat([x, x], axis=1).reshape(2, -1).mean(axis=1))
    name = {e.outputs[0].name.split("_")[0]: e.outputs[0].name for e in traced.graph.exprs(False)}
    assert_matches(Op(F.concat, Anything("a"), Anything("a"), args={"axis": 1}), traced, name["concat"])
    assert "argument axis of F.concat is 1, expected 0" in mismatch_text(
        Op(F.concat, args={"axis": 0}), traced, name["concat"]
    )
    assert_matches(Op("reshape", Anything(), Const(2), Const(-1)), traced, name["reshape"])
    assert mismatch_text(Op("reshape", Anything(), Const(3), Const()), traced, name["reshape"]) == (
        "2: is an argument that must be 3"
    )
    assert "has 2 tensor arguments, the pattern has 1" in mismatch_text(
        Op(F.concat, Anything()), traced, name["concat"]
    )


def test_constants():
    traced = function(lambda x: (1 + x) * 2)
    plus = Op(("__add__", "__radd__"), Anything("x"), Const(name="c"), commutative=True)
    result = assert_matches(Op("__mul__", plus, Const(2)), traced)
    assert (result["c"], result["x"]) == (1, node(traced, "x"))
    assert "expected a call" in mismatch_text(Op("__mul__", plus, Op(None)), traced)


def test_commutative_inputs_stand_in_either_order():
    def swish(x):
        return F.sigmoid(x) * x

    def swish2(x):
        return x * F.sigmoid(x)

    strict = Op("__mul__", Anything("x"), Op(F.sigmoid, Anything("x")))
    free = Op("__mul__", Anything("x"), Op(F.sigmoid, Anything("x")), commutative=True)
    assert_matches(strict, function(swish2))
    assert mismatch_text(strict, function(swish)) == "x: is a graph input, expected F.sigmoid"
    for forward in (swish, swish2):
        traced = function(forward)
        assert assert_matches(free, traced)["x"] is node(traced, "x")


def test_commutative_match_backtracks_to_the_other_order():
    # Either sigmoid fits the first input; only one of the two orders makes the last input fit as well.
    traced = function(lambda x: (F.sigmoid(F.relu(x)) + F.sigmoid(x)) * x)
    either = Op("__add__", Op(F.sigmoid, Anything("a")), Op(F.sigmoid, Anything("b")), commutative=True)
    result = assert_matches(Op("__mul__", either, Anything("a")), traced)
    assert (result["a"].name, result["b"].name) == ("x", "relu_out")
    result = assert_matches(Op("__mul__", either, Anything("b")), traced)
    assert (result["a"].name, result["b"].name) == ("relu_out", "x")


def test_equal_pattern_names_match_one_node():
    traced = function(lambda x: F.relu(x) + F.sigmoid(x))
    same = Anything()
    assert_matches(Op("__add__", Op(F.relu, same), Op(F.sigmoid, same)), traced)
    assert mismatch_text(Op("__add__", Anything("a"), Anything("a")), traced) == (
        "sigmoid_out: differs from relu_out, but must be the same"
    )


def test_one_op_object_is_one_expr():
    base = Op(F.relu, Anything("x"))
    pattern = Op("__add__", base, Op(F.sigmoid, base))
    once = function(lambda x: (lambda y: y + F.sigmoid(y))(F.relu(x)))
    twice = function(lambda x: F.relu(x) + F.sigmoid(F.relu(x)))
    assert len(assert_matches(pattern, once).exprs) == 3
    assert "differs from" in mismatch_text(pattern, twice)


def test_parameters():
    class Scaled(M.Module):
        def __init__(self):
            super().__init__()
            self.gain = mge.Parameter(2.0)

        def forward(self, x):
            return x * self.gain

    result = assert_matches(Op("__mul__", Anything("x"), Param("gain")), traced_model(Scaled))
    assert result.expr("gain").name == "gain"
    two = function(lambda x: x * 2)
    assert "2: is a constant argument, expected a parameter" in mismatch_text(
        Op("__mul__", Anything(), Param()), two
    )


def test_a_getattr_is_no_call():
    traced = traced_model(ConvBnRelu)
    assert mismatch_text(Op(None), traced, "conv") == "conv: is a getattr, expected a call"


def test_the_attempt_that_came_furthest_is_reported():
    pattern = Op("__add__", Op(F.relu, Op(F.relu)), Anything(), commutative=True)
    traced = function(lambda x: F.sigmoid(x) + F.relu(F.exp(x)))
    result = match(pattern, traced.graph.outputs[0])
    assert isinstance(result, Mismatch)
    assert (result.where, result.matched) == ("exp_out", 2)


def test_commutative_patterns_need_two_inputs():
    with pytest.raises(ValueError, match="two inputs, not 1"):
        Op("__add__", Anything(), commutative=True)


def test_a_long_pattern_on_a_long_chain():
    pattern = Anything("x")
    for _ in range(100):
        pattern = Op(F.relu, pattern)
    assert assert_matches(pattern, chain(120))["x"].name == "relu_out_19"


def test_a_node_without_a_graph_is_refused():
    gone = function(lambda x: F.relu(x)).graph.outputs[0]
    with pytest.raises(GraphError, match="relu_out does not belong to a graph"):
        match(Op(F.relu), gone)
