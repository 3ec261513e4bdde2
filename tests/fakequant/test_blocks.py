"""A scale for each block of inputs of a weight: the same numbers in the graph, in numpy and by observers."""

from __future__ import annotations

import megengine as mge
import numpy as np
import pytest

from qtrace.errors import SchemeError
from qtrace.fakequant.base import split_blocks
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.fakequant.lsq import LSQFakeQuant
from qtrace.numerics import dequantize, fake_quantize, quantize
from qtrace.observers.minmax import MinMax
from qtrace.scheme import QParams, QScheme
from tests.each import each_of

SCHEME = QScheme(bits=4, signed=True, symmetric=True, axis=0, block=8)
SHAPES = [(3, 16), (3, 20), (2, 8), (2, 5)]


def _calibrated(kind: type, weight: np.ndarray):
    blocks = -(-weight.shape[1] // 8)
    fake = kind(
        "w", SCHEME, shape=(len(weight), blocks, 1), observer=MinMax(SCHEME), static=True, channel_axes=(0,)
    )
    fake.phase = "observe"
    fake(mge.Tensor(weight))
    fake.set_qparams(fake.observer.qparams())
    fake.phase = "quantize"
    return fake


def _weight(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.arange(1, shape[1] + 1) / 8


@each_of("shape", SHAPES)
@each_of("kind", [FixedFakeQuant, LSQFakeQuant])
def test_each_block_is_rounded_by_its_own_largest_value(shape: tuple[int, int], kind: type) -> None:
    weight = _weight(shape).astype(np.float32)
    fake = _calibrated(kind, weight)
    rounded = fake(mge.Tensor(weight)).numpy()
    for row in range(shape[0]):
        for start in range(0, shape[1], 8):
            block = weight[row, start : start + 8]
            scale = np.float32(np.abs(block).max() / 7)
            expected = np.clip(np.rint(block / scale), -8, 7).astype(np.float32) * scale
            np.testing.assert_allclose(rounded[row, start : start + 8], expected, rtol=1e-6)
    qparams = fake.qparams()
    np.testing.assert_array_equal(fake_quantize(weight, qparams), rounded)
    np.testing.assert_array_equal(dequantize(quantize(weight, qparams), qparams), rounded)
    scale, zero_point = fake.grid_of(weight.shape)
    assert scale.shape == zero_point.shape == weight.shape


def test_scales_are_learned_and_the_filling_has_no_part() -> None:
    weight = mge.Parameter(_weight((3, 20)).astype(np.float32))
    fake = _calibrated(LSQFakeQuant, weight.numpy())
    fake.phase = "train"
    with mge.autodiff.GradManager().attach([weight, fake.scale]) as manager:
        manager.backward((fake(weight) ** 2).sum())
    assert weight.grad.shape == (3, 20)
    assert fake.scale.grad.shape == (3, 3, 1)
    assert np.all(fake.scale.grad.numpy() != 0)


def test_blocks_are_filled_up_with_zeros() -> None:
    blocks = split_blocks(np.ones((2, 5), np.float32), 4)
    np.testing.assert_array_equal(blocks, [[1, 1, 1, 1], [1, 0, 0, 0]] * 2)


def test_a_scheme_says_its_blocks_and_keeps_them() -> None:
    assert SCHEME.describe() == "int4 sym per-channel(0) blocks of 8"
    assert QScheme.from_dict(SCHEME.to_dict()) == SCHEME
    assert "block" not in QScheme().to_dict()


@each_of(
    ("scheme", "says"),
    [
        ({"block": 1, "axis": 0}, "choose 2 or more"),
        ({"block": 8}, "give the axis"),
        ({"block": "8", "axis": 0}, "give an integer"),
    ],
)
def test_an_impossible_block_is_refused(scheme: dict[str, object], says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        QScheme(**scheme)


def test_parameters_for_another_number_of_blocks_are_refused() -> None:
    qparams = QParams(SCHEME, np.ones(6, np.float32), np.zeros(6, np.int32))
    with pytest.raises(SchemeError, match=r"has 4 blocks of 8 inputs, but its parameters are for 6"):
        quantize(np.ones((2, 16), np.float32), qparams)
    with pytest.raises(SchemeError, match="lacks blocks of inputs"):
        quantize(np.ones((2, 3, 8), np.float32), qparams)
