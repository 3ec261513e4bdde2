"""The evidence of each site: ranges and rounding errors of its channels, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Branch", "Channels", "SiteEvidence", "join_channels"]

_DEAD = 1e-9  # of the largest power of a channel


@dataclass(frozen=True)
class Channels:
    """Figures of each channel of a tensor.

    Attributes:
        low, high: the smallest and the largest value.
        power: the mean of the squared values; of a weight, weighted by the power of the inputs it multiplies.
        noise: the mean of the squared rounding errors, weighted in the same way.
        clipped: the part of ``noise`` by values outside of the quantized range.
        unseen: the mean of the squared distances of values to the range that calibration observed.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    power: tuple[float, ...]
    noise: tuple[float, ...]
    clipped: tuple[float, ...]
    unseen: tuple[float, ...]

    @property
    def magnitudes(self) -> np.ndarray:
        """The largest magnitude in each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def alive(self) -> np.ndarray:
        """Whether each channel has a power beside that of the strongest channel."""
        power = np.asarray(self.power)
        return power > _DEAD * max(float(power.max(initial=0.0)), float(np.finfo(np.float64).tiny))

    @property
    def relative_noise(self) -> np.ndarray:
        """The noise of each channel over its power, at most 1; 0 for dead channels."""
        power, noise = np.asarray(self.power), np.asarray(self.noise)
        alive = self.alive
        return np.where(alive, np.minimum(noise / np.where(alive, power, 1.0), 1.0), 0.0)

    @property
    def mean_relative_noise(self) -> float:
        """The mean of ``relative_noise`` over the channels that are not dead.

        The noise of the whole tensor hides that an outlier costs all other channels their precision.
        """
        alive = self.alive
        return float(self.relative_noise[alive].mean()) if alive.any() else 0.0

    def share_of_noise(self, part: tuple[float, ...]) -> float:
        """Returns how much of the relative noise of the channels is due to ``part`` of it, at most 1."""
        noise = np.asarray(self.noise)
        ratios = np.minimum(np.asarray(part) / np.where(noise > 0, noise, 1.0), 1.0)
        total = float(self.relative_noise.sum())
        return float((self.relative_noise * ratios).sum()) / total if total > 0 else 0.0


def join_channels(parts: list[Channels]) -> Channels:
    """Merges the figures of the same channels over several batches of equal size."""
    names = ("power", "noise", "clipped", "unseen")
    columns = {
        "low": np.min([part.low for part in parts], axis=0),
        "high": np.max([part.high for part in parts], axis=0),
        **{name: np.mean([getattr(p, name) for p in parts], axis=0) for name in names},
    }
    return Channels(**{name: tuple(map(float, values)) for name, values in columns.items()})


@dataclass(frozen=True)
class Branch:
    """An input of an op that joins tensors, whose channels share a range with those of the other inputs.

    Attributes:
        name: the name of the input's node.
        magnitude: its largest magnitude.
        relative_noise: the mean of its channels' noise over their power.
    """

    name: str
    magnitude: float
    relative_noise: float


@dataclass(frozen=True)
class SiteEvidence:
    """The measurements of one site.

    Attributes:
        site: the name of the site.
        sort: activation or weight.
        kind: the kind of op that computes an activation or reads a weight; "" for an input of the graph.
        op: the name of that op; "" for an input of the graph.
        group: the group whose parameters the site has.
        scheme: the scheme in words.
        bits: the bits of the scheme.
        per_channel: whether each channel has a scale of its own.
        observer: the name of the observer that chose the range; "" if unknown.
        lo, hi: the smallest and the largest value that the integers stand for.
        observed: the smallest and the largest value in calibration; None if the model does not hold them.
        channels: the figures of each channel, measured on the evaluation data.
        branches: the inputs of an op that joins tensors, or the members of the site's group.
        readers: (name, kind) of the ops that read the site.
        inputs: for a weight, the figures of each input channel.
        dead_inputs: for a weight, how many input channels are 0 in all samples.
        dead_magnitude, live_magnitude: for a weight, the largest magnitude at dead and at live input
            channels, as the median over output channels.
        output_noise: noise power over the power of the outputs if only the site's group is rounded; None if
            it was not measured.
    """

    site: str
    sort: str
    kind: str
    op: str
    group: str
    scheme: str
    bits: int
    per_channel: bool
    observer: str
    lo: float
    hi: float
    observed: tuple[float, float] | None
    channels: Channels
    branches: tuple[Branch, ...] = ()
    readers: tuple[tuple[str, str], ...] = ()
    inputs: Channels | None = None
    dead_inputs: int = 0
    dead_magnitude: float = 0.0
    live_magnitude: float = 0.0
    output_noise: float | None = None

    @property
    def clipped_share(self) -> float:
        """The share of the channels' relative noise by values outside of the quantized range."""
        return self.channels.share_of_noise(self.channels.clipped)

    @property
    def unseen_share(self) -> float:
        """The share of the channels' relative noise by values outside of what calibration observed."""
        return self.channels.share_of_noise(self.channels.unseen)

    @property
    def beyond_observed(self) -> float:
        """How far values lie outside of what calibration observed, as a share of the observed range."""
        if self.observed is None:
            return 0.0
        low, high = self.observed
        width = max(high - low, float(np.finfo(np.float32).tiny))
        excess = max(low - min(self.channels.low), max(self.channels.high) - high, 0.0)
        return excess / width
