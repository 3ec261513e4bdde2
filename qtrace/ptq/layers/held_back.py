"""A part of the calibration data that is held back and decides for each layer whether a correction stays.

A correction that is fitted to a few dozen images also fits what only these have. So every fourth batch is
held back: a correction is fitted to the others first, and stays only if it lowers the error of the layer's
output on the batches held back. Of four such batches or more, also in nine of ten bootstrap samples of them.
Then it is fitted again, to all batches. Of fewer than four batches none is
held back, and the batches that a correction is fitted to decide. The damping of a ridge regression is one
number; it comes from all batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qtrace.comparing.sums import FEWEST_SAMPLES, finite_or_none
from qtrace.data.batches import HELD_EVERY
from qtrace.errors import CalibrationError
from qtrace.ptq.layers.quantized import LayerTwins, QuantizedLayer, per_channel

_BOOTSTRAP_SAMPLES = 200
_SUPPORT = 0.9


def held_back(count: int) -> tuple[int, ...]:
    """Returns the numbers of the batches that are held back, of ``count`` batches."""
    return tuple(range(HELD_EVERY - 1, count, HELD_EVERY))


@dataclass(frozen=True)
class OutputErrors:
    """Sums over the errors of a layer's output, reference minus value, in float64.

    Attributes:
        count: number of values of each channel.
        total: the sum of the errors of each channel, (C,).
        square: the sum of the squared errors of all channels.
        signal: the sum of the squared references.
    """

    count: float
    total: np.ndarray
    square: float
    signal: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[np.ndarray, np.ndarray]], layer: QuantizedLayer) -> OutputErrors:
        """Sums the errors of pairs of reference and value.

        Raises:
            CalibrationError: when a value is not finite.
        """
        count, total, square, signal = 0.0, np.zeros(1), 0.0, 0.0
        for reference, value in pairs:
            error = reference - value
            rows = per_channel(error, layer.axis)
            count, total = count + rows.shape[1], total + rows.sum(axis=1, dtype=np.float64)
            square += _squared(error)
            signal += _squared(reference)
        if not np.isfinite(square + signal):
            raise CalibrationError(
                f"{layer.name} has values that are NaN or infinite, and the model is unchanged: check the "
                "calibration data and the layers before this one."
            )
        return cls(count, total, square, signal)

    def __add__(self, other: OutputErrors) -> OutputErrors:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return OutputErrors(*(first + second for first, second in pairs))

    @property
    def mean(self) -> np.ndarray:
        """The mean error of each channel, (C,)."""
        return self.total / max(self.count, 1)

    def noise(self, shift: np.ndarray | float = 0.0) -> float:
        """Returns the sum of the squared errors after ``shift`` (C,) is added to the values."""
        shifts = np.broadcast_to(shift, self.total.shape)
        return max(float(self.square - 2 * (shifts @ self.total) + self.count * (shifts @ shifts)), 0.0)

    @property
    def centered_noise(self) -> float:
        """The sum of the squared errors without the mean of each channel."""
        return self.noise(self.mean)

    def decibels(self, noise: float) -> float | None:
        """Returns the ratio of the references to ``noise`` in dB; None without noise or signal."""
        with np.errstate(divide="ignore"):
            return finite_or_none(float(10 * np.log10(np.float64(self.signal) / noise))) if noise else None


def _squared(values: np.ndarray) -> float:
    """Sums the squares of float32 values, row by row in float32 and the rows in float64."""
    rows = values.reshape(values.shape[0], -1) if values.ndim else values.reshape(1, 1)
    return float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64))


def layer_errors(
    twins: LayerTwins, layer: QuantizedLayer, batches: Sequence[int] | None = None
) -> dict[int, OutputErrors]:
    """Computes the errors of a layer's output over all of its calls: batch -> sums.

    Args:
        twins: both graphs, before the layer.
        layer: the layer.
        batches: the numbers of the batches; None for all.
    """
    numbers = range(twins.count) if batches is None else batches
    errors: dict[int, OutputErrors] = {}
    for call in layer.calls:
        for number, pair in zip(numbers, twins.outputs(call.expr, numbers), strict=True):
            sums = OutputErrors.of([pair], layer)
            errors[number] = errors[number] + sums if number in errors else sums
    return errors


def summed(errors: Mapping[int, OutputErrors], batches: Iterable[int] | None = None) -> OutputErrors:
    """Adds the errors of ``batches``; of all if None."""
    first, *others = [errors[number] for number in (errors if batches is None else batches)]
    return sum(others, first)


@dataclass(frozen=True)
class Gain:
    """What a correction changes on the batches that are held back.

    Attributes:
        noises: the error before and after, summed over the batches.
        supported: whether it falls, and by more than the batches vary: of four batches or more, it also falls
            in nine of ten bootstrap samples (Efron 1979).
    """

    noises: tuple[float, float]
    supported: bool

    @classmethod
    def of(cls, noises: Sequence[tuple[float, float]]) -> Gain:
        """Compares the errors before and after in each batch."""
        pairs = np.asarray(noises, np.float64)
        before, after = (float(total) for total in pairs.sum(axis=0))
        gains = pairs[:, 0] - pairs[:, 1]
        if len(gains) < FEWEST_SAMPLES:
            return cls((before, after), after < before)
        drawn = np.random.default_rng(0).integers(0, len(gains), (_BOOTSTRAP_SAMPLES, len(gains)))
        share = float(np.mean(gains[drawn].sum(axis=1) > 0))
        return cls((before, after), after < before and share >= _SUPPORT)


def compare(before: Mapping[int, OutputErrors], after: Mapping[int, OutputErrors]) -> Gain:
    """Compares the errors in each batch, each without the mean error of all batches."""
    means = (summed(before).mean, summed(after).mean)
    return Gain.of([(before[n].noise(means[0]), after[n].noise(means[1])) for n in before])


def gain_text(before: float, after: float, batches: Sequence[int]) -> str:
    """Describes how an error changes on the batches held back, as a clause; "" if none is held back."""
    if not batches:
        return ""
    where = f"on {len(batches)} held-back batch{'' if len(batches) == 1 else 'es'}"
    if not before or not after:
        return f"{where} the error goes from {before:.3g} to {after:.3g}"
    change = 10 * np.log10(before / after)
    if not round(change, 2):
        return f"{where} the error changes by less than 0.01 dB"
    verb = "falls" if change > 0 else "rises"
    return f"{where} the error {verb} by {abs(change):.2f} dB"
