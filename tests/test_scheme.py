from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtrace.errors import SchemeError
from qtrace.scheme import QParams, QScheme
from tests.each import each_of

SCHEMES = st.builds(
    QScheme,
    bits=st.integers(2, 16),
    signed=st.booleans(),
    symmetric=st.booleans(),
    narrow=st.booleans(),
    axis=st.none() | st.integers(-4, 4),
    power_of_two=st.booleans(),
    rounding=st.sampled_from(["half_even", "half_away", "half_up"]),
)
SCALES = st.floats(width=32, min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def qparams(draw: st.DrawFn) -> QParams:
    scheme = draw(SCHEMES)
    number = draw(st.integers(1, 5)) if scheme.per_channel else 1
    scale = np.array(draw(st.lists(SCALES, min_size=number, max_size=number)), np.float32)
    if scheme.power_of_two:
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
    zero = scheme.symmetric_zero_point
    points = st.just(zero) if scheme.symmetric else st.integers(scheme.qmin, scheme.qmax)
    zero_point = np.array(draw(st.lists(points, min_size=number, max_size=number)))
    shape = (number,) if scheme.per_channel else ()
    return QParams(scheme, scale.reshape(shape), zero_point.reshape(shape))


@each_of(
    ("options", "qmin", "qmax"),
    [
        ({}, 0, 255),
        ({"signed": True}, -128, 127),
        ({"signed": True, "narrow": True}, -127, 127),
        ({"narrow": True}, 1, 255),
        ({"bits": 2, "signed": True, "narrow": True}, -1, 1),
        ({"bits": 4}, 0, 15),
        ({"bits": 16, "signed": True}, -32768, 32767),
        ({"bits": 16}, 0, 65535),
    ],
)
def test_integer_range(options, qmin, qmax):
    scheme = QScheme(**options)
    assert (scheme.qmin, scheme.qmax) == (qmin, qmax)


@each_of(
    ("options", "word"),
    [
        ({"bits": 1}, "bits"),
        ({"bits": 17}, "bits"),
        ({"bits": True}, "bits"),
        ({"bits": 8.0}, "bits"),
        ({"bits": "8"}, "bits"),
        ({"axis": False}, "axis"),
        ({"axis": np.True_}, "axis"),
        ({"axis": 0.5}, "axis"),
        ({"signed": 1}, "signed"),
        ({"symmetric": "true"}, "symmetric"),
        ({"narrow": None}, "narrow"),
        ({"power_of_two": "no"}, "power_of_two"),
        ({"rounding": "up"}, "half_away"),
        ({"rounding": None}, "half_even"),
    ],
)
def test_bad_value_is_refused_by_name(options, word):
    with pytest.raises(SchemeError, match=word):
        QScheme(**options)


@given(SCHEMES)
def test_scheme_survives_json(scheme):
    again = QScheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    assert again == scheme
    assert hash(again) == hash(scheme)


@given(SCHEMES)
def test_symmetric_zero_point_is_usable_and_central(scheme):
    zero = scheme.symmetric_zero_point
    assert scheme.qmin <= zero < scheme.qmax
    assert abs((zero - scheme.qmin) - (scheme.qmax - zero)) == (0 if scheme.narrow else 1)


def test_numpy_integers_become_plain_ones():
    scheme = QScheme(bits=np.int64(4), axis=np.int32(-1))
    assert scheme == QScheme(bits=4, axis=-1)
    assert json.dumps(scheme.to_dict())
    assert scheme.per_channel


def test_unknown_key_is_named_with_the_known_ones():
    with pytest.raises(SchemeError, match=r"'bit'.*bits, signed"):
        QScheme.from_dict({"bit": 8})
    with pytest.raises(SchemeError, match=r"'width'"):
        QScheme().replace(width=4)
    with pytest.raises(SchemeError, match="mapping"):
        QScheme.from_dict("uint8")


def test_replace_changes_only_what_is_named():
    scheme = QScheme(signed=True, axis=0)
    assert scheme.replace(bits=4) == QScheme(bits=4, signed=True, axis=0)
    assert scheme == QScheme(signed=True, axis=0)
    with pytest.raises(SchemeError):
        scheme.replace(bits=99)


@each_of(
    ("options", "text"),
    [
        ({}, "uint8 affine"),
        (
            {"signed": True, "symmetric": True, "axis": 0, "narrow": True},
            "int8 sym per-channel(0) narrow",
        ),
        ({"bits": 16, "power_of_two": True, "rounding": "half_away"}, "uint16 affine pow2 half-away"),
    ],
)
def test_describe(options, text):
    assert QScheme(**options).describe() == text


@given(qparams())
def test_qparams_survive_json_pickle_and_copies_with_identical_bits(params):
    for again in (
        QParams.from_dict(json.loads(json.dumps(params.to_dict()))),
        pickle.loads(pickle.dumps(params)),
        copy.deepcopy(params),
    ):
        assert again == params
        assert hash(again) == hash(params)
        assert again.scale.tobytes() == params.scale.tobytes()
        assert again.scale.shape == params.scale.shape
        assert (again.scale.dtype, again.zero_point.dtype) == (np.float32, np.int32)
        assert not again.scale.flags.writeable
        assert not again.zero_point.flags.writeable


def test_qparams_are_read_only_copies():
    scale = np.array([0.5, 0.25], np.float32)
    params = QParams(QScheme(axis=0), scale, np.array([3, 4]))
    scale[0] = 9
    assert params.scale.tolist() == [0.5, 0.25]
    with pytest.raises(ValueError, match="read-only"):
        params.scale[0] = 1
    with pytest.raises(AttributeError):
        params.scale = scale


def test_qparams_equal_by_value_only():
    params = QParams(QScheme(), 0.1, 3)
    assert params == QParams(QScheme(), np.float32(0.1), np.int64(3))
    assert params != QParams(QScheme(), np.nextafter(np.float32(0.1), np.float32(1)), 3)
    assert params != QParams(QScheme(), 0.1, 4)
    assert params != QParams(QScheme(narrow=True), 0.1, 3)
    assert params != "uint8"


@each_of(
    ("options", "scale", "zero_point", "word"),
    [
        ({}, 0.0, 0, "positive"),
        ({}, -1.0, 0, "positive"),
        ({}, np.nan, 0, "positive"),
        ({}, np.inf, 0, "positive"),
        ({}, 1e-60, 0, "positive"),
        ({}, 1e60, 0, "positive"),
        ({}, "1", 0, "numbers"),
        ({}, True, 0, "numbers"),
        ({}, [[1.0], [1.0, 2.0]], 0, "numbers"),
        ({}, 1.0, 256, "255"),
        ({}, 1.0, -1, "-1"),
        ({}, 1.0, 2**40, "255"),
        ({}, 1.0, 1.0, "integers"),
        ({}, 1.0, False, "integers"),
        ({"narrow": True}, 1.0, 0, r"\[1, 255\]"),
        ({"symmetric": True}, 1.0, 127, "is 128"),
        ({"symmetric": True, "signed": True}, 1.0, 1, "is 0"),
        ({"power_of_two": True}, 0.3, 0, "powers of two"),
        ({}, [1.0], [0], r"takes \(\)"),
        ({"axis": 0}, 1.0, 0, "channels"),
        ({"axis": 0}, [], np.zeros(0, int), "channels"),
        ({"axis": 0}, [1.0, 2.0], [0], "shape"),
        ({"axis": 0}, [[1.0]], [[0]], "shape"),
    ],
)
def test_impossible_qparams_are_refused(options, scale, zero_point, word):
    with pytest.raises(SchemeError, match=word):
        QParams(QScheme(**options), scale, zero_point)


def test_qparams_from_dict_names_what_is_wrong():
    data = QParams(QScheme(), 0.1, 3).to_dict()
    with pytest.raises(SchemeError, match="'zero_point' is missing"):
        QParams.from_dict({"scheme": data["scheme"], "scale": 0.1})
    with pytest.raises(SchemeError, match="'zp'"):
        QParams.from_dict({**data, "zp": 3})
    with pytest.raises(SchemeError, match="give a QScheme"):
        QParams({"bits": 8}, 0.1, 3)
