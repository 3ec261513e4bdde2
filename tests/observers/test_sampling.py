"""The option `sample` of the histogram kinds: fewer values, the same batch the same ones, ends that hold."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.observers import statistics
from qtrace.observers.mse import MeanSquaredError
from qtrace.observers.percentile import Percentile
from qtrace.scheme import QScheme
from tests.each import each_of

_MANY = 1 << 18


def _values(seed: int = 0, count: int = _MANY) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def _observed(x: np.ndarray, batch: int = 0, **options: int) -> MeanSquaredError:
    observer = MeanSquaredError(QScheme(), **options)
    observer.observe(x, batch=batch)
    return observer


def _same(first: MeanSquaredError, second: MeanSquaredError) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_sampled_histogram_keeps_exact_ends() -> None:
    x = _values()
    x[7] = 40.0
    state = _observed(x, sample=8).state_dict()
    assert state["counts"].sum() == _MANY // 8
    assert (state["lo"].item(), state["hi"].item()) == (x.min(), 40.0)


@each_of("count", [_MANY, 1 << 21, (1 << 21) + 8005])  # positions repeat in the larger ones
def test_sampling_takes_one_value_of_each_part(count: int) -> None:
    x = np.arange(count, dtype=np.float32).reshape(1, 1, -1)
    taken = statistics._sampled(x, 8, 3).reshape(-1)
    np.testing.assert_array_equal(taken // 8, np.arange(count // 8))
    # Where in its part is random: a fixed place would take some columns of an image only.
    assert np.bincount((taken % 8).astype(int), minlength=8).min() > count // 8 // 8 * 0.9


def test_channels_share_positions() -> None:
    image = _values(count=4 * 3 * 16384).reshape(4, 3, 16384)
    image[:, 1:] = image[:, :1]
    taken = statistics._sampled(image, 2, 0)
    assert taken.shape == (1, 3, 2 * 16384)
    assert taken.flags.c_contiguous
    np.testing.assert_array_equal(taken[:, 1:], taken[:, [0, 0]])
    observer = MeanSquaredError(QScheme(axis=1, signed=True, symmetric=True), sample=2)
    observer.observe(image)
    np.testing.assert_array_equal(observer.state_dict()["counts"].sum(axis=1), [2 * 16384] * 3)


@each_of("count", [1, 16384, 2 * 16384 - 1])
def test_few_values_are_counted_whole(count: int) -> None:
    x = _values(count=count)
    assert _observed(x, sample=1024).state_dict()["counts"].sum() == count


def test_shards_end_in_the_same_state_and_batches_differ() -> None:
    batches = [_values(seed) for seed in range(4)]
    whole = MeanSquaredError(QScheme(), sample=4)
    for number, batch in enumerate(batches):
        whole.observe(batch, batch=number)
    shards = [_observed(batch, number, sample=4) for number, batch in enumerate(batches)]
    assert _same(whole, shards[3].merge(shards[1]).merge(shards[0].merge(shards[2])))
    assert not _same(_observed(batches[0], 0, sample=4), _observed(batches[0], 1, sample=4))


@pytest.mark.parametrize("cls", [MeanSquaredError, Percentile])
def test_ranges_are_nearly_those_of_all_values(cls: type[MeanSquaredError] | type[Percentile]) -> None:
    x = _values(count=1 << 20)
    options = {"percentile": 99.9} if cls is Percentile else {}
    ranges = []
    for sample in (1, 16):
        observer = cls(QScheme(bits=4, signed=True, symmetric=True), sample=sample, **options)
        observer.observe(x)
        ranges.append(observer.range())
    np.testing.assert_allclose(ranges[1], ranges[0], rtol=0.05)
