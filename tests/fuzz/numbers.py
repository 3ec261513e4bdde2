"""Scales, zero points and roundings, against the formula in exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from qtrace.errors import SchemeError
from qtrace.numerics import choose, dequantize, fake_quantize, quantize
from qtrace.scheme import QParams, QScheme

# A scale that is rounded up to a power of two takes the last level beyond float32 from half its range on.
LARGEST = 2.0**126
FINITE = st.floats(-LARGEST, LARGEST, allow_nan=False, width=32)
VALUES = st.one_of(FINITE, st.sampled_from([0.0, -0.0, 1e-45, 1e-38, -1e-38, LARGEST]))


@st.composite
def _schemes(draw: st.DrawFn) -> QScheme:
    flags = {name: draw(st.booleans()) for name in ("signed", "symmetric", "narrow", "power_of_two")}
    roundings = ("half_even", "half_away", "half_up")
    return QScheme(
        bits=draw(st.integers(2, 16)),
        rounding=draw(st.sampled_from(roundings)),
        **flags,
    )


def _nearest(value: Fraction, rounding: str) -> int:
    below = value.numerator // value.denominator
    rest = value - below
    if rest != Fraction(1, 2):
        return below + (rest > Fraction(1, 2))
    if rounding == "half_even":
        return below + below % 2
    return below + (value > 0 or rounding == "half_up")


def _check_ranges(params: QParams, lo: float, hi: float) -> None:
    """What was asked for is covered to half a step, as far as float32 holds the scale; 0 is exact."""
    scheme, scale = params.scheme, float(params.scale)
    zero = int(params.zero_point)
    assert scheme.qmin <= zero <= scheme.qmax
    low, high = (scheme.qmin - zero) * scale, (scheme.qmax - zero) * scale
    slack = 0.5 * scale + 2.0**-22 * max(abs(lo), abs(hi))
    assert low - slack <= min(lo, 0.0)
    assert high + slack >= max(hi, 0.0)
    assert dequantize(quantize(np.float32(0), params), params) == 0
    if scheme.power_of_two:
        assert np.frexp(scale)[0] == 0.5


def check(data: st.DataObject, folder: Path) -> None:
    scheme = data.draw(_schemes())
    lo, hi = sorted((data.draw(VALUES), data.draw(VALUES)))
    try:
        params = choose(lo, hi, scheme)
    except SchemeError:
        assert hi - lo > 2.0 ** (127 - scheme.bits) or scheme.power_of_two
        return
    _check_ranges(params, lo, hi)
    x = np.array(data.draw(st.lists(VALUES, min_size=1, max_size=8)), np.float32)
    integers = quantize(x, params)
    scale, zero = params.scale, int(params.zero_point)
    for value, found in zip(x, integers, strict=True):
        with np.errstate(over="ignore", under="ignore"):
            ratio = value / scale  # one float32 division, as ONNX has it; all after it is exact
        if np.isinf(ratio):
            expected = scheme.qmax if ratio > 0 else scheme.qmin
        else:
            expected = _nearest(Fraction(float(ratio)), scheme.rounding) + zero
        assert found == min(max(expected, scheme.qmin), scheme.qmax)
    back = dequantize(integers, params)
    np.testing.assert_array_equal(back, fake_quantize(x, params))
    held = np.isfinite(back)  # a scale near the end of float32 has integers that no float32 holds
    np.testing.assert_array_equal(quantize(back[held], params), integers[held])  # what was rounded stays
