"""Sums over batches, from which the figures of a site are computed, in numpy and float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qtrace.metrics import ErrorSums
from qtrace.numerics import dequantize, quantize
from qtrace.observers.mse import MeanSquaredError
from qtrace.observers.statistics.histogram import origin_of
from qtrace.scheme import QParams, QScheme

__all__ = ["Histogram", "SiteTally"]


@dataclass(frozen=True)
class Histogram:
    """The distribution of a site's float values, and the range of its integers.

    Attributes:
        left: the left end of the first bin.
        width: the width of a bin.
        counts: the number of values in each bin.
        lo, hi: the smallest and the largest value that the integers stand for.
        step: the distance between two values that integers stand for.
    """

    left: float
    width: float
    counts: tuple[int, ...]
    lo: float
    hi: float
    step: float


class SiteTally:
    """The sums of one site of activations.

    Args:
        name: the name of the site.
        qparams: the parameters of the site.
    """

    def __init__(self, name: str, qparams: QParams) -> None:
        self.name, self.qparams = name, qparams
        self.total, self.own, self.inherited = ErrorSums(), ErrorSums(), ErrorSums()
        self.values = self.clipped = self.unequal = 0
        self.lowest, self.highest = qparams.scheme.qmax, qparams.scheme.qmin
        # The distribution covers the whole tensor, also if its parameters are per channel.
        self.distribution = MeanSquaredError(_per_tensor(qparams.scheme))

    def add(self, reference: np.ndarray, own: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Adds one batch, unless a selection (NMS, a mask) keeps other rows.

        Args:
            reference: the float graph's value.
            own: the rounded value of the site with everything before it in float.
            before, after: the quantized graph's value, unrounded and rounded.
        """
        if reference.shape == own.shape:
            self.own.add(reference, own)
        if reference.shape == own.shape == after.shape:
            self.total.add(reference, after)
            self.inherited.add(own, after)
        else:
            self.unequal += 1
        self.distribution.observe(reference, site=self.name)
        integers = quantize(before, self.qparams)
        self.lowest = min(self.lowest, int(integers.min()))
        self.highest = max(self.highest, int(integers.max()))
        self.values += before.size
        self.clipped += clipped(before, integers, self.qparams)

    @property
    def used(self) -> float:
        """The share of the integers' range between the smallest and the largest that occurred."""
        scheme = self.qparams.scheme
        return max(self.highest - self.lowest, 0) / (scheme.qmax - scheme.qmin)

    def histogram(self, bins: int = 128) -> Histogram:
        """The distribution in about ``bins`` bins."""
        state = self.distribution.state_dict()
        counts = np.asarray(state["counts"])[0]
        occupied = int(np.flatnonzero(counts)[-1]) + 1
        group = max(1, -(-occupied // bins))
        padded = np.pad(counts[:occupied], (0, -occupied % group)).reshape(-1, group).sum(axis=1)
        width = float(np.ldexp(1.0, int(np.asarray(state["exponent"])[0])))
        origin = origin_of(np.asarray(state["lo"]), np.asarray(state["exponent"]))
        lo, hi = range_of(self.qparams)
        step = float(np.max(self.qparams.scale))
        return Histogram(float(origin[0]) * width, width * group, tuple(int(c) for c in padded), lo, hi, step)


def clipped(values: np.ndarray, integers: np.ndarray, qparams: QParams) -> int:
    """Counts the values that lie outside the range of the integers by more than rounding."""
    scheme = qparams.scheme
    ends = (integers == scheme.qmin) | (integers == scheme.qmax)
    if not ends.any():
        return 0
    scale = qparams.scale
    if scale.ndim:
        shape = [1] * values.ndim
        shape[scheme.axis or 0] = -1
        scale = scale.reshape(shape)
    return int(np.count_nonzero(np.abs(values - dequantize(integers, qparams)) > 0.5000001 * scale))


def range_of(qparams: QParams) -> tuple[float, float]:
    """The smallest and the largest value that integers with these parameters stand for, over all channels."""
    scheme, zero_point = qparams.scheme, qparams.zero_point.astype(np.float64)
    lo, hi = ((end - zero_point) * qparams.scale for end in (scheme.qmin, scheme.qmax))
    return float(np.min(lo)), float(np.max(hi))


def _per_tensor(scheme: QScheme) -> QScheme:
    return scheme.replace(axis=None) if scheme.per_channel else scheme
