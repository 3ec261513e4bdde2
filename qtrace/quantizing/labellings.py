"""The labellings in question: which there are, which one is worth a measurement, and which one is chosen.

A cost table predicts time, and single roundings predict noise. Both are off now and then, and what has been
measured shows how far. A labelling is measured only if it could be the better one with predictions that are
so far off; the others are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from qtrace.benchmarking.turns import Speed
from qtrace.preparation.placement.frontier import Point, price
from qtrace.preparation.placement.problem import Problem
from qtrace.preparation.prepare import SearchOutcome
from qtrace.quantizing.times import MeasuredLabelling

__all__ = [
    "EVERYTHING",
    "FLOAT",
    "choose_labelling",
    "describe_labellings",
    "find_competitor",
    "find_labellings",
    "is_doubtful",
    "is_noisy",
    "is_settled",
    "name_with_bits",
    "predict",
    "with_everything",
]

FLOAT = "float"
"""The name of the labelling with every op in float."""
EVERYTHING = "everything"
"""The name of the labelling that rounds all that the target can, whatever single kernels take."""
_BETWEEN = "between"
_SHARES = (0.25, 0.5)  # of the way from the fastest predicted time to that of float
_MARGIN = 0.01  # of the price: what is worth less is no reason to leave the predicted choice
_SPOILED = 0.1  # noise of the worst group of columns, relative to it
_INCOMPARABLE = 1.0  # the noise of a predicted choice that has none, as others are priced beside it
_LEAST_TIME_ERROR = 0.1  # of the time of the ops with other labels: that of predictions that look right
_LEAST_NOISE_ERROR = 2.0  # dB, likewise
_NEARLY_EXACT = 1e-12
_DOUBTFUL_NOISE = 6.0  # dB that a predicted choice has more than predicted
_NOISY = 0.01  # relative to the worst group of columns: with more noise than this predictions change


def find_labellings(outcome: SearchOutcome, other: SearchOutcome | None = None) -> dict[str, SearchOutcome]:
    """Returns the labellings in question: predicted choice, fastest, two between, and float, by name.

    Args:
        outcome: the search.
        other: a search in the same network with other bits of weights, whose choice is in question, too.
    """
    in_float = outcome.instead(outcome.float_labels)
    limit = in_float.point.energy.seconds
    usable = [p for p in outcome.frontier if any(p.labels.values()) and p.energy.seconds < limit]
    points: dict[str, Point] = {"predicted": outcome.point}
    if usable:
        fastest = usable[0].energy.seconds
        points["fastest"] = usable[0]
        for share in _SHARES:
            wanted = fastest + share * (limit - fastest)
            near = min(usable, key=lambda point: abs(point.energy.seconds - wanted))
            points[f"{share:.0%} {_BETWEEN}"] = near
    different: dict[str, SearchOutcome] = {}
    for name, point in points.items():
        if all(dict(point.labels) != dict(other.point.labels) for other in different.values()):
            different[name] = outcome.instead(point.labels)
    if other is not None and any(other.point.labels.values()) and different:
        different[f"weights of {other.weight_bits} bits"] = other
    if any(outcome.point.labels.values()):
        different[FLOAT] = in_float
    return different


def with_everything(
    labellings: Mapping[str, SearchOutcome], outcome: SearchOutcome, first: bool
) -> dict[str, SearchOutcome]:
    """Adds the labelling that rounds everything, and float if it is missing.

    Args:
        labellings: the labellings in question.
        outcome: the search.
        first: whether rounding everything takes the place of the predicted choice, as what stays unless
            another labelling is better.
    """
    labels = {unit.name: unit.fixed is not False for unit in outcome.problem.units}
    if not any(labels.values()):
        return dict(labellings)
    whole = {EVERYTHING: outcome.instead(labels)}
    others = {
        name: other
        for name, other in labellings.items()
        if name != FLOAT and any(other.point.labels.values()) and dict(other.point.labels) != labels
    }
    if not first and len(others) < len(set(labellings) - {FLOAT}):
        return dict(labellings)  # it is one of them
    in_float = {FLOAT: outcome.instead(outcome.float_labels)}
    return {**whole, **others, **in_float} if first else {**others, **whole, **in_float}


def predict(point: Point) -> tuple[float, float]:
    """Returns the predicted seconds of a labelling, and the predicted SQNR of its outputs in dB."""
    return point.energy.seconds, -10 * math.log10(max(point.energy.noise, _NEARLY_EXACT))


def choose_labelling(measured: Sequence[MeasuredLabelling], in_float: bool = True) -> int:
    """Returns the number of the labelling with the lowest price of time and noise; 0 unless one is better.

    Another one is better if its price is lower at the slow end of its measured range, on both halves of the
    samples, and it spoils no output. Float is taken for its time alone: plain ranges show more noise than the
    algorithms of the recipe leave, and no file in float is what was asked for if integers are faster. What
    other programs may have shifted does not count for it: a file that is probably slower is not asked for.
    """
    return _find_best(measured, in_float)[0]


def is_settled(
    measured: Sequence[MeasuredLabelling], other: MeasuredLabelling, speed: Speed, in_float: bool = True
) -> bool:
    """Returns whether more turns of another labelling would decide nothing else.

    They would not if the same labelling is chosen at both ends of its range. Of float, it must be known which
    of both is faster, too, as the card of the file says.

    Args:
        measured: what was measured before: the predicted choice first.
        other: the other labelling, with its noise.
        speed: its speed beside the first one so far.
        in_float: whether float may be chosen.
    """
    if not (speed.clear if other.name == FLOAT else speed.narrow):
        return False
    ends = (replace(other, speed=replace(speed, low=end, high=end)) for end in (speed.low, speed.high))
    return len({choose_labelling([*measured, end], in_float) for end in ends}) == 1


def _find_best(measured: Sequence[MeasuredLabelling], in_float: bool) -> tuple[int, float]:
    """Returns the number of the best labelling, and its price beside the first; the lower is better."""
    best, lowest = 0, -_MARGIN
    for number, other in enumerate(measured[1:], 1):
        speed = other.speed.steady_low if other.name == FLOAT else other.speed.low
        if other.name == FLOAT and (speed < 1 or not in_float):
            continue
        if max(other.noise) >= _SPOILED:
            continue
        difference = _compare(measured[0], speed, other.noise)
        if difference < lowest:
            best, lowest = number, difference
    return best, lowest


def _compare(first: MeasuredLabelling, speed: float, noise: Iterable[float]) -> float:
    """Returns the price of a labelling beside that of the first one, on the half where it is worse.

    Args:
        first: the first labelling.
        speed: how many times as fast the other one is.
        noise: for each half of the samples, the noise of the other one.
    """
    return max(
        price(1 / max(speed, 1e-9), theirs) - price(1.0, min(own, _INCOMPARABLE))
        for own, theirs in zip(first.noise, noise, strict=True)
    )


def find_competitor(
    measured: Sequence[MeasuredLabelling], waiting: Mapping[str, SearchOutcome], in_float: bool = True
) -> str | None:
    """Returns the labelling that could be better than the best one by most; None if none could.

    Its time and noise are taken at the good end of what they may be: predictions are off by as much as those
    of the measured labellings at most. Times are off by a share of the time of the ops whose labels differ.

    Args:
        measured: what was measured: the predicted choice first, and float.
        waiting: the labellings that were not measured.
        in_float: whether float may be chosen.
    """
    first = measured[0]
    _, lowest = _find_best(measured, in_float)
    name = None
    for other, outcome in waiting.items():
        speed, decibels = _expect_at_best(measured, outcome)
        noise = 10.0 ** (-decibels / 10)
        difference = _compare(first, speed, [noise] * len(first.noise))
        if noise < _SPOILED and difference < lowest:
            name, lowest = other, difference
    return name


def is_noisy(labelling: MeasuredLabelling) -> bool:
    """Returns whether a labelling has less than 20 dB by plain ranges: a quieter one is worth a look."""
    return labelling.name != FLOAT and max(labelling.noise) > _NOISY


def is_doubtful(measured: Sequence[MeasuredLabelling], in_float: bool = True) -> bool:
    """Returns whether the predicted choice is far from its prediction, or the best labelling is noisy.

    It is far from its prediction if it is slower than float, or has much more noise.

    Args:
        measured: what was measured: the predicted choice first, and float.
        in_float: whether float may be chosen.
    """
    if is_noisy(measured[choose_labelling(measured, in_float)]):
        return True
    first = measured[0]
    whole = next((m for m in measured if m.name == FLOAT), first)
    noise = sum(first.noise) / max(len(first.noise), 1)
    lost = first.predicted_db + 10 * math.log10(max(noise, _NEARLY_EXACT))
    return whole.speed.ratio > first.speed.ratio or lost > _DOUBTFUL_NOISE


def _expect_at_best(measured: Sequence[MeasuredLabelling], outcome: SearchOutcome) -> tuple[float, float]:
    """Returns how many times as fast as the first labelling another one may be, and its SQNR in dB."""
    first = measured[0]
    seconds, decibels = predict(outcome.point)
    time_errors, noise_errors = [_LEAST_TIME_ERROR], [_LEAST_NOISE_ERROR]
    for other in measured:
        distance = _distance(outcome.problem, first, other.integers, other.weight_bits)
        if distance > 0:
            predicted = math.log(first.predicted_seconds / other.predicted_seconds)
            time_errors.append(abs(math.log(other.speed.ratio) - predicted) / distance)
        noise = sum(other.noise) / len(other.noise)
        if other.name != FLOAT and 0 < noise < math.inf:
            noise_errors.append(abs(-10 * math.log10(noise) - other.predicted_db))
    integers = [name for name, on_integers in outcome.point.labels.items() if on_integers]

    def beside(known: MeasuredLabelling) -> float:
        distance = _distance(outcome.problem, known, integers, outcome.weight_bits)
        return known.speed.ratio * known.predicted_seconds / seconds * math.exp(max(time_errors) * distance)

    # Rounding everything was not predicted to be good: float may lie nearer to what is.
    anchors = [m for m in measured if m is first or (m.name == FLOAT and first.name == EVERYTHING)]
    return max(map(beside, anchors)), decibels + max(noise_errors)


def _distance(problem: Problem, first: MeasuredLabelling, integers: Iterable[str], bits: int) -> float:
    """Returns the share of the time that is of ops whose kernels differ from those of ``first``."""
    others = set(integers)
    changed = others ^ set(first.integers)
    if bits != first.weight_bits:
        changed |= others
    seconds = {unit.name: max(unit.float_seconds, unit.integer_seconds or 0.0) for unit in problem.units}
    return sum(seconds[name] for name in changed if name in seconds) / max(sum(seconds.values()), 1e-12)


def name_with_bits(name: str, bits: int) -> str:
    """Returns the name of a labelling with the bits of its weights, if they are fewer than 8."""
    return f"{name} with weights of {bits} bits" if bits < 8 and "weights" not in name else name


def describe_labellings(measured: Sequence[MeasuredLabelling], chosen: int, left_out: str = "") -> str:
    """Says what was measured of each labelling, beside what was predicted.

    Args:
        measured: what was measured.
        chosen: the number of the labelling that is taken.
        left_out: which labellings were not measured, and why.
    """
    whole = next((m for m in measured if m.name == FLOAT), None)
    parts = []
    for labelling in measured:
        name = labelling.name if labelling is whole else name_with_bits(labelling.name, labelling.weight_bits)
        text = f"{name} {1e3 * labelling.speed.seconds:.3g} ms"
        if whole is not None and labelling is not whole:
            faster = labelling.speed.ratio / whole.speed.ratio
            predicted = whole.predicted_seconds / labelling.predicted_seconds
            text += f" ({faster:.2f}x, predicted {predicted:.2f}x)"
        noise = sum(labelling.noise) / len(labelling.noise)
        if math.isinf(noise):
            text += " with outputs that cannot be compared"
        elif noise > 0:
            text += f" {-10 * math.log10(noise):.1f} dB (predicted {labelling.predicted_db:.1f})"
        parts.append(text)
    kept = "the predicted choice stays" if chosen == 0 else f"{measured[chosen].name} is chosen"
    rest = f"; {left_out}" if left_out else ""
    return f"measured by plain ranges: {', '.join(parts)}: {kept}{rest}"
