"""The causes of a low SQNR: one function for each, which looks at the evidence of one site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.sensitivity.diagnosis.measuring import Branch, SiteEvidence

__all__ = ["Cause", "find_cause", "observes_too_little"]

_UNLIKE = 8.0  # the ratio of ranges from which one scale for both loses three bits
_LOST = 1e-2  # noise over power of a channel, 20 dB
_CLIPPED = 0.5  # the share of the noise from which clipping is the cause
_FEW_BITS = 8
_AMPLIFIERS = ("div", "sqrt", "exp", "pow", "log", "softmax", "batch_norm", "layer_norm")


@dataclass(frozen=True)
class Cause:
    """Why a site loses precision.

    Attributes:
        name: the kind of cause, a word that `qtrace calibrate --json` and the docs share.
        site: the name of the site; "" for a cause that lies in the data.
        op: the op that computes the site, or reads the weight.
        text: the evidence, as a clause with numbers.
        share: the share of the noise of all measured sites; None if it was not measured.
        channels: the channels at fault.
        details: further figures, as plain data.
    """

    name: str
    site: str
    op: str
    text: str
    share: float | None = None
    channels: tuple[int, ...] = ()
    details: tuple[tuple[str, Any], ...] = ()


def find_cause(evidence: SiteEvidence) -> Cause | None:
    """Returns the first cause that the evidence of a site shows; None where rounding alone is at work."""
    for judge in _ACTIVATION_CAUSES if evidence.sort == "activation" else _WEIGHT_CAUSES:
        cause = judge(evidence)
        if cause is not None:
            return cause
    return None


def observes_too_little(evidence: SiteEvidence) -> bool:
    """Whether most of the site's noise is by values that leave the range that calibration observed."""
    return (
        evidence.sort == "activation"
        and evidence.unseen_share > _CLIPPED
        and evidence.channels.mean_relative_noise > _LOST / 10
    )


def _cause(
    evidence: SiteEvidence, name: str, text: str, channels: tuple[int, ...] = (), **details: Any
) -> Cause:
    return Cause(name, evidence.site, evidence.op, text, None, channels, tuple(details.items()))


def _clipping(evidence: SiteEvidence) -> Cause | None:
    if evidence.clipped_share < _CLIPPED or evidence.channels.mean_relative_noise < _LOST:
        return None
    low, high = min(evidence.channels.low), max(evidence.channels.high)
    text = f"the range {evidence.lo:.3g} to {evidence.hi:.3g} clips values from {low:.3g} to {high:.3g}"
    if observes_too_little(evidence) and evidence.observed is not None:
        a, b = evidence.observed
        return _cause(evidence, "unseen-values", f"{text}; calibration saw only {a:.3g} to {b:.3g}")
    observer = f", which observer {evidence.observer} chose" if evidence.observer else ""
    return _cause(evidence, "clipped-range", f"{text}{observer}")


def _wide_range(evidence: SiteEvidence) -> Cause | None:
    low, high = min(evidence.channels.low), max(evidence.channels.high)
    width, used = evidence.hi - evidence.lo, max(high, 0.0) - min(low, 0.0)
    if used <= 0 or width < _UNLIKE * used or evidence.channels.mean_relative_noise < _LOST / 10:
        return None
    return _cause(
        evidence,
        "wide-range",
        f"the range {evidence.lo:.3g} to {evidence.hi:.3g} is {width / used:.0f} times as wide as the values "
        f"here, {low:.3g} to {high:.3g}: calibration saw other data, or outliers",
    )


def _unlike_branches(evidence: SiteEvidence) -> Cause | None:
    branches = [branch for branch in evidence.branches if branch.magnitude > 0]
    if len(branches) < 2:
        return None
    largest: Branch = max(branches, key=lambda branch: branch.magnitude)
    worst = max(branches, key=lambda branch: branch.relative_noise)
    ratio = largest.magnitude / worst.magnitude
    if ratio < _UNLIKE or worst.relative_noise < _LOST:
        return None
    return _cause(
        evidence,
        "unlike-branches",
        f"one scale for branches of unlike ranges: {largest.name} reaches {largest.magnitude:.3g}, "
        f"{worst.name} only {worst.magnitude:.3g} (1/{ratio:.0f})",
        branches=tuple(branch.name for branch in branches),
    )


def _outlier_channels(evidence: SiteEvidence) -> Cause | None:
    if evidence.per_channel:
        return None
    magnitudes, alive = evidence.channels.magnitudes, evidence.channels.alive
    if alive.sum() < 2:
        return None
    middle = float(np.median(magnitudes[alive]))
    outliers = np.flatnonzero(alive & (magnitudes > _UNLIKE * middle))
    noise = evidence.channels.relative_noise
    lost = alive & (noise > _LOST)
    if not lost.any() or lost.sum() * 4 < alive.sum():
        return None
    if not len(outliers):
        ratio = float(magnitudes[alive].max() / max(float(magnitudes[lost].min()), 1e-30))
        if ratio < 2 * _UNLIKE:
            return None
        return _cause(
            evidence,
            "unlike-channels",
            f"one scale for channels of unlike ranges, from {magnitudes[lost].min():.3g} to "
            f"{magnitudes[alive].max():.3g}; {lost.sum()} of {alive.sum()} channels lose more than 1 % of "
            f"their power{_amplified(evidence)}",
        )
    order = sorted(outliers, key=lambda c: -magnitudes[c])
    names = ", ".join(str(c) for c in order[:3]) + (", ..." if len(order) > 3 else "")
    plural = "s" if len(order) > 1 else ""
    return _cause(
        evidence,
        "outlier-channels",
        f"channel{plural} {names} of {len(magnitudes)} reach{'' if plural else 'es'} "
        f"{magnitudes[order[0]]:.3g}, {magnitudes[order[0]] / middle:.0f} times the median channel; one "
        f"scale leaves the others {_levels(middle, evidence)}{_amplified(evidence)}",
        tuple(int(c) for c in order),
    )


