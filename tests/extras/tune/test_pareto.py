"""The Pareto front against brute force, and the bootstrap against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.extras.tune.judge import sample_noise, value_of_noise
from qtrace.extras.tune.trials import CostLimits, Trial, certainty, choose, pareto, rank
from qtrace.sensitivity.metrics import sqnr
from tests.each import each_of


def trial(number: int, value: float | None, time: float | None = None, size: int = 0, samples=()) -> Trial:
    return Trial(number, {}, "search", {}, 0, str(number), 0, value, tuple(samples), time, size)


def beats(a: Trial, b: Trial) -> bool:
    first = (a.value, -(a.milliseconds or 0.0), -a.bytes)
    second = (b.value, -(b.milliseconds or 0.0), -b.bytes)
    return all(x >= y for x, y in zip(first, second, strict=True)) and first != second


@each_of("seed", range(20))
def test_the_front_is_what_no_other_trial_beats(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [(int(rng.integers(6)), float(rng.integers(5)), int(rng.integers(4))) for _ in range(30)]
    trials = [trial(i, *numbers) for i, numbers in enumerate(drawn)]
    expected = {t.number for t in trials if not any(beats(other, t) for other in trials)}
    # Of equal trials the first one stays.
    same = {drawn[n]: min(m for m in expected if drawn[m] == drawn[n]) for n in expected}
    front = pareto([*trials, trial(99, None, 0.0, 0)])
    assert {t.number for t in front} == set(same.values())
    assert [(t.milliseconds, t.bytes) for t in front] == sorted((t.milliseconds, t.bytes) for t in front)


def test_equal_values_are_ranked_by_cost() -> None:
    trials = [trial(0, 1.0, 2.0), trial(1, 1.0, 1.0, 5), trial(2, 1.0, 1.0, 4), trial(3, 2.0, 9.0)]
    assert [t.number for t in rank(trials)] == [3, 2, 1, 0]


def test_limits() -> None:
    limits = CostLimits(2.0, 100)
    assert limits.exceeded_by(2.0, 100) == ""
    assert limits.exceeded_by(2.1, 100) == "2.1 ms, more than 2"
    assert limits.exceeded_by(None, 101) == "101 bytes, more than 100"
    assert CostLimits().exceeded_by(1e9, 10**9) == ""


@pytest.mark.quick(1)
@pytest.mark.parametrize("noise", [True, False])
def test_the_interval_is_that_of_a_plain_bootstrap(noise: bool) -> None:
    rng = np.random.default_rng(1)
    base = rng.exponential(size=60)
    a, b = base * rng.uniform(0.7, 1.1, 60), base
    sure = certainty(trial(0, 1.0, samples=a), trial(1, 0.0, samples=b), noise=noise, seed=4)

    def difference(places: np.ndarray) -> float:
        if noise:
            return float(-10 * np.log10(a[places].sum()) + 10 * np.log10(b[places].sum()))
        return float(a[places].mean() - b[places].mean())

    other = np.random.default_rng(77)
    draws = [difference(other.integers(0, 60, 60)) for _ in range(20000)]
    low, high = np.quantile(draws, (0.025, 0.975))
    assert sure is not None
    assert sure.difference == pytest.approx(difference(np.arange(60)))
    width = high - low
    assert abs(sure.low - low) < 0.08 * width
    assert abs(sure.high - high) < 0.08 * width
    assert sure.probability == pytest.approx(np.mean(np.array(draws) > 0), abs=0.03)
    again = certainty(trial(0, 1.0, samples=a), trial(1, 0.0, samples=b), noise=noise, seed=4)
    assert sure == again


def test_there_is_no_interval_without_samples_of_both() -> None:
    one, many = trial(0, 1.0, samples=[1.0]), trial(1, 1.0, samples=[1.0, 2.0])
    for pair in ((one, one), (one, many), (trial(2, 1.0), trial(3, 1.0))):
        assert certainty(*pair, noise=False, seed=0) is None


def test_the_noise_of_samples_adds_up_to_the_sqnr() -> None:
    rng = np.random.default_rng(0)
    reference = [[rng.normal(size=(n, 3)), rng.normal(size=(n, 2, 2)) * 50] for n in (4, 4, 2)]
    outputs = [[v + 0.1 * rng.normal(size=v.shape) * np.abs(v).max() for v in batch] for batch in reference]
    noise = sample_noise(reference, outputs, [4, 4, 2])
    assert len(noise) == 10
    assert value_of_noise(noise) == pytest.approx(sqnr(reference, outputs))
    assert value_of_noise(sample_noise(reference, reference, [4, 4, 2])) > 300
    rows = [[np.ones((5, 2))], [np.ones((3, 2))]]  # as many as a detector finds
    assert len(sample_noise(rows, rows, [4, 4])) == 2
    broken = [[np.where(v > 0, np.nan, v) for v in batch] for batch in reference]
    assert value_of_noise(sample_noise(reference, broken, [4, 4, 2])) < -200


def test_the_first_recipe_stays_unless_another_one_is_surely_better() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 1.0, 12)
    first = trial(0, 0.7, 2.0, samples=base)
    lucky = trial(1, 0.9, 1.0, samples=base + rng.normal(0.05, 0.3, 12))
    better = trial(2, 0.8, 3.0, samples=base + 0.1)
    same, dearer = trial(3, 0.7, 1.0, samples=base), trial(4, 0.7, 3.0, samples=base)

    def chosen(*trials: Trial) -> int:
        return choose(rank(trials), first, noise=False, seed=0).number

    assert chosen(first) == chosen(first, lucky) == chosen(first, dearer) == 0
    assert chosen(first, lucky, better) == 2
    assert chosen(first, same) == 3  # as good, and cheaper
    assert chosen(lucky, better) == 1  # the first one is not within the limits
    assert chosen(first, trial(5, 0.9)) == 5  # one number for all samples tells nothing


def test_noise_of_samples_is_that_of_the_worst_columns():
    values = np.random.RandomState(0).rand(4, 30, 85) * np.repeat([640.0, 0.4], [4, 81])
    noise = sample_noise([[values]], [[np.rint(values / 2.5) * 2.5]], [4])
    assert len(noise) == 4
    assert value_of_noise(noise) == pytest.approx(0.0, abs=1e-6)
