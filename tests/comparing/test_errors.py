"""The errors of groups of columns: each on its own, the worst one decides."""

import math

import numpy as np
import pytest

from qtrace.comparing.groups import ColumnGroup, find_groups
from qtrace.comparing.sums import GroupedErrors, sqnr_db
from tests.each import each_of

_RNG = np.random.RandomState(0)


def _errors(reference, test, groups=None):
    errors = GroupedErrors(groups or find_groups(None, [[reference]]))
    errors.add([reference], [test])
    return errors


def test_the_worst_group_decides():
    f = _RNG.rand(4, 30, 85) * np.repeat([640.0, 0.4], [4, 81])
    q = np.rint(f / 2.5) * 2.5  # one grid of 8 bits
    errors = _errors(f, q)
    boxes, scores = errors.errors()
    assert boxes.informative
    assert boxes.sqnr_db == pytest.approx(sqnr_db(f[..., :4], q[..., :4]))
    assert not scores.informative
    assert scores.sqnr_db == 0.0
    assert sqnr_db(f, q) > 40
    assert errors.worst() == scores
    assert errors.sqnr_db() == 0.0


def test_a_large_offset_does_not_hide_that_nothing_varies():
    f = 300.0 + _RNG.randn(64, 3)
    error = _errors(f, np.full_like(f, 300.0)).worst()
    assert error.sums.sqnr_db > 40
    assert error.constant
    assert not error.informative
    assert error.sqnr_db == pytest.approx(0.0, abs=0.01)


@each_of("f", [np.full((8, 3), 300.0), 300.0 + 1e-6 * _RNG.randn(8, 3), _RNG.randn(1, 3)])
def test_what_does_not_vary_in_float_has_nothing_to_lose(f):
    assert _errors(f, f * 1.001).worst().informative


def test_grouped_errors_add_up_over_batches():
    f, q = _RNG.randn(6, 4, 5), _RNG.randn(6, 4, 5)
    groups = (ColumnGroup(0, "out", 2, ((0, 2), (4, 5))), ColumnGroup(0, "out", 2, ((2, 4),)))
    whole, parts = _errors(f, q, groups), _errors(f[:2], q[:2], groups)
    parts.add([f[2:]], [q[2:]])
    for one, other in zip(whole.errors(), parts.errors(), strict=True):
        assert one.sqnr_db == pytest.approx(other.sqnr_db)
        assert one.variation_db == pytest.approx(other.variation_db)
    selected = f[..., [0, 1, 4]]
    assert whole.errors()[0].variation == pytest.approx(selected.var(axis=(0, 1)).sum() * 24)


def test_errors_ignore_other_shapes_integers_and_zeros():
    errors = GroupedErrors(find_groups(None, [[np.ones((2, 3)), np.ones(2, np.int32), np.zeros((2, 3))]]))
    assert errors.worst() is None
    assert errors.sqnr_db() == math.inf
    errors.add(
        [np.ones((2, 3)), np.ones(2, np.int32), np.zeros((2, 3))],
        [np.ones((1, 3)), np.zeros(2), np.ones((2, 3))],
    )
    assert errors.worst() is None
    assert errors.unequal == {0: 1}


def test_names_of_columns():
    assert ColumnGroup(0, "out", 1, ((4, 85),)).name == "out, columns 4..84"
    assert ColumnGroup(0, "out", 1, ((4, 5),)).name == "out, column 4"
    assert ColumnGroup(0, "out", 1, ((0, 4), (5, 9))).name == "out, columns 0..3 and 5..8"
    many = tuple((10 * i, 10 * i + 4) for i in range(6))
    assert ColumnGroup(0, "out", 1, many).name == "out, columns 0..3, 10..13, 20..23 and 3 more runs"
    assert ColumnGroup(1, "scores").name == "scores"
