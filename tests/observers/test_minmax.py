from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qtrace.observers.minmax import MinMax
from qtrace.scheme import QScheme

ARRAYS = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=4, max_side=4),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_smallest_and_largest(batches):
    observer = MinMax(QScheme())
    for batch in batches:
        observer.observe(batch)
    flat = np.concatenate([batch.ravel() for batch in batches])
    assert observer.range() == (flat.min(), flat.max())


@given(ARRAYS, st.data())
def test_per_channel(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    observer = MinMax(QScheme(axis=axis))
    observer.observe(x)
    rows = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    lo, hi = observer.range()
    assert np.array_equal(lo, rows.min(axis=1))
    assert np.array_equal(hi, rows.max(axis=1))


def test_qparams_cover_the_range():
    observer = MinMax(QScheme())
    observer.observe(np.array([-1.0, 0.5, 1.55]))
    params = observer.qparams()
    assert params.scale == np.float32((np.float64(np.float32(1.55)) + 1) / 255)
    assert params.zero_point == 100
