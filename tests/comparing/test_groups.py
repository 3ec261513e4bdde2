"""The columns of outputs in groups of like range, by structure and by values."""

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest

import qtrace
from qtrace.comparing.groups import find_groups
from qtrace.comparing.runs import outputs_of
from qtrace.comparing.structure import _find_combinations
from tests.each import each_of

_X = np.random.RandomState(0).randn(2, 10, 4, 4).astype("float32")


def _groups(function, x=_X):
    traced = qtrace.trace(function, mge.tensor(x), check=False)
    groups = find_groups(traced, outputs_of(traced, [x]))
    return [(g.output, g.axis, g.runs) for g in groups]


def _boxes(x):
    return F.exp(x) * 64


def _scores(x):
    return F.sigmoid(x - 3)


def _packed(x, axis=1):
    return F.concat([_boxes(x[:, :4]), _scores(x[:, 4:])], axis=axis)


def _set(x):
    y = F.zeros_like(x)
    y[:, 4:] = _scores(x[:, 4:])
    y[:, :4] = _boxes(x[:, :4])
    return y


def _rows(x):
    return F.flatten(x, 2).transpose(0, 2, 1)


def _levels(x):
    """Boxes and scores of two levels, which follow one another along the axis of anchors."""
    both = [F.concat([_boxes(v[..., :4]), _scores(v[..., 4:])], axis=2) for v in (_rows(x), _rows(x * 0.9))]
    return F.concat(both, axis=1)


def _anchors(x):
    """Three anchors of boxes, objectness and classes, interleaved in the axis of channels."""
    y = F.concat([x, x[:, :5]], axis=1).reshape(2, 3, 5, 4, 4)
    return F.concat([_boxes(y[:, :, :2]), _scores(y[:, :, 2:])], axis=2).reshape(2, 15, 4, 4)


BOXES_AND_SCORES = {
    "concat": (_packed, 1, [(0, 4)], [(4, 10)]),
    "scaled behind": (lambda x: _packed(x) * 2.0, 1, [(0, 4)], [(4, 10)]),
    "last axis": (lambda x: _packed(x).transpose(0, 2, 3, 1), 3, [(0, 4)], [(4, 10)]),
    "anchors x columns": (lambda x: _rows(_packed(x)), 2, [(0, 4)], [(4, 10)]),
    "rows": (lambda x: _rows(_packed(x)).reshape(-1, 10), 1, [(0, 4)], [(4, 10)]),
    "slice of it": (lambda x: _packed(x)[:, 2:], 1, [(0, 2)], [(2, 8)]),
    "setitem": (_set, 1, [(0, 4)], [(4, 10)]),
    "levels along anchors": (_levels, 2, [(0, 4)], [(4, 10)]),
    "one column": (lambda x: F.concat([_boxes(x), _scores(x[:, :1])], axis=1), 1, [(0, 10)], [(10, 11)]),
    "stack": (lambda x: F.stack([_boxes(x), _scores(x)], axis=4), 4, [(0, 1)], [(1, 2)]),
    "in the middle": (
        lambda x: F.concat([_boxes(x[:, :2]), _scores(x[:, 2:8]), _boxes(x[:, 8:])], axis=1),
        1,
        [(0, 2), (8, 10)],
        [(2, 8)],
    ),
    "interleaved": (_anchors, 1, [(0, 2), (5, 7), (10, 12)], [(2, 5), (7, 10), (12, 15)]),
    "one vector": (lambda x: _packed(x)[0, :, 0, 0], 0, [(0, 4)], [(4, 10)]),
    "no axis of samples": (lambda x: F.flatten(_packed(x)[0], 1), 0, [(0, 4)], [(4, 10)]),
    "one after the other": (
        lambda x: F.concat([_boxes(x), _scores(x)], axis=0),
        0,
        [(0, 2)],
        [(2, 4)],
    ),
    "batch of 1": (lambda x: _packed(x[:1].mean(axis=(2, 3))), 1, [(0, 4)], [(4, 10)]),
}


@each_of("name", BOXES_AND_SCORES)
def test_boxes_and_scores_are_two_groups(name):
    function, axis, boxes, scores = BOXES_AND_SCORES[name]
    assert _groups(function) == [(0, axis, tuple(boxes)), (0, axis, tuple(scores))]


def _rare(x):
    """Scores of which half are a thousand times smaller."""
    return F.sigmoid(x - mge.tensor(np.repeat([0.0, 12.0], 5).astype("float32")).reshape(1, 10, 1, 1))


ONE_GROUP = {
    "logits": lambda x: x.mean(axis=(2, 3)),
    "features": lambda x: F.relu(
        x * mge.tensor(np.float32(2.0) ** np.arange(0, -20, -2).astype("float32")).reshape(1, 10, 1, 1)
    ),
    "softmax": lambda x: F.softmax(x * 8, axis=1),
    "rare classes": _rare,
    "rare classes, moved": lambda x: _rows(_rare(x)),
    "rare classes beside others": lambda x: F.concat([F.sigmoid(x), _rare(x)], axis=1),
    "rare classes behind a clip": lambda x: F.clip(_rare(x), 0.0, 1.0),
    "alike parts": lambda x: F.concat([x[:, 5:], F.relu(x[:, :5]) * 2], axis=1),
    "one value": lambda x: x.mean(),
    "one row": lambda x: x[:1, :, 0, 0] ** 9,
    "zeros beside values": lambda x: F.concat([x, F.zeros_like(x)], axis=1),
}


