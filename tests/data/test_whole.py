"""Batches of one size, and what is left of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qtrace.data import open_data
from qtrace.data.base import DataSource, SizedSource, batch_length
from qtrace.data.whole import describe_left_out, filled_batches, whole_batches
from qtrace.errors import DataError


def _samples(count: int) -> np.ndarray:
    return np.arange(count * 2, dtype=np.float32).reshape(count, 2)


def _lengths(source: DataSource) -> list[int]:
    return [batch_length(batch) for batch in source]


@pytest.mark.parametrize(("count", "lengths", "left"), [(10, [4, 4], "the last 2 samples"), (8, [4, 4], "")])
def test_the_rest_of_an_array_is_left_out(count: int, lengths: list[int], left: str) -> None:
    source = open_data(_samples(count), batch_size=4)
    whole = whole_batches(source, 4)
    assert isinstance(whole, SizedSource)
    assert len(whole) == len(lengths)
    assert _lengths(whole) == lengths
    assert describe_left_out(source, 4).startswith(left)
    assert bool(describe_left_out(source, 4)) == bool(left)


@pytest.mark.parametrize("sized", [True, False])
def test_other_batches_of_a_loader_are_left_out_and_the_rest_counted_anew(sized: bool) -> None:
    batches = [_samples(n) for n in (4, 2, 4, 3, 4)]
    data: Any = batches if sized else lambda: iter(batches)
    whole = whole_batches(open_data(data), 4)
    assert _lengths(whole) == [4, 4, 4]
    assert [number for number, _ in whole.numbered(lambda number: number > 0)] == [1, 2]
    whole.max_batches = 2
    assert _lengths(whole) == [4, 4]
    if isinstance(whole, SizedSource):
        assert len(whole) == 2
    assert isinstance(whole, SizedSource) == sized


def test_data_without_a_whole_batch_are_refused() -> None:
    with pytest.raises(DataError, match="no batch of 4 samples, but of 3, .* takes 4 at once"):
        whole_batches(open_data(_samples(3), batch_size=4), 4)


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
