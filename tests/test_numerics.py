from __future__ import annotations

import decimal
import math
from fractions import Fraction

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper

from qtrace.errors import SchemeError
from qtrace.numerics import (
    SMALLEST_SCALE,
    SMALLEST_SHARE,
    alive,
    choose,
    dequantize,
    exact_levels,
    expand,
    fake_quantize,
    quantize,
    round_half_away,
    round_half_up,
    round_to,
)
from qtrace.scheme import QParams, QScheme
from tests.each import each_of

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-1e6, 1e6, width=32)
SCHEMES = st.builds(
    QScheme,
    bits=st.integers(2, 16),
    signed=st.booleans(),
    symmetric=st.booleans(),
    narrow=st.booleans(),
    power_of_two=st.booleans(),
    rounding=st.sampled_from(["half_even", "half_away", "half_up"]),
)


def _decimal_round(x: float, rounding: str) -> float:
    return float(decimal.Decimal(x).quantize(decimal.Decimal(1), rounding=rounding))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(st.floats(-1e9, 1e9, width=32) | st.integers(-1000, 1000).map(lambda i: i / 2))
def test_rounding_agrees_with_decimal_arithmetic(dtype, x):
    value = np.array([x], dtype)
    assert round_to(value, "half_even")[0] == _decimal_round(float(value[0]), decimal.ROUND_HALF_EVEN)
    assert round_half_away(value)[0] == _decimal_round(float(value[0]), decimal.ROUND_HALF_UP)
    assert round_half_up(value)[0] == math.floor(Fraction(float(value[0])) + Fraction(1, 2))
    assert round_half_up(value).dtype == dtype
    assert round_to(value, "half_even").dtype == round_half_away(value).dtype == dtype


def test_rounding_at_the_edges():
    below_half = np.nextafter(np.float32(0.5), np.float32(0))
    values = np.array([below_half, -below_half, 8388609, 8388607.5, np.inf, -np.inf], np.float32)
    assert round_half_away(values).tolist() == [0, 0, 8388609, 8388608, np.inf, -np.inf]
    assert np.isnan(round_half_away(np.float32("nan")))
    assert round_half_up(values).tolist() == [0, 0, 8388609, 8388608, np.inf, -np.inf]
    assert np.isnan(round_half_up(np.float32("nan")))
    assert round_half_up(np.float32([-1e-30, -0.50000006, -1.5])).tolist() == [0, -1, -1]
    assert round_to(np.array([0.5, 1.5, -0.5, -2.5]), "half_up").tolist() == [1, 2, 0, -2]
    assert round_to(np.array([0.5, 1.5, -0.5, -2.5]), "half_even").tolist() == [0, 2, 0, -2]
    assert round_to(np.array([0.5, 1.5, -0.5, -2.5]), "half_away").tolist() == [1, 2, -1, -3]


def test_expand_broadcasts_along_the_axis():
    x = np.arange(24.0).reshape(2, 3, 4)
    param = np.array([1.0, 2.0, 3.0])
    for axis in (1, -2):
        assert np.array_equal(x / expand(param, axis, 3), x / param[None, :, None])
    assert np.shares_memory(expand(param, 1, 3), param)
    assert expand(np.array(2.0), None, 3).shape == ()
    for wrong in ((param, None, 3), (np.array(1.0), 0, 3), (param, 3, 3), (param, -4, 3), (param, 0, 0)):
        with pytest.raises(SchemeError):
            expand(*wrong)


def _exact_ends(params: QParams) -> tuple[Fraction, Fraction]:
    scale, zero = Fraction(float(params.scale)), int(params.zero_point)
    return (params.scheme.qmin - zero) * scale, (params.scheme.qmax - zero) * scale


