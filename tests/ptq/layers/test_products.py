"""Rows of both orders of memory give the same numbers, and stay in their order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from qtrace.ptq.layers.statistics import products, read_rows, result_rows

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("turned", [False, True])
def test_products_keep_the_order_of_the_rows(turned: bool) -> None:
    rows = RANDOM.normal(size=(3, 7, 5)).astype(np.float32)
    if turned:
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1)).transpose(0, 2, 1)
    weight = RANDOM.normal(size=(3, 4, 5)).astype(np.float32)
    result = products(rows, weight)
    expected = np.einsum("gpd,god->gpo", rows.astype(np.float64), weight)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert (result.strides[2] > result.strides[1]) is turned


def test_a_layer_that_reads_each_pixel_makes_no_other_copy_than_its_rows() -> None:
    x = RANDOM.normal(size=(2, 6, 3, 4)).astype(np.float32)
    attrs = {"padding": (0, 0), "stride": (1, 1), "dilation": (1, 1)}
    call = SimpleNamespace(kind="conv2d", attrs=attrs)
    rows = read_rows(x, call, (5, 6, 1, 1), np.arange(12))  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows[0], x.transpose(0, 2, 3, 1).reshape(24, 6))
    np.testing.assert_array_equal(rows, result_rows(x, 1, 1, np.arange(12)))
    assert rows.strides[2] > rows.strides[1]


def test_what_a_layer_reads_stays_as_it_is_where_a_window_leaves_the_map() -> None:
    """A map of one pixel with a padding: the only position that is drawn reads the padding."""
    x = np.full((1, 2, 1, 1), 3.0, np.float32)
    attrs = {"padding": (1, 1), "stride": (1, 1), "dilation": (1, 1)}
    call = SimpleNamespace(kind="conv2d", attrs=attrs)
    rows = read_rows(x, call, (5, 2, 1, 1), np.array([0]))  # type: ignore[arg-type]
    assert not rows.any()
    assert (x == 3.0).all()
