"""Scales on the integers of a target: exact wherever it has them, else derived and named."""

from __future__ import annotations

import numpy as np

from qtrace.config import backends
from qtrace.preparation.passes.native import fit, span
from qtrace.scheme import QParams, QScheme
from tests.each import each_of

HALF = "half_even"


def own(
    bits: int = 8, signed: bool = True, narrow: bool = False, zero: int = 0, scale: float = 0.25
) -> QParams:
    symmetric = signed and not zero
    scheme = QScheme(bits=bits, signed=signed, symmetric=symmetric, narrow=narrow, rounding="half_away")
    return QParams(scheme, np.float32(scale), np.int32(zero))


@each_of(
    ("given", "backend", "sort", "scheme", "zero", "exact"),
    [
        (own(), "onnxruntime", "activation", "uint8 affine", 128, True),
        (own(), "tflite", "activation", "int8 affine", 0, True),
        (own(signed=False, zero=7), "tflite", "activation", "int8 affine", -121, True),
        (own(bits=4, signed=False, zero=3), "onnxruntime", "activation", "uint4 affine", 3, True),
        (own(bits=4), "qnn", "weight", "int4 sym", 0, True),
        (own(narrow=True), "onnxruntime", "weight", "int8 sym narrow", 0, True),
        (own(), "onnxruntime", "weight", "int8 sym", 0, True),
        (own(), "tflite", "weight", "int8 sym narrow", 0, False),
        (own(narrow=True), "onnxruntime", "activation", "uint8 affine", 128, False),
        (own(bits=4), "tflite", "weight", "int8 sym narrow", 0, False),
        (own(signed=False, zero=7), "tensorrt", "activation", "int8 sym", 0, False),
        (own(bits=16), "tflite", "activation", "int16 sym", 0, True),
        (own(bits=12), "openvino", "activation", "uint8 affine", 128, False),
    ],
)
def test_fit_takes_given_ranges_into_the_scheme_of_the_target(
    given: QParams, backend: str, sort: str, scheme: str, zero: int, exact: bool
) -> None:
    target = backends.get(backend)
    planned = getattr(target, sort).replace(axis=None)
    qparams, note = fit(given, planned, lambda s: target.problem(sort, s), sort == "weight")
    assert (qparams.scheme.describe(), int(qparams.zero_point)) == (scheme, zero)
    assert target.problem(sort, qparams.scheme) is None
    assert (note == "") == exact
    if exact:
        assert qparams.scale == given.scale
        assert span(qparams) == span(given)


def test_a_target_of_powers_of_two_gets_the_next_one() -> None:
    planned = QScheme(signed=True, symmetric=True, power_of_two=True)
    exact, note = fit(own(scale=0.25), planned, lambda s: None if s.power_of_two else "no", True)
    assert (float(exact.scale), note) == (0.25, "")
    derived, note = fit(own(scale=0.3), planned, lambda s: None if s.power_of_two else "no", True)
    assert float(derived.scale) == 0.5
    assert note == "int8 sym cannot be used (no): its range was written as int8 sym pow2"
    assert span(derived)[1] >= span(own(scale=0.3))[1]