@given(SCHEMES, FINITE, FINITE)
def test_choose_covers_the_range(scheme, a, b):
    lo, hi = min(a, b), max(a, b)
    wide = max(-lo, hi, 0) if scheme.symmetric else max(hi, 0) - min(lo, 0)
    assume(not scheme.power_of_two or wide / (scheme.qmax - scheme.symmetric_zero_point) < 1e38)
    params = choose(lo, hi, scheme)
    scale = Fraction(float(params.scale))
    assert float(params.scale) >= SMALLEST_SCALE
    # The rounded zero point may shift an affine grid by half a step; float32 rounds the scale by 2**-24.
    shift = Fraction(0) if scheme.symmetric else scale / 2
    slack = shift + Fraction(scheme.qmax - scheme.qmin + 1) * scale / 2**23
    low, high = _exact_ends(params)
    assert low - slack <= Fraction(lo)
    assert Fraction(hi) <= high + slack
    assert fake_quantize(np.zeros(1, np.float32), params)[0] == 0.0


@given(SCHEMES, MODERATE, MODERATE)
def test_values_in_the_range_are_off_by_half_a_step_at_most(scheme, a, b):
    lo, hi = min(a, b, 0.0), max(a, b, 0.0)
    params = choose(lo, hi, scheme)
    scale = float(params.scale)
    x = np.linspace(lo, hi, 97)
    assert np.abs(fake_quantize(x, params) - x).max() <= scale * (0.5 + 1e-7 * 2**scheme.bits) + 1e-300


@given(SCHEMES, MODERATE, MODERATE)
def test_scale_is_the_least_that_covers(scheme, a, b):
    lo, hi = min(a, b, 0.0), max(a, b, 0.0)
    assume(hi - lo > SMALLEST_SCALE * 2**16)
    if scheme.symmetric:
        exact = Fraction(max(-lo, hi)) / (scheme.qmax - scheme.symmetric_zero_point)
    else:
        exact = (Fraction(hi) - Fraction(lo)) / (scheme.qmax - scheme.qmin)
    scale = Fraction(float(choose(lo, hi, scheme).scale))
    if scheme.power_of_two:
        assert np.frexp(float(scale))[0] == 0.5
        assert exact * (1 - Fraction(1, 2**50)) <= scale < 2 * exact
    else:
        assert abs(scale / exact - 1) <= Fraction(1, 2**23)


@each_of("scheme", [QScheme(), QScheme(signed=True, symmetric=True), QScheme(power_of_two=True)])
def test_choose_extends_empty_ranges_to_zero(scheme):
    assert choose(0.0, 0.0, scheme) == choose(0.0, 1.0, scheme)
    assert choose(5.0, 5.0, scheme) == choose(0.0, 5.0, scheme)
    assert choose(-5.0, -5.0, scheme) == choose(-5.0, 0.0, scheme)
    for tiny in (1e-45, 1e-38, 1e-33, 1e-19):
        assert choose(-tiny, tiny, scheme) == choose(0.0, 0.0, scheme)
    assert SMALLEST_SCALE <= float(choose(-1e-16, 1e-16, scheme).scale) < 1e-17


AFFINE, SYMMETRIC = QScheme(axis=0), QScheme(signed=True, symmetric=True, axis=0)


@each_of("scheme", [AFFINE, SYMMETRIC, SYMMETRIC.replace(bits=16, power_of_two=True)])
@each_of("dead", [1e-45, 1e-33, 1e-12])
def test_the_scale_of_a_dead_channel_is_a_share_of_the_largest(scheme, dead):
    lo, hi = np.array([-2.0, -dead, 0.0, -0.5e-3, -1e-5]), np.array([1.0, 2 * dead, 0.0, 1e-3, 0.0])
    params, alive = choose(lo, hi, scheme), [0, 2, 3, 4]
    alone = choose(lo[alive], hi[alive], scheme)
    np.testing.assert_array_equal(params.scale[alive], alone.scale)
    np.testing.assert_array_equal(params.zero_point[alive], alone.zero_point)
    share = params.scale[1] / params.scale[0]
    assert SMALLEST_SHARE * 0.5 <= share <= SMALLEST_SHARE * 2.0
    assert (quantize(np.full((5, 3), dead), params)[1] == params.zero_point[1]).all()


