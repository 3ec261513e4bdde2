"""Other inputs of a trace: what indexes something stays in range."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest

import qtrace
from qtrace.graph.tracing.example_inputs import vary
from tests.each import each_of

TABLES = {
    "one box": [[0, 4, 4, 40, 40]],
    "boxes of two images": [[0, 4, 4, 40, 40], [1, 3, 3, 20, 30]],
    "boxes of a list": [[[0, 4, 4, 40, 40], [1, 3, 3, 20, 30]]],
    "a box and fractions": [[1, 4.5, 4, 40.5, 40], [1, 3, 3.5, 20, 30]],
}


@each_of("high", [True, False])
@each_of("table", TABLES)
def test_rows_of_whole_numbers_stay_boxes(table: str, high: bool) -> None:
    example = np.array(TABLES[table], np.float32)
    (other,), _ = vary(((mge.Tensor(example),), {}), high)
    rows, given = other.numpy().reshape(-1, 5), example.reshape(-1, 5)
    assert set(rows[:, 0]) <= set(range(int(given[:, 0].max()) + 1))
    assert not np.array_equal(rows, given)
    if table != "a box and fractions":
        assert (rows[:, 1] <= rows[:, 3]).all()
        assert (rows[:, 2] <= rows[:, 4]).all()


@pytest.mark.parametrize("high", [True, False])
def test_numbers_that_index_stay_among_those_of_the_example(high: bool) -> None:
    for example in ([0, 7, 3], [[0, 7], [3, 3]]):
        for dtype in (np.float32, np.int32):
            (other,), _ = vary(((mge.Tensor(np.array(example, dtype)),), {}), high)
            values = other.numpy()
            assert ((values >= 0) & (values <= 7) & (values == np.rint(values))).all()


@pytest.mark.parametrize("high", [True, False])
def test_a_mask_keeps_its_ones(high: bool) -> None:
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], np.float32)
    (other,), _ = vary(((mge.Tensor(mask),), {}), high)
    assert sorted(other.numpy().sum(axis=1)) == [1, 2, 3]


@pytest.mark.parametrize("crop", [F.vision.roi_align, F.vision.roi_pooling])
def test_regions_of_whole_numbers_can_be_traced(crop: object) -> None:
    x = np.random.default_rng(0).standard_normal((1, 3, 48, 48)).astype(np.float32)
    boxes = np.array([[0, 4, 4, 40, 40]], np.float32)
    traced = qtrace.trace(lambda x, boxes: crop(x, boxes, (2, 2)), x, boxes)  # type: ignore[operator]
    assert traced(mge.Tensor(x), mge.Tensor(boxes)).shape == (1, 3, 2, 2)
