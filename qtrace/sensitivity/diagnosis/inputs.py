"""Recognises calibration data that is prepared otherwise than the data of evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.data.base import fingerprint_samples
from qtrace.data.batches import ENOUGH_SAMPLES
from qtrace.sensitivity.diagnosis.causes import Cause

OTHER_DATA = ("channel-order", "normalization")
"""The names of the causes that `compare_inputs` gives."""

_STANDARD_ERRORS = 5.0
_UNLIKE_SCALE = 1.5
_UNLIKE_MEAN = 0.5  # of the standard deviation
_MAX_PERMUTED = 4
_LEAST_VALUES = 16  # of all inputs, which should differ


@dataclass(frozen=True)
class InputStatistics:
    """The distribution of one input of the model over some samples.

    Attributes:
        name: the number or the name of the input.
        samples: the number of samples.
        mean, deviation: of all values of each channel, of which there is one if the second axis has unlike
            sizes.
        standard_error: of the mean of each channel, from the spread of the samples' means.
        low, high: the smallest and the largest value.
    """

    name: str
    samples: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    standard_error: tuple[float, ...]
    low: float
    high: float


def measure_inputs(batches: Iterable[Any]) -> tuple[InputStatistics, ...]:
    """Measures the float inputs of batches, which are a tuple of arrays or a dict of arrays by name."""
    values: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for name, array in _inputs_of(batch):
            if array.dtype.kind == "f" and array.ndim >= 2 and array.size:
                values.setdefault(name, []).append(array)
    return tuple(_measure(name, arrays) for name, arrays in values.items())


def find_single_numbers(batches: Iterable[Any]) -> dict[str, Any]:
    """Maps each input to its number, if each is one number everywhere: such samples show nothing of a graph.

    Args:
        batches: arrays or Tensors, tuples of them, or dicts of them by name. Reads up to the first value that
            differs.

    Returns:
        The numbers by the place or the name of the input; {} if a value differs, or for too few values.
    """
    numbers: dict[str, Any] = {}
    count = 0
    for batch in batches:
        for key, array in _inputs_of(batch):
            if not array.size:
                continue
            first = array.flat[0]
            if numbers.setdefault(key, first) != first or not np.all(array == first):
                return {}
            count += array.size
    return numbers if count >= _LEAST_VALUES else {}


def are_constant(outputs: Sequence[Sequence[np.ndarray]], repeated: Sequence[Sequence[bool]]) -> bool:
    """Whether every output is the same for all samples, of which at least two differ.

    Args:
        outputs: the outputs for each batch, the samples on their first axis.
        repeated: which samples of each batch are the same as one before, as `find_repeated` says.
    """
    if sum(not same for batch in repeated for same in batch) < 2:
        return False
    first = outputs[0]
    return all(
        value.ndim > 0
        and value.shape[0] == len(same)
        and value.shape[1:] == like.shape[1:]
        and np.array_equal(value, np.broadcast_to(like[:1], value.shape))
        for batch, same in zip(outputs, repeated, strict=True)
        for value, like in zip(batch, first, strict=True)
    )


def find_repeated(batches: Iterable[Any]) -> list[list[bool]]:
    """Returns for each batch which of its samples are the same as one before; [] where that is not known."""
    known: set[bytes] = set()
    repeated = []
    for batch in batches:
        flags = []
        for sample in fingerprint_samples(batch):
            flags.append(sample in known)
            known.add(sample)
        repeated.append(flags)
    return repeated


def _inputs_of(batch: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the inputs of a batch by name or number; those in lists and dicts are left out."""
    if isinstance(batch, Mapping):
        items = [(str(key), value) for key, value in batch.items()]
    else:
        inputs = batch if isinstance(batch, tuple | list) else (batch,)
        items = [(str(index), value) for index, value in enumerate(inputs)]
    arrays = [
        (name, np.asarray(value.numpy() if hasattr(value, "numpy") else value)) for name, value in items
    ]
    return [(name, array) for name, array in arrays if array.dtype != object]


