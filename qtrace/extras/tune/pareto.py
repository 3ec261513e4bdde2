"""Which trials no other one beats in metric and cost, which is the best, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtrace.extras.tune.trials import Trial

__all__ = ["Certainty", "CostLimits", "certainty", "choose", "cost_of", "pareto", "rank"]

_DRAWS = 2000
_CHUNK = 200  # draws at a time, which bounds the memory


@dataclass(frozen=True)
class CostLimits:
    """The most that a recipe may cost.

    Attributes:
        milliseconds: predicted time; None for any.
        bytes: size of the parameters; None for any.
    """

    milliseconds: float | None = None
    bytes: int | None = None

    def exceeded_by(self, milliseconds: float | None, size: int) -> str:
        """Returns the limit that is exceeded, in words; "" for none.

        Args:
            milliseconds: the predicted time; None if unknown, which exceeds no limit.
            size: bytes of the parameters.
        """
        if self.milliseconds is not None and milliseconds is not None and milliseconds > self.milliseconds:
            return f"{milliseconds:.4g} ms, more than {self.milliseconds:.4g}"
        if self.bytes is not None and size > self.bytes:
            return f"{size} bytes, more than {self.bytes}"
        return ""


@dataclass(frozen=True)
class Certainty:
    """The difference of two trials' metrics, and a 95 % interval of it by the bootstrap.

    Attributes:
        difference: the difference, in the metric's unit.
        low, high: the ends of the interval.
        probability: the share of draws in which the first trial is better.
    """

    difference: float
    low: float
    high: float
    probability: float


def cost_of(trial: Trial) -> tuple[float, int]:
    """Returns predicted time and size; the time is 0 where none is known."""
    return trial.milliseconds or 0.0, trial.bytes


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Sorts judged trials, the best first: by the metric, then by time, size and number."""
    judged = [trial for trial in trials if trial.value is not None]
    return sorted(judged, key=lambda t: (-(t.value or 0.0), *cost_of(t), t.number))


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the judged trials that no other one beats, the cheapest first.

    A trial beats another one if it is as good in metric, time and size, and better in one of them. Of equal
    trials the first stays.
    """
    front: list[Trial] = []
    for trial in rank(trials):  # whatever beats a trial stands before it
        time, size = cost_of(trial)
        if not any(cost_of(other)[0] <= time and cost_of(other)[1] <= size for other in front):
            front.append(trial)
    return sorted(front, key=lambda t: (*cost_of(t), t.number))


def certainty(first: Trial, second: Trial, *, noise: bool, seed: int) -> Certainty | None:
    """Compares two trials on samples drawn with replacement (Efron 1979, "Bootstrap Methods").

    Both trials are compared on the same draws, so that samples which are hard for both add no spread.

    Args:
        first: the better trial.
        second: the other one, judged on the same samples.
        noise: whether the values of the samples are noise, so that metrics are ``-10 log10`` of the sum; else
            metrics are the mean.
        seed: the seed of the draws.

    Returns:
        The difference and its percentile interval; None without two values of samples, or as many on both
        sides.
    """
    a, b = (np.array(trial.samples, np.float64) for trial in (first, second))
    if len(a) != len(b) or len(a) < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS // _CHUNK):
        places = rng.integers(0, len(a), (_CHUNK, len(a)))
        drawn.append(_difference(a[places].mean(axis=1), b[places].mean(axis=1), noise))
    differences = np.concatenate(drawn)
    low, high = np.quantile(differences, (0.025, 0.975))
    own = float(_difference(a.mean(keepdims=True), b.mean(keepdims=True), noise)[0])
    return Certainty(own, float(low), float(high), float(np.mean(differences > 0)))


def choose(ranked: Sequence[Trial], first: Trial, *, noise: bool, seed: int) -> Trial:
    """Returns the best trial that is surely better than the first, or as good and cheaper; else that.

    The best of many trials on a few held-back samples is often worse than the first on others.

    Args:
        ranked: trials within the limits, the best first.
        first: the trial of the user's recipe. If it is not within the limits, the best trial is chosen.
        noise: as for `certainty`.
        seed: as for `certainty`.
    """
    if all(trial.digest != first.digest for trial in ranked):
        return ranked[0]
    for trial in ranked:
        if trial.digest == first.digest:
            break
        sure = certainty(trial, first, noise=noise, seed=seed)
        if sure is None or sure.low > 0 or (sure.low == 0 and cost_of(trial) < cost_of(first)):
            break
    return trial


def _difference(a: np.ndarray, b: np.ndarray, noise: bool) -> np.ndarray:
    if not noise:
        return a - b
    smallest = math.ldexp(1.0, -100)  # as `judge` counts it
    difference: np.ndarray = 10.0 * np.log10(np.maximum(b, smallest) / np.maximum(a, smallest))
    return difference
