"""Batches of one size, and what is left of data."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from qtrace.data import open_data
from qtrace.data.base import DataSource, SizedSource, batch_length
from qtrace.data.opening import Recut, filled_batches, recut, shares_samples
from qtrace.errors import DataError


def _samples(count: int) -> np.ndarray:
    return np.arange(count * 2, dtype=np.float32).reshape(count, 2)


def _lengths(source: DataSource) -> list[int]:
    return [batch_length(batch) for batch in source]


@pytest.mark.parametrize(("count", "left"), [(10, 2), (8, 0)])
def test_the_rest_of_an_array_is_left_out(count: int, left: int) -> None:
    whole = recut(open_data(_samples(count), batch_size=4), 4, whole=True)
    assert isinstance(whole, SizedSource)
    assert len(whole) == 2
    assert _lengths(whole) == [4, 4]
    assert whole.left_out == left


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_batches_are_joined_and_cut(sized: bool, whole: bool) -> None:
    samples, ends = _samples(17), np.cumsum([0, 4, 2, 4, 3, 4])
    batches = [samples[a:b] for a, b in itertools.pairwise(ends)]
    data: Any = batches if sized else lambda: iter(batches)
    source = recut(open_data(data), 4, whole)
    assert _lengths(source) == ([4] * 4 if whole else [4, 4, 4, 4, 1])
    read = np.concatenate([batch[0] for batch in source])
    np.testing.assert_array_equal(read, samples[: len(read)])
    assert [number for number, _ in source.numbered(lambda number: number > 1)] == [2, 3, 4][: 3 - whole]
    assert isinstance(source, SizedSource) == sized
    assert not sized or len(source) == 5 - whole  # type: ignore[arg-type]


def test_samples_of_other_shapes_and_settings_stay_apart() -> None:
    def batch(count: int, width: int, rate: int) -> dict[str, np.ndarray]:
        return {"x": np.ones((count, width), np.float32), "rate": np.int32(rate)}

    batches = [batch(2, 3, 16), batch(1, 3, 16), batch(3, 3, 8), batch(3, 5, 8), batch(5, 5, 8)]
    assert _lengths(recut(open_data(batches), 4)) == [3, 3, 4, 4]
    apart = recut(open_data([(_samples(3), _samples(2)), (_samples(3), _samples(2))]), 2)
    assert not shares_samples(next(iter(open_data([(_samples(3), _samples(2))]))))
    assert isinstance(apart, Recut)


def test_a_batch_without_a_common_first_axis_stays_among_others() -> None:
    """It was joined with the samples before it, which were lost."""
    batches = [(_samples(count), _samples(other)) for count, other in ((3, 3), (9, 1), (2, 1), (5, 5))]
    read = recut(open_data(batches), 4)
    assert [tuple(map(len, batch)) for batch in read] == [(3, 3), (9, 1), (2, 1), (4, 4), (1, 1)]


@pytest.mark.parametrize("sized", [True, False])
def test_the_limit_counts_the_batches_of_the_user(sized: bool) -> None:
    """Two batches of 16 became two of 8."""
    batches = [_samples(16)] * 3
    data: Any = batches if sized else lambda: iter(batches)
    assert _lengths(recut(open_data(data, max_batches=2), 8)) == [8] * 4
    assert _lengths(recut(open_data(data, max_batches=2), None)) == [16] * 2


@pytest.mark.parametrize("form", ["array", "list", "generator"])
def test_data_without_a_whole_batch_are_refused(form: str) -> None:
    samples = _samples(3)
    data: Any = {"array": samples, "list": [samples], "generator": lambda: iter([samples])}[form]
    with pytest.raises(DataError, match="batches of 3 samples at most, .* takes 4 at once"):
        recut(open_data(data, batch_size=4), 4, whole=True)


def test_a_batch_is_filled_up_with_its_own_samples() -> None:
    (first, second) = filled_batches((_samples(5), np.float32(7)), 4)
    assert first[0][:, 0].tolist() == [0, 2, 4, 6]
    assert second[0][:, 0].tolist() == [8, 0, 2, 4]
    assert second[1] == 7
    ((few,),) = filled_batches((_samples(2),), 4)
    assert few[:, 0].tolist() == [0, 2, 0, 2]
    named = filled_batches({"x": _samples(4)}, 4)
    assert [batch["x"].shape for batch in named] == [(4, 2)]
    assert len(filled_batches((_samples(6), _samples(3)), 4)) == 1
