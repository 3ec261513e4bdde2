"""Writes a scale on the integers that a target runs: the same real numbers wherever it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qtrace.errors import SchemeError
from qtrace.numerics import choose
from qtrace.scheme import QParams, QScheme

__all__ = ["Fit", "fit", "span"]


class Fit(NamedTuple):
    """Quantization parameters for a target.

    Attributes:
        qparams: the parameters.
        note: what differs from the given parameters, as a clause; "" if they stand for the same numbers.
    """

    qparams: QParams
    note: str


def fit(source: QParams, planned: QScheme, problem: Callable[[QScheme], str | None], fixed: bool) -> Fit:
    """Writes ``source`` on the integers of a target.

    The planned scheme is kept if it has the same levels, such as uint8 with the zero point 128 for int8.
    Else the given scheme is, if ``problem`` allows it. Else the nearest parameters are derived, with a note.

    Args:
        source: the parameters of one tensor, one scale.
        planned: the scheme that the config wants there, per tensor.
        problem: says why another scheme than ``planned`` may not be used; None if it may.
        fixed: whether the integers of a narrower type may stay as they are in a wider one: those of a
            parameter that is clipped to the range of ``source``.
    """
    own = source.scheme.replace(rounding=planned.rounding)
    other = own.replace(signed=not own.signed, symmetric=False)
    runs = [s for s in (planned, own, other) if s is planned or problem(s) is None]
    for scheme in runs:
        if (qparams := _shifted(source, scheme)) is not None and scheme.narrow == own.narrow:
            return Fit(qparams, "")
    target = planned.describe()
    for scheme in (*runs, *(s.replace(narrow=not s.narrow) for s in (own, other))):
        if scheme not in runs and problem(scheme) is not None:
            continue
        if (qparams := _shifted(source, scheme)) is not None:
            step = "one step less" if scheme.narrow else "one step more"
            return Fit(qparams, f"{_name(own)} became {_name(scheme)}: {step} at the lower end")
    wide = _widened(source, planned) if fixed else None
    if wide is not None:
        return Fit(wide, f"{_name(own)} became {_name(planned)}: the same integers, of {own.bits} bits")
    derived = choose(*span(source), planned)
    return Fit(derived, f"{_name(own)} cannot be used ({problem(own)}): its range was written as {target}")


def span(source: QParams) -> tuple[float, float]:
    """Returns the lowest and the highest number that ``source`` stands for."""
    scale, zero = float(source.scale), int(source.zero_point)
    return (source.scheme.qmin - zero) * scale, (source.scheme.qmax - zero) * scale


def _name(scheme: QScheme) -> str:
    return scheme.describe().replace(" half-away", "")


def _shifted(source: QParams, scheme: QScheme) -> QParams | None:
    """Returns the parameters of ``scheme`` with the same scale and the same number at its middle, if any."""
    own = source.scheme
    if scheme.bits != own.bits:
        return None
    shift = (1 << (own.bits - 1)) * (own.signed - scheme.signed)
    try:
        return QParams(scheme, source.scale, source.zero_point + shift)
    except SchemeError:  # a zero point that a symmetric scheme lacks, or a scale that is no power of two
        return None


def _widened(source: QParams, scheme: QScheme) -> QParams | None:
    """Returns the same integers in a wider ``scheme``, if it has them all."""
    own = source.scheme
    if scheme.bits <= own.bits or scheme.signed != own.signed:
        return None
    try:
        return QParams(scheme, source.scale, source.zero_point)
    except SchemeError:
        return None
