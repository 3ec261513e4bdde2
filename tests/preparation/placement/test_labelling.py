"""The minimum cut against the enumeration of all labellings."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtrace.preparation.placement import labelling
from qtrace.preparation.placement.labelling import (
    Cuts,
    Layouts,
    Problem,
    Tensor,
    Unit,
    choose_fastest,
    evaluate,
    find_frontier,
    minimize,
)

COSTS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 7.0])


def _subsets(names: list[str]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(names)) if names else st.just(frozenset())


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Graphs of up to seven units, each of which reads one or two earlier values."""
    count = draw(st.integers(1, 7))
    readers: list[list[str]] = [[] for _ in range(count + 1)]
    units = []
    for index in range(count):
        for source in draw(st.lists(st.integers(0, index), min_size=1, max_size=2, unique=True)):
            readers[source].append(f"u{index}")
        integer = draw(st.one_of(st.none(), COSTS))
        label = draw(st.sampled_from([None, None, None, True, False])) if integer is not None else None
        factor = draw(st.sampled_from([0.0, 1.0]))
        unit = Unit(f"u{index}", draw(COSTS), integer, draw(COSTS), label, draw(st.booleans()), factor)
        units.append(unit)
    tensors = tuple(
        Tensor(
            f"t{i}",
            f"u{i - 1}" if i else "",
            tuple(r),
            draw(COSTS),
            draw(COSTS),
            draw(COSTS),
            not r or draw(st.booleans()),
            Layouts(draw(st.booleans()), draw(_subsets(r)), draw(COSTS), draw(COSTS)),
            draw(_subsets(r)),
        )
        for i, r in enumerate(readers)
    )
    return Problem(tuple(units), tensors)


def _minimize_by_enumeration(problem: Problem, weight: float) -> dict[str, bool]:
    """Does what `minimize` does by trying all labellings: the reference for small graphs."""
    free = [unit.name for unit in problem.units if unit.fixed is None]
    fixed = {unit.name: bool(unit.fixed) for unit in problem.units if unit.fixed is not None}
    labellings = (
        {**fixed, **dict(zip(free, values, strict=True))}
        for values in itertools.product((False, True), repeat=len(free))
    )
    return min(labellings, key=lambda labels: evaluate(problem, labels).total(weight))


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.3, 1.0, 10.0]))
def test_the_cut_is_the_minimum_of_all_labellings(problem: Problem, weight: float) -> None:
    best = evaluate(problem, _minimize_by_enumeration(problem, weight)).total(weight)
    labels = minimize(problem, weight)
    assert evaluate(problem, labels).total(weight) == pytest.approx(best, abs=1e-5)
    assert all(labels[unit.name] == unit.fixed for unit in problem.units if unit.fixed is not None)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_more_weight_never_adds_noise(problem: Problem) -> None:
    energies = [evaluate(problem, minimize(problem, weight)) for weight in (0.0, 0.3, 1.0, 10.0)]
    noises = [energy.weighted_noise for energy in energies]
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(noises))


def _chain(*integer_seconds: float) -> Problem:
    """Units of one second in float, each of which reads the one before it."""
    units = tuple(Unit(f"u{i}", 1.0, seconds, 0.01) for i, seconds in enumerate(integer_seconds))
    names = [unit.name for unit in units]
    tensors = tuple(
        Tensor(f"t{i}", names[i - 1] if i else "", tuple(names[i : i + 1]), 0.2, 0.2, 0.01, i == len(names))
        for i in range(len(names) + 1)
    )
    return Problem(units, tensors)


def test_one_slow_kernel_between_fast_ones_runs_on_integers_if_changing_the_form_costs_more() -> None:
    assert minimize(_chain(0.3, 1.1, 0.3), 0.0) == {"u0": True, "u1": True, "u2": True}
    assert minimize(_chain(0.3, 1.5, 0.3), 0.0) == {"u0": True, "u1": False, "u2": True}


def test_noise_takes_ops_out_of_the_integers() -> None:
    assert not any(minimize(_chain(0.3, 0.3, 0.3), 1e6).values())
    assert all(minimize(_chain(0.3, 0.3, 0.3), 1.0).values())


def test_equal_costs_stay_float() -> None:
    problem = Problem(
        (Unit("u", 1.0, 1.0),), (Tensor("x", "", ("u",), 0, 0), Tensor("y", "u", (), 0, 0, leaves=True))
    )
    assert minimize(problem, 0.0) == {"u": False}


def test_a_kernel_that_can_write_floats_adds_no_rounding_of_its_result() -> None:
    tensors = (Tensor("x", "", ("u",), 0.1, 0.1, 0.1), Tensor("y", "u", (), 0.1, 0.1, 5.0, leaves=True))
    for float_result, noise in ((True, 0.2), (False, 5.2)):
        unit = Unit("u", 1.0, 0.1, 0.1, True, float_result)
        assert evaluate(Problem((unit,), tensors), {"u": True}).noise == pytest.approx(noise)


def test_a_form_that_does_not_exist_costs_infinitely_much() -> None:
    problem = Problem((Unit("u", 1.0, None),), ())
    assert math.isinf(evaluate(problem, {"u": True}).seconds)
    assert minimize(problem, 0.0) == {"u": False}


def test_a_graph_without_ops_has_no_labels() -> None:
    assert minimize(Problem((), (Tensor("x", "", (), 0.1, 0.1, leaves=True),)), 1.0) == {}


def test_the_fastest_point_takes_the_least_time_whatever_its_noise() -> None:
    problem = _chain(0.3, 1.5, 0.3)
    point = choose_fastest(problem)
    assert point.labels == {"u0": True, "u1": False, "u2": True}
    assert point.energy == evaluate(problem, point.labels)
    assert point.energy.seconds == find_frontier(problem)[0].energy.seconds


@settings(max_examples=30, deadline=None)
@given(problems())
def test_weights_between_two_with_the_same_best_labels_need_no_cut(problem: Problem) -> None:
    weights = [10.0 ** (exponent / 3) for exponent in range(-9, 4)]
    points = [evaluate(problem, labels) for labels in labelling._minimize_for_all(problem, weights)]
    for weight in weights:
        best = evaluate(problem, minimize(problem, weight)).total(weight)
        assert min(point.total(weight) for point in points) <= best + 1e-4


def test_a_frontier_of_two_points_takes_few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    minimize_cut = Cuts.minimize

    def count(self: Cuts, weight: float) -> dict[str, bool]:
        weights.append(weight)
        return minimize_cut(self, weight)

    monkeypatch.setattr(Cuts, "minimize", count)
    assert len(find_frontier(_chain(0.3, 1.5, 0.3))) <= 2
    assert 0 < len(weights) < 20


def test_one_network_of_cuts_serves_all_weights() -> None:
    problem = _chain(0.3, 1.5, 0.3)
    cuts = Cuts(problem)
    for weight in (1e6, 0.0, 1.0, 0.01):  # in any order
        assert cuts.minimize(weight) == minimize(problem, weight)
