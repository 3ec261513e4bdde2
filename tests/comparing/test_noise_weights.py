"""How much the noise of outputs counts that lie far from 0 and differ little between samples."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.comparing.sums import noise_weight
from tests.each import each_of


def _boxes(samples: int) -> np.ndarray:
    """Corners of a grid, and 4 pixels around them."""
    rng = np.random.default_rng(0)
    return np.asarray(np.linspace(100, 600, 48) + 4.0 * rng.normal(size=(samples, 48)))


def test_what_differs_counts_seven_decibels_below_the_whole() -> None:
    boxes = _boxes(8)
    differing = 8 * boxes.var(axis=0, ddof=1).sum() * 10**0.7
    expected = np.square(boxes).sum() / differing
    assert expected > 100
    assert noise_weight([boxes], [8]) == pytest.approx(expected, rel=1e-9)
    batches = [boxes[:3], boxes[3:6], boxes[6:]]
    assert noise_weight(batches, [3, 3, 2]) == pytest.approx(expected, rel=1e-9)


@each_of("values", [_boxes(8) - np.linspace(100, 600, 48), _boxes(3), _boxes(8)[:1].repeat(8, 0)])
def test_noise_weight_is_1_for_ordinary_values(values: np.ndarray) -> None:
    """Beside values around 0, of fewer than four samples, and of equal ones."""
    assert noise_weight([values], [len(values)]) == 1.0


def test_batches_of_unlike_sizes_and_without_values_count_once() -> None:
    boxes = _boxes(8)
    assert noise_weight([boxes[:4], boxes[4:, :20]], [4, 4]) == 1.0
    assert noise_weight([], []) == 1.0
    assert noise_weight([boxes[:, :0]], [8]) == 1.0


def test_an_axis_that_counts_no_samples_makes_a_batch_one_sample() -> None:
    boxes = _boxes(8)
    assert noise_weight([boxes], [2]) == 1.0  # one sample of 8 rows
    assert noise_weight(list(boxes), [1] * 8) == pytest.approx(noise_weight([boxes], [8]), rel=1e-9)


def test_values_without_limit_count_as_zero() -> None:
    boxes = _boxes(8)
    masked = boxes.copy()
    masked[:, 0] = -np.inf
    boxes[:, 0] = 0.0
    assert noise_weight([masked], [8]) == pytest.approx(noise_weight([boxes], [8]), rel=1e-9)