def test_two_smallest_scales_make_a_normal_scale_of_a_bias():
    product = np.float32(SMALLEST_SCALE) * np.float32(SMALLEST_SCALE)
    assert product >= np.finfo(np.float32).tiny
    tensor = choose(np.array([0.0, 0.0]), np.array([1e-14, 1e-33]), SYMMETRIC.replace(bits=8))
    assert (tensor.scale >= SMALLEST_SCALE).all()


def test_which_channels_are_alive():
    assert alive(np.array([1.0, 0.0, 1e-33, 1e-7])).tolist() == [True, False, False, True]
    assert alive(np.zeros(2)).tolist() == [False, False]
    assert alive(np.array([1e-33])).tolist() == [True]


def test_zero_point_is_rounded_as_the_scheme_says():
    # -lo / scale is 2.5 exactly.
    lo, hi = -2.5, 252.5
    assert choose(lo, hi, QScheme()).zero_point == 2
    assert choose(lo, hi, QScheme(rounding="half_away")).zero_point == 3


def test_power_of_two_keeps_a_scale_that_is_one():
    scheme = QScheme(signed=True, symmetric=True, power_of_two=True)
    assert choose(-127 / 64, 1.0, scheme).scale == 1 / 64
    assert choose(-127.001 / 64, 1.0, scheme).scale == 1 / 32


def test_choose_per_channel_is_choose_of_each_channel():
    lo, hi = np.array([-1.0, 0.0, -3.0]), np.array([2.0, 0.0, -1.0])
    scheme = QScheme(axis=1)
    params = choose(lo, hi, scheme)
    for channel in range(3):
        alone = choose(lo[channel], hi[channel], scheme.replace(axis=None))
        assert params.scale[channel] == alone.scale
        assert params.zero_point[channel] == alone.zero_point


@each_of(
    ("lo", "hi", "options", "word"),
    [
        (1.0, 0.0, {}, "swap"),
        (np.nan, 0.0, {}, "finite"),
        (0.0, np.inf, {}, "finite"),
        ("a", 1.0, {}, "range"),
        (None, {}, {}, "range"),
        ([0, 0], [1, 1, 1], {"axis": 0}, "range"),
        (-1e300, 1e300, {}, "wide"),
        (-1e308, 1.7e308, {}, "wide"),
        (0.0, 3e38, {"bits": 2, "power_of_two": True, "signed": True, "symmetric": True}, "wide"),
        ([0.0], [1.0], {}, "shape"),
        (0.0, 1.0, {"axis": 0}, "shape"),
    ],
)
def test_choose_refuses(lo, hi, options, word):
    with pytest.raises(SchemeError, match=word):
        choose(lo, hi, QScheme(**options))