def _levels(magnitude: float, evidence: SiteEvidence) -> str:
    """Returns how many integers a channel of some magnitude uses, in words."""
    width = evidence.hi - evidence.lo
    count = int(magnitude / width * 2**evidence.bits) + 1 if width > 0 else 1
    return f"{count} level{'s' if count > 1 else ''}"


def _amplified(evidence: SiteEvidence) -> str:
    readers = [name for name, kind in evidence.readers if kind in _AMPLIFIERS]
    return f"; {readers[0]} amplifies the error" if readers else ""


def _amplifying_reader(evidence: SiteEvidence) -> Cause | None:
    readers = [(name, kind) for name, kind in evidence.readers if kind in _AMPLIFIERS]
    noise = evidence.output_noise
    own = evidence.channels.mean_relative_noise
    if not readers or noise is None or noise < 10 * own or noise < _LOST / 10:
        return None
    name, kind = readers[0]
    text = f"{kind} ({name}) amplifies its rounding error {noise / max(own, 1e-12):.0f} times in power"
    return _cause(evidence, "amplifying-op", text, reader=name)


def _dead_inputs(evidence: SiteEvidence) -> Cause | None:
    if not evidence.dead_inputs or evidence.dead_magnitude < _UNLIKE * evidence.live_magnitude:
        return None
    if evidence.channels.mean_relative_noise < _LOST / 10:
        return None
    ratio = evidence.dead_magnitude / max(evidence.live_magnitude, 1e-30)
    return _cause(
        evidence,
        "dead-channels",
        f"{evidence.dead_inputs} input channels are always 0, and the weights that read them, "
        f"{ratio:.0f} times as large as the others, set the scale",
    )


def _unlike_inputs(evidence: SiteEvidence) -> Cause | None:
    inputs = evidence.inputs
    if inputs is None or inputs.mean_relative_noise < _LOST:
        return None
    used = inputs.magnitudes[inputs.alive & (inputs.magnitudes > 0)]
    if len(used) < 2 or used.max() < 2 * _UNLIKE * used.min():
        return None
    return _cause(
        evidence,
        "unlike-input-weights",
        f"one scale for weights of unlike input channels, from {used.min():.3g} to {used.max():.3g} "
        f"(1 to {used.max() / used.min():.0f})",
    )


def _unlike_weights(evidence: SiteEvidence) -> Cause | None:
    if evidence.per_channel:
        return None
    magnitudes, alive = evidence.channels.magnitudes, evidence.channels.alive
    if alive.sum() < 2 or evidence.channels.mean_relative_noise < _LOST / 10:
        return None
    low, high = float(magnitudes[alive].min()), float(magnitudes[alive].max())
    if high < _UNLIKE * low:
        return None
    return _cause(
        evidence,
        "unlike-weights",
        f"one scale for weights of unlike output channels, from {low:.3g} to {high:.3g} "
        f"(1 to {high / max(low, 1e-30):.0f})",
    )


def _clipped_weights(evidence: SiteEvidence) -> Cause | None:
    if evidence.observed is None or evidence.per_channel:
        return None
    low, high = evidence.observed
    width = max(evidence.hi, -evidence.lo)
    if max(high, -low) < 1.5 * width or evidence.channels.mean_relative_noise < _LOST:
        return None
    text = f"the range {evidence.lo:.3g} to {evidence.hi:.3g} clips weights from {low:.3g} to {high:.3g}"
    return _cause(evidence, "clipped-range", f"{text}, which observer {evidence.observer} chose")


def _few_bits(evidence: SiteEvidence) -> Cause | None:
    if evidence.bits >= _FEW_BITS or evidence.channels.mean_relative_noise < _LOST / 10:
        return None
    return _cause(evidence, "few-bits", f"{evidence.bits} bits leave {2**evidence.bits} levels")


_Judge = Callable[[SiteEvidence], Cause | None]
_ACTIVATION_CAUSES: tuple[_Judge, ...] = (
    _clipping,
    _unlike_branches,  # before the next: a site may have the wide range of those that it shares one with
    _wide_range,
    _outlier_channels,
    _amplifying_reader,
    _few_bits,
)
_WEIGHT_CAUSES: tuple[_Judge, ...] = (
    _dead_inputs,
    _clipped_weights,
    _unlike_weights,
    _unlike_inputs,
    _few_bits,
)
