"""The rows that a layer reads are the windows of its input, group by group."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from qtrace.ptq.layers.statistics import read_rows
from tests.nets import images


@pytest.mark.parametrize("size", [3, 5, 40])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("padding", "stride", "dilation"), [(0, 1, 1), (1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_rows_are_the_windows_of_the_padded_input(
    size: int, groups: int, padding: int, stride: int, dilation: int
) -> None:
    if size + 2 * padding <= 2 * dilation:
        pytest.skip("the map is smaller than the window")
    x = images(2, 6, size, size + 1)
    x[0, 1, 0, 0] = -0.5
    shape = (4, 6, 3, 3) if groups == 1 else (groups, 12 // groups, 6 // groups, 3, 3)
    attrs = {"padding": (padding,) * 2, "stride": (stride,) * 2, "dilation": (dilation,) * 2}
    call = SimpleNamespace(kind="conv2d", attrs=attrs)
    across = (size + 1 + 2 * padding - 2 * dilation - 1) // stride + 1
    down = (size + 2 * padding - 2 * dilation - 1) // stride + 1
    positions = np.arange(down * across)[::2]
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    expected = []
    for group in range(groups):
        part = padded[:, group * 6 // groups : (group + 1) * 6 // groups]
        for sample in part:
            for position in positions:
                top, left = position // across * stride, position % across * stride
                window = sample[:, top : top + 3 * dilation : dilation, left : left + 3 * dilation : dilation]
                expected.append(window[:, :3, :3].reshape(-1))
    rows = read_rows(x, call, shape, positions)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows.reshape(-1, rows.shape[-1]), np.stack(expected))
    assert rows.shape[:2] == (groups, 2 * len(positions))