def _onnxruntime(x: np.ndarray, params: QParams) -> tuple[np.ndarray, np.ndarray]:
    """Runs onnxruntime's QuantizeLinear and DequantizeLinear on x."""
    scheme = params.scheme
    kind = {
        (8, False): (np.uint8, TensorProto.UINT8),
        (8, True): (np.int8, TensorProto.INT8),
        (16, False): (np.uint16, TensorProto.UINT16),
        (16, True): (np.int16, TensorProto.INT16),
    }[scheme.bits, scheme.signed]
    axis = {} if scheme.axis is None else {"axis": scheme.axis}
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **axis),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **axis),
        ],
        "qdq",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [
            helper.make_tensor_value_info("q", kind[1], x.shape),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape),
        ],
        [
            onnx.numpy_helper.from_array(np.array(params.scale), "s"),
            onnx.numpy_helper.from_array(params.zero_point.astype(kind[0]), "z"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@each_of("bits", [8, 16])
@each_of("signed", [False, True])
@each_of("axis", [None, 1])
def test_quantize_is_onnxruntimes_bit_for_bit(bits, signed, axis):
    rng = np.random.default_rng(bits + signed)
    x = rng.normal(size=(50, 3, 41)).astype(np.float32)
    lo, hi = (-1.7, 2.9) if axis is None else ([-1.7, -0.1, 0.0], [2.9, 1.0, 3.3])
    params = choose(lo, hi, QScheme(bits=bits, signed=signed, axis=axis))
    scale = np.broadcast_to(expand(params.scale, axis, 3), x.shape)
    x[:20] = (rng.integers(-300, 300, size=x[:20].shape) + 0.5).astype(np.float32) * scale[:20]  # ties
    x[-1, :, :5] = [np.inf, -np.inf, 3e38, -3e38, 1e-45]
    q, y = _onnxruntime(x, params)
    assert np.array_equal(quantize(x, params), q)
    assert dequantize(q, params).tobytes() == y.tobytes()
    assert fake_quantize(x, params).tobytes() == y.tobytes()


def test_nan_becomes_the_lowest_integer_as_in_onnxruntime():
    params = choose(-1.0, 2.0, QScheme())
    x = np.full((64,), np.nan, np.float32)
    assert np.array_equal(quantize(x, params), _onnxruntime(x, params)[0])
    assert (quantize(x, params) == 0).all()


@given(
    SCHEMES,
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=FINITE),
    MODERATE,
    MODERATE,
)
def test_quantization_is_idempotent_and_monotone(scheme, x, a, b):
    params = choose(min(a, b), max(a, b), scheme)
    q = quantize(x, params)
    assert q.dtype == np.int32
    assert q.shape == x.shape
    assert q.min() >= scheme.qmin
    assert q.max() <= scheme.qmax
    assert np.array_equal(quantize(dequantize(q, params), params), q)
    once = fake_quantize(x, params)
    assert fake_quantize(once, params).tobytes() == once.tobytes()
    assert once.dtype == np.float32
    order = np.argsort(x, axis=None)
    assert (np.diff(q.ravel()[order]) >= 0).all()


@given(SCHEMES, st.lists(MODERATE, min_size=1), MODERATE, MODERATE)
def test_float64_agrees_with_exact_arithmetic(scheme, values, a, b):
    params = choose(min(a, b), max(a, b), scheme)
    scale, zero = Fraction(float(params.scale)), int(params.zero_point)
    q = quantize(np.array(values, np.float64), params)
    for value, integer in zip(values, q, strict=True):
        ratio = Fraction(value) / scale + zero
        clipped = min(max(ratio, scheme.qmin), scheme.qmax)
        assert abs(integer - clipped) <= Fraction(1, 2) + abs(ratio) / 2**50


@given(SCHEMES, st.floats(-40, 100), st.integers(0, 2**32 - 1))
def test_levels_of_values_on_the_grid_are_those_of_quantize(scheme, power, seed):
    rng = np.random.default_rng(seed)
    size = 2.0**power
    params = choose(-size * rng.random(), size, scheme)
    q = np.arange(scheme.qmin, scheme.qmax + 1)
    x = dequantize(rng.permutation(np.resize(q, max(q.size, 40_000))), params)  # more than a block
    levels = exact_levels(x, params)
    assert np.array_equal(levels, quantize(x, params))
    assert levels.dtype.itemsize == (1 if scheme.bits <= 8 else 2)
    assert np.array_equal(exact_levels(x[::2][None], params), levels[::2][None])
    beyond = (scheme.qmax + 1 - params.zero_point) * params.scale
    below = (scheme.qmin - 1 - params.zero_point) * params.scale
    for other in (np.nan, np.inf, -np.inf, beyond, below, np.nextafter(x.max(), np.float32(np.inf))):
        place = rng.integers(x.size)
        kept, x[place] = x[place], other
        assert exact_levels(x, params) is None
        x[place] = kept


def test_exact_levels_need_float32_and_one_scale():
    params, x = choose(-1.0, 2.0, QScheme()), np.zeros((2, 3), np.float32)
    assert exact_levels(x, params).shape == (2, 3)
    assert exact_levels(np.zeros((0, 3), np.float32), params).shape == (0, 3)
    assert exact_levels(x[0, 0, None].reshape(()), params).shape == ()
    assert exact_levels(x.astype(np.float64), params) is None
    assert exact_levels(x, choose([0, 0, 0], [1, 2, 3], QScheme(axis=1))) is None


@each_of("axis", [None, 1])
@each_of("kind", [np.uint8, np.int8, np.uint16, np.int16, np.int64])
def test_integers_of_each_type_stand_for_the_same_values(kind, axis):
    bits, signed = min(8 * np.dtype(kind).itemsize, 16), np.dtype(kind).kind == "i"
    lo, hi = (-1.7, 2.9) if axis is None else ([-1.7, -0.1, 0.0], [2.9, 1.0, 3.3])
    params = choose(lo, hi, QScheme(bits=bits, signed=signed, axis=axis))
    info = np.iinfo(kind if bits == 8 * np.dtype(kind).itemsize else np.int16)
    q = np.random.default_rng(0).integers(info.min, info.max, (4, 3, 99), endpoint=True).astype(kind)
    assert dequantize(q, params).tobytes() == dequantize(q.astype(np.int32), params).tobytes()


def test_dtypes_in_and_out():
    params = choose(-1.0, 2.0, QScheme())
    x = np.array([0.1, 0.2, 1.7])
    assert fake_quantize(x, params).dtype == np.float64
    assert fake_quantize(x.astype(np.float32), params).dtype == np.float32
    # float16 is computed in float32: in float16 0.2 / scale would land elsewhere.
    half = x.astype(np.float16)
    assert np.array_equal(quantize(half, params), quantize(half.astype(np.float32), params))
    assert fake_quantize(half, params).dtype == np.float32
    assert quantize(1, params) == quantize(np.float64(1), params)
    assert quantize(np.float32(1.0), params).shape == ()
    assert dequantize(np.uint8(3), params).dtype == np.float32
    assert quantize(np.zeros((0, 3), np.float32), params).shape == (0, 3)


@each_of("dtype", [np.float16, np.float32, np.float64])
@each_of("bits", [2, 4, 8, 16])
@each_of("signed", [False, True])
@each_of("axis", [None, 1])
def test_fake_quantize_is_dequantize_of_quantize_bit_for_bit(dtype, bits, signed, axis) -> None:
    rng = np.random.default_rng(bits)
    x = (rng.standard_normal((5, 3, 64)) * [[[0.1], [1.0], [30.0]]]).astype(dtype)
    x[0, 0, :8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-4, 60000.0]
    scheme = QScheme(bits, signed=signed, axis=axis)
    ends = (x[1:].min(axis=(0, 2)), x[1:].max(axis=(0, 2))) if axis else (x[1:].min(), x[1:].max())
    qparams = choose(*ends, scheme)
    found, integers = fake_quantize(x, qparams), quantize(x, qparams)
    scale, zero_point = (expand(p, axis, 3) for p in (qparams.scale, qparams.zero_point))
    assert found.dtype == (np.float64 if dtype is np.float64 else np.float32)
    expected = (integers.astype(np.int64) - zero_point).astype(found.dtype) * scale.astype(found.dtype)
    assert found.tobytes() == expected.tobytes()


def test_wrong_channels_are_refused():
    params = choose([0, 0], [1, 2], QScheme(axis=1))
    for shape in ((2,), (2, 3)):
        with pytest.raises(SchemeError):
            quantize(np.zeros(shape), params)
        with pytest.raises(SchemeError):
            dequantize(np.zeros(shape, np.int32), params)
