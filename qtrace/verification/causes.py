"""What differences between two arrays of integers look like: the likely cause of an op that differs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qtrace.scheme import QParams

__all__ = ["likely_causes"]


def likely_causes(
    exact: np.ndarray, mine: np.ndarray, theirs: np.ndarray, qparams: QParams
) -> tuple[str, ...]:
    """What the differences between two arrays of integers look like, the most likely first.

    Args:
        exact: what the graph had before rounding, in LSB, with the zero point added.
        mine: the graph's integers.
        theirs: the runtime's integers, of the same shape.
        qparams: the parameters of both.
    """
    delta = theirs - mine
    apart = delta != 0
    low, high = qparams.scheme.qmin, qparams.scheme.qmax
    causes = []
    if (rule := _other_rounding(exact, mine, theirs, qparams)) is not None:
        return (f"rounding: {rule}",)
    if np.array_equal(np.sort(mine, axis=None), np.sort(theirs, axis=None)):
        causes.append("layout: the same integers stand at other places (a transpose, or an order of axes)")
    edge = np.isin(theirs[apart], (low, high)) ^ np.isin(mine[apart], (low, high))
    if edge.mean() > 0.9:
        causes.append(f"saturation: one side stops at {low} or {high}, the other does not")
    zero = int(qparams.zero_point) if not qparams.scale.ndim else low
    # Neither saturated nor clamped at 0, as by a relu.
    inside = (theirs > low) & (theirs < high) & (theirs != zero) & (mine != zero)
    if (shift := _one_shift(delta[inside])) is not None:
        causes.append(f"zero point: every value is off by {shift:+d} LSB, as without it or with another one")
    elif (bias := _per_channel_shift(delta, inside)) is not None:
        causes.append(f"bias: each channel is off by a constant (up to {bias} LSB): missing or another scale")
    elif (ratio := _ratio(exact, theirs, qparams)) is not None:
        causes.append(f"scale: the runtime's values are {ratio:.4g} times the graph's")
    if np.abs(delta).max() == 1:
        ties = np.abs(np.abs(exact - np.floor(exact)) - 0.5)[apart] < 1e-3
        causes.append(
            "rounding: ties go the other way" if ties.mean() > 0.9 else "rounding: an intermediate is rounded"
        )
    return tuple(causes) or ("unknown: compare the op's attributes, padding and weights in the file",)


# What a runtime may do instead of rounding to the nearest integer, ties to even.
_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ties go away from zero": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "ties go up": lambda x: np.floor(x + 0.5),
    "ties go to the even integer": np.rint,
    "the runtime rounds down": np.floor,
    "the runtime rounds up": np.ceil,
    "the runtime rounds towards zero": np.trunc,
}


def _other_rounding(exact: np.ndarray, mine: np.ndarray, theirs: np.ndarray, qparams: QParams) -> str | None:
    """The rounding that gives the runtime's integers nearly everywhere, where the graph's does not."""
    if np.abs(theirs - mine).max() != 1:
        return None
    zero = int(qparams.zero_point) if not qparams.scale.ndim else 0
    for name, rule in _ROUNDINGS.items():
        other = np.clip(rule(exact - zero) + zero, qparams.scheme.qmin, qparams.scheme.qmax)
        if np.mean(other == theirs) > max(0.999, np.mean(mine == theirs)):
            return name
    return None


def _one_shift(delta: np.ndarray) -> int | None:
    """The constant, of more than 1 LSB, by which nearly all of ``delta`` is off, else None."""
    if delta.size < 2:
        return None
    shift = round(float(np.median(delta)))
    return shift if abs(shift) > 1 and np.mean(np.abs(delta - shift) <= 1) > 0.95 else None


def _per_channel_shift(delta: np.ndarray, inside: np.ndarray) -> int | None:
    """The largest shift where every channel differs by a constant of its own, else None."""
    if delta.ndim < 2:
        return None
    flat = np.moveaxis(delta, 1, 0).reshape(delta.shape[1], -1)
    seen = np.moveaxis(inside, 1, 0).reshape(delta.shape[1], -1)
    shifts = np.array(
        [round(float(np.median(d[s]))) if s.any() else 0 for d, s in zip(flat, seen, strict=True)]
    )
    rest = np.abs(flat - shifts[:, None])[seen]
    constant = rest.size > delta.shape[1] and np.mean(rest <= 1) > 0.95 and np.abs(shifts).max() > 1
    return int(np.abs(shifts).max()) if constant else None


def _ratio(exact: np.ndarray, theirs: np.ndarray, qparams: QParams) -> float | None:
    """The factor between the two where one explains them, else None."""
    if qparams.scale.ndim:
        return None
    inside = (theirs > qparams.scheme.qmin) & (theirs < qparams.scheme.qmax)
    zero = int(qparams.zero_point)
    a, b = (v[inside].astype(np.float64) - zero for v in (exact, theirs))
    if not a.size or not a @ a:
        return None
    factor = float(a @ b) / float(a @ a)
    fits = np.mean(np.abs(b - factor * a) <= 1) > 0.95
    return factor if fits and abs(factor - 1) > 1e-3 else None