def _measure(name: str, arrays: list[np.ndarray]) -> InputStatistics:
    means, squares, counts = [], [], []
    channels = {array.shape[1] for array in arrays}
    for array in arrays:
        # An axis of unlike sizes has no channels: it is that of steps, or of the samples of a state.
        shape = array.shape[:2] if len(channels) == 1 else (len(array), 1)
        rows = array.reshape(*shape, -1).astype(np.float64)
        means.append(rows.mean(axis=2))
        squares.append(np.square(rows).mean(axis=2))
        counts += [rows.shape[2]] * len(rows)
    mean, square = np.concatenate(means), np.concatenate(squares)
    share = np.array(counts, np.float64)[:, None] / sum(counts)  # of all values: sizes may differ
    center = (share * mean).sum(axis=0)
    deviation = np.sqrt(np.maximum((share * square).sum(axis=0) - np.square(center), 0.0))
    error = np.sqrt((np.square(share) * np.square(mean - center)).sum(axis=0))
    columns = [tuple(map(float, column)) for column in (center, deviation, error)]
    low, high = min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays)
    return InputStatistics(name, len(mean), columns[0], columns[1], columns[2], low, high)


def compare_inputs(
    calibration: tuple[InputStatistics, ...], evaluation: tuple[InputStatistics, ...]
) -> Cause | None:
    """Returns the cause if the data of calibration is prepared otherwise; None if both look alike.

    Nothing is said about fewer than 8 samples, whose means may differ by chance.
    """
    others = {statistics.name: statistics for statistics in evaluation}
    for ours in calibration:
        theirs = others.get(ours.name)
        if theirs is None or len(ours.mean) != len(theirs.mean):
            continue
        if min(ours.samples, theirs.samples) < ENOUGH_SAMPLES:
            continue
        cause = _other_order(ours, theirs) or _other_normalization(ours, theirs)
        if cause is not None:
            return cause
    return None


def _errors(ours: InputStatistics, theirs: InputStatistics) -> np.ndarray:
    """Returns the standard errors of the differences of the means."""
    both = np.square([ours.standard_error, theirs.standard_error]).sum(axis=0)
    floor = 1e-3 * np.maximum(np.asarray(theirs.deviation), 1e-12)
    return np.maximum(np.sqrt(both), floor)


def _other_order(ours: InputStatistics, theirs: InputStatistics) -> Cause | None:
    channels = len(ours.mean)
    if not 2 <= channels <= _MAX_PERMUTED:
        return None
    errors = float(np.max(_errors(ours, theirs)))

    def distance(order: tuple[int, ...]) -> float:
        means = np.asarray(ours.mean) - np.asarray(theirs.mean)[list(order)]
        spreads = np.asarray(ours.deviation) - np.asarray(theirs.deviation)[list(order)]
        return float(np.max(np.hypot(means, spreads))) / errors

    identity = tuple(range(channels))
    best = min(itertools.permutations(identity), key=distance)
    if best == identity or distance(identity) < _STANDARD_ERRORS or distance(best) > distance(identity) / 3:
        return None
    order = ", ".join(map(str, best))
    reversed_ = best == identity[::-1] and channels == 3
    name = "RGB and BGR are swapped" if reversed_ else "the channels are in another order"
    text = (
        f"{name}: channels {', '.join(map(str, identity))} of the calibration data look like channels "
        f"{order} of the evaluation data (means {_list(ours.mean)} and {_list(theirs.mean)})"
    )
    return Cause("channel-order", "", "", text, details=(("order", best),))


def _other_normalization(ours: InputStatistics, theirs: InputStatistics) -> Cause | None:
    errors = _errors(ours, theirs)
    means = np.asarray(ours.mean) - np.asarray(theirs.mean)
    spreads = np.maximum(np.asarray([ours.deviation, theirs.deviation]), 1e-12)
    ratios = spreads[0] / spreads[1]
    scaled = max(float(np.median(ratios)), 1.0 / float(np.median(ratios))) > _UNLIKE_SCALE
    moved = np.abs(means) > np.maximum(_STANDARD_ERRORS * errors, _UNLIKE_MEAN * spreads[1])
    if not (scaled or moved.any()):
        return None
    pixels = " (raw pixels?)" if ours.high > 100 and ours.low >= 0 else ""
    text = (
        f"another normalization: the calibration data has means {_list(ours.mean)} and deviations "
        f"{_list(ours.deviation)}{pixels}, the evaluation data {_list(theirs.mean)} and "
        f"{_list(theirs.deviation)}"
    )
    return Cause("normalization", "", "", text)


def _list(values: Iterable[float]) -> str:
    return "/".join(f"{value:.3g}" for value in list(values)[:_MAX_PERMUTED])
