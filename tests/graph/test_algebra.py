"""Patterns of sums and products match every order and association, and their search stays bounded."""

from __future__ import annotations

import itertools
from typing import Any

import megengine.functional as F
import pytest

from qtrace.graph.algebra import AnyOf, AnyTensor, Minus, Number, Operation, Power, Product, Sum, close
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import OperationReader
from qtrace.graph.pattern import Matcher, Mismatch, PatternMatch, match
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from tests.each import each_of
from tests.graph.samples import function

X = AnyTensor("x")
GATE = Operation("sigmoid", X)


def _match(pattern: Any, forward: Any) -> PatternMatch | Mismatch:
    traced = function(forward)  # the graph lives as long as its module
    return match(pattern, traced.graph.outputs[0])


@each_of(
    ("forward", "scale"),
    [
        (lambda x: x * F.sigmoid(x), 1.0),
        (lambda x: 2 * F.sigmoid(x) * x / 4, 0.5),
        (lambda x: -(F.sigmoid(x) / 2) * (x * 3.0), -1.5),
        (lambda x: x / (1 / F.sigmoid(x)), 1.0),
    ],
)
def test_a_product_is_its_factors_in_any_order_and_a_number(forward: Any, scale: float) -> None:
    matched = _match(Product(X, GATE, scale="scale"), forward)
    assert isinstance(matched, PatternMatch)
    assert matched["scale"] == pytest.approx(scale)
    assert matched["x"].name == "x"


@each_of(
    "forward",
    [lambda x: x * x * x, lambda x: x**3, lambda x: F.square(x) * x, lambda x: x / (x**-2)],
)
def test_equal_factors_are_a_power(forward: Any) -> None:
    assert isinstance(_match(Product(Power(X, 3.0)), forward), PatternMatch)


def test_the_root_of_a_product_is_no_product() -> None:
    assert isinstance(_match(Product(Power(X, 1.0), GATE), lambda x: F.sqrt(x * x) * F.sigmoid(x)), Mismatch)


@pytest.mark.parametrize(
    ("forward", "constant"),
    [(lambda x: x - F.sigmoid(x), 0.0), (lambda x: 2 - F.sigmoid(x) + x - 5, -3.0)],
)
def test_a_sum_is_its_terms_in_any_order_and_a_number(forward: Any, constant: float) -> None:
    matched = _match(Sum(X, Minus(GATE), constant="c"), forward)
    assert isinstance(matched, PatternMatch)
    assert matched["c"] == pytest.approx(constant)


def test_a_mismatch_says_what_it_met() -> None:
    assert (
        str(_match(Product(X, GATE), lambda x: F.relu(x)))
        == "relu_out: produced by F.relu, expected a product"
    )
    assert (
        str(_match(Product(X, GATE), lambda x: x * F.tanh(x)))
        == "tanh_out: produced by F.tanh, expected sigmoid"
    )
    clip = Operation("clip", X, Number(value=0.0), Number("high"))
    assert str(_match(clip, lambda x: F.clip(x, 1, 6))) == "1: is 1, expected 0"
    assert isinstance(_match(AnyOf(GATE, clip), lambda x: F.relu6(x)), PatternMatch)


def test_constants_are_equal_to_a_millionth() -> None:
    assert close(0.16666667, 1 / 6)
    assert not close(0.16667, 1 / 6)
    assert close(0.0, 0.0)
    assert not close(1e-5, 0.0)


def _doublings(func: Any, length: int) -> TracedModule:
    traced = function(lambda x: func(x, x))
    last = first = traced.graph.outputs[0]
    with GraphEditor(traced) as editor:
        for _ in range(length - 1):
            last = editor.call_function(func, last, last, after=last.expr, like=first)
        traced.graph.outputs[:] = [last]
    return traced


@pytest.mark.parametrize("func", [F.mul, F.add])
def test_the_search_grows_with_the_graph_not_with_the_ways_to_open_it(
    func: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node is read twice by the next one: without a bound there are two to the length ways."""
    counts = []
    read = OperationReader.operation
    for length in (8, 16):
        reads: list[Any] = []
        monkeypatch.setattr(
            OperationReader, "operation", lambda self, v, reads=reads: reads.append(v) or read(self, v)
        )
        traced = _doublings(func, length)
        x, y = AnyTensor("x"), AnyTensor("y")
        for node in (expr.outputs[0] for expr in exprs(traced)):
            for pattern in (Product(x, y, x, y, scale="scale"), Sum(x, y, x, y, constant="constant")):
                list(itertools.islice(Matcher(traced.graph).matches(pattern, node), 32))
        counts.append(len(reads))
    assert 0 < counts[1] < 4 * counts[0]


def test_a_pattern_needs_what_each_of_its_matches_has():
    assert Product(X, GATE).needs() == {"sigmoid"}
    assert Sum(Operation("tanh", GATE), X).needs() == {"sigmoid", "tanh"}
    assert AnyOf(GATE, Operation("tanh", GATE)).needs() == {"sigmoid"}
    assert AnyOf(X, GATE).needs() == frozenset()