@each_of("name", ONE_GROUP)
def test_no_group_without_a_quantity_of_its_own(name):
    assert _groups(ONE_GROUP[name]) == [(0, None, ())]


def test_a_far_bound_does_not_hide_columns():
    factors = mge.tensor(np.repeat([64.0, 0.02], [4, 6]).astype("float32")).reshape(1, 10, 1, 1)
    for low, high in [(0.0, 640.0), (-1e4, 1e4)]:
        groups = _groups(lambda x, low=low, high=high: F.clip(x * factors, low, high))
        assert groups == [(0, 1, ((0, 4),)), (0, 1, ((4, 10),))]
    assert _groups(lambda x: F.clip(x * factors, -1.0, 1.0)) == [(0, None, ())]


def test_samples_of_unlike_ranges_are_no_groups():
    factors = np.array([64.0, 0.02], dtype="float32").reshape(2, 1, 1, 1)
    assert _groups(lambda x: F.concat([x, F.relu(x)], axis=1), _X * factors) == [(0, None, ())]


def test_combinations_of_numbers_are_those_of_a_sort():
    rng = np.random.RandomState(0)
    numbers = [rng.randint(0, 40, (5, 7, 9)) * 3 for _ in range(3)]
    keys, places = _find_combinations(numbers)
    expected = np.unique(np.stack([n.ravel() for n in numbers]), axis=1).T
    np.testing.assert_array_equal(keys, expected)
    for values, column in zip(numbers, np.array(keys).T, strict=True):
        np.testing.assert_array_equal(column[places], values)


def test_the_places_of_an_output_are_not_sorted(monkeypatch):
    """A detector of 640 x 640 pixels packs millions of values: sorting all of them took half a minute."""
    sizes = []
    for name in ("unique", "sort", "argsort", "lexsort"):
        real = getattr(np, name)
        monkeypatch.setattr(
            np,
            name,
            lambda values, *a, real=real, **k: sizes.append(np.size(values)) or real(values, *a, **k),
        )
    x = np.random.RandomState(0).randn(1, 85, 252).astype("float32")
    traced = qtrace.trace(
        lambda x: _packed(x.transpose(0, 2, 1), axis=1) * 1.0 + 0.0, mge.tensor(x), check=False
    )
    values = outputs_of(traced, [x])
    sizes.clear()
    groups = find_groups(traced, values)
    assert max(sizes, default=0) < 252 * 85 // 4, sizes
    assert [g.axis for g in groups] == [1, 1]


def test_every_output_has_groups():
    assert _groups(lambda x: {"b": _packed(x), "a": (x, [_scores(x)])}) == [
        (0, 1, ((0, 4),)),
        (0, 1, ((4, 10),)),
        (1, None, ()),
        (2, None, ()),
    ]


def test_columns_of_one_layer_are_divided_by_their_values():
    values = np.random.RandomState(0).rand(4, 30, 85) * np.repeat([640.0, 0.4], [4, 81])
    groups = find_groups(None, [[values]])
    assert [(g.axis, g.runs) for g in groups] == [(2, ((0, 4),)), (2, ((4, 85),))]
    assert [g.name for g in groups] == ["output 0, columns 0..3", "output 0, columns 4..84"]


@pytest.mark.parametrize("scale", [np.full(85, 3.0), np.geomspace(1.0, 1e-4, 85)])
def test_ranges_without_a_gap_are_one_group(scale):
    values = np.random.RandomState(0).randn(4, 30, 85) * scale
    assert [g.name for g in find_groups(None, [[values]])] == ["output 0"]


def test_every_column_of_a_small_regression_may_be_a_quantity():
    values = np.random.RandomState(0).randn(64, 4) * [1000.0, 100.0, 10.0, 1.0]
    names = [g.name for g in find_groups(None, [[values]])]
    assert names == ["output 0, columns 0..1", "output 0, columns 2..3"]


@each_of("count", [9, 12, 40, 64])
def test_columns_of_a_head_that_are_spread_without_a_gap_are_several_groups(count):
    """Seventeen bits lie between the largest and the smallest, and no gap."""
    values = np.random.RandomState(0).randn(64, count) * np.geomspace(100.0, 1e-3, count)
    groups = find_groups(None, [[values]])
    columns = [group.columns for group in groups]
    assert np.array_equal(np.sort(np.concatenate(columns)), np.arange(count))
    largest = np.abs(values).max(axis=0)
    assert all(largest[c].max() < 64 * largest[c].min() for c in columns)


def test_values_that_are_not_finite_are_no_range():
    values = np.random.RandomState(0).randn(16, 10)
    values[0, 0], values[1, 1] = np.inf, np.nan
    assert [g.name for g in find_groups(None, [[values]])] == ["output 0"]


def test_rows_that_depend_on_values_and_integers():
    rows = [
        [np.random.RandomState(n).rand(n, 6) * [99, 99, 99, 99, 0.5, 0.5], np.arange(n)] for n in (5, 0, 7)
    ]
    assert [g.name for g in find_groups(None, rows)] == [
        "output 0, columns 0..3",
        "output 0, columns 4..5",
        "output 1",
    ]
