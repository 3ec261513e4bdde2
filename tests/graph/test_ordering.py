"""Orders in which chosen exprs stand together: against the definition, on random graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtrace.errors import GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.stepping import Stepper, order_together
from qtrace.graph.tracing.trace import trace
from qtrace.graph.walk import exprs
from qtrace.preparation.passes.expand import expand
from tests.nets import images, net


class _Part(SimpleNamespace):
    """A node or an expr; as in a graph, it equals only itself."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _graph(reads: list[list[int]], silent: tuple[int, ...] = ()) -> list[Any]:
    """Exprs with one output each, but for those that are ``silent``, which read the outputs of others."""
    nodes = [_Part() for _ in reads]
    return [
        _Part(inputs=[nodes[j] for j in read], outputs=[] if i in silent else [nodes[i]])
        for i, read in enumerate(reads)
    ]


def _reach(reads: list[list[int]], unit: dict[int, int]) -> dict[int, set[int]]:
    """What each unit needs, through others too."""
    needed: dict[int, set[int]] = {unit_index: set() for unit_index in unit.values()}
    for i, read in enumerate(reads):
        needed[unit[i]].update(unit[j] for j in read)
    for _ in needed:
        for unit_index in needed:
            needed[unit_index] = needed[unit_index].union(*(needed[other] for other in needed[unit_index]))
    return needed


@given(st.data())
def test_order_together_finds_an_order_if_one_exists(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    reads = [
        data.draw(st.lists(st.integers(0, i - 1), max_size=2) if i else st.just([])) for i in range(size)
    ]
    colours = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    groups = [[i for i in range(size) if colours[i] == c] for c in (1, 2, 3)]  # 0 is in no group
    steps = _graph(reads)
    order = order_together(steps, [[steps[i] for i in group] for group in groups if group])
    unit = {i: group[0] for group in groups for i in group}
    unit = {i: unit.get(i, i) for i in range(size)}
    possible = all(one not in needed for one, needed in _reach(reads, unit).items())
    assert (order is not None) == possible
    if order is None:
        return
    place = {id(step): i for i, step in enumerate(order)}
    assert sorted(place.values()) == list(range(size))
    for i, read in enumerate(reads):
        assert all(place[id(steps[j])] < place[id(steps[i])] for j in read)
    for group in filter(None, groups):
        places = [place[id(steps[i])] for i in group]
        assert places == list(range(places[0], places[0] + len(places)))


def test_the_order_stays_as_far_as_it_can() -> None:
    steps = _graph([[], [0], [], [2], [1, 3], []])
    assert order_together(steps, []) == steps
    order = order_together(steps, [[steps[1], steps[3]]])
    assert order == [steps[i] for i in (0, 2, 1, 3, 4, 5)]


def test_ordering_moves_nothing_past_an_expr_without_outputs() -> None:
    reads: list[list[int]] = [[], [0], [], [], [2]]
    assert order_together(_graph(reads), []) is not None
    for silent, possible in (((), True), ((3,), False)):
        steps = _graph(reads, silent)
        assert (order_together(steps, [[steps[1], steps[4]]]) is not None) is possible


def _levels() -> Any:
    """A layer that is called for two levels, of which the second is made in place behind the first call."""

    def forward(self: M.Module, x: Any) -> Any:
        first = self.b(F.relu(self.a(x)))
        low = F.avg_pool2d(x, 2)
        low += 1.0
        low[:, 0] = 0.5
        return first, self.b(F.relu(self.a(low)))

    flat = flatten(
        trace(net(forward, a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 2, 1)), images(1, 3, 8, 8), check=False)
    )
    expand(flat)
    return flat


def test_a_stepper_computes_groups_together_and_the_same() -> None:
    flat, x = _levels(), mge.Tensor(images(2, 3, 8, 8, seed=1))
    layers = [[e for e in exprs(flat) if e.outputs[0].name in names] for names in (NAMES_A, NAMES_B)]
    assert [len(group) for group in layers] == [2, 2]
    stepper = Stepper(flat, [((x,), {})], layers)
    stepper.advance(layers[0][0])
    stepper.advance(layers[0][1])
    stepper.advance(layers[1][0])
    for want, expr in zip(flat(x), layers[1], strict=True):
        np.testing.assert_array_equal(stepper.outputs(expr, 0)[0].numpy(), want.numpy())
    with pytest.raises(GraphError, match="was passed already"):
        stepper.advance(layers[0][1])
    with pytest.raises(GraphError, match="the results of one another"):
        Stepper(flat, [((x,), {})], [[layers[0][0], layers[1][0]]])


NAMES_A, NAMES_B = ("a_out", "a_1_out"), ("b_out", "b_1_out")
