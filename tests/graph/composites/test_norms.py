"""Norms, softmax and learnable affine maps in pieces become one call; other axes and shapes do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

from tests.each import each_of
from tests.graph.composites.spellings import Spelling, assert_composed, assert_refused, composed, labels

RNG = np.random.default_rng(3)
EPS = 1e-5


def _parameter(*shape: int) -> mge.Parameter:
    return mge.Parameter(RNG.uniform(0.5, 1.5, shape).astype(np.float32))


def _affine(*shape: int, bias: bool = True) -> dict[str, Any]:
    names = ("weight", "bias") if bias else ("weight",)
    return {name: _parameter(*shape) for name in names}


def _mean(x: mge.Tensor, axis: Any = -1) -> mge.Tensor:
    return F.mean(x, axis=axis, keepdims=True)


def _standardized(x: mge.Tensor, axis: Any = -1, eps: float = EPS) -> mge.Tensor:
    d = x - _mean(x, axis)
    return d / F.sqrt(_mean(d**2, axis) + eps)


def _keras(self: Any, x: mge.Tensor, axis: Any = -1) -> mge.Tensor:
    mean = x.mean(axis, keepdims=True)
    inv = (_mean(F.square(x - mean), axis) + EPS) ** -0.5 * self.weight
    return x * inv + (self.bias - mean * inv)


def _twice(self: Any, x: mge.Tensor) -> mge.Tensor:
    variance = _mean(F.pow(x - _mean(x), 2))
    return (x - _mean(x)) / (variance + EPS) ** 0.5 * self.weight + self.bias


LAYER_NORM: dict[str, Spelling] = {
    "pytorch": Spelling(lambda self, x: _standardized(x) * self.weight + self.bias, _affine(8)),
    "reciprocal": Spelling(
        lambda self, x: (
            (x - _mean(x)) * (1.0 / F.sqrt(_mean((x - _mean(x)) ** 2) + EPS)) * self.weight + self.bias
        ),
        _affine(8),
    ),
    "bias first": Spelling(lambda self, x: self.bias + self.weight * _standardized(x), _affine(8)),
    "means of their own": Spelling(_twice, _affine(8)),
    "keras": Spelling(_keras, _affine(8)),
    "without weights": Spelling(lambda self, x: _standardized(x)),
    "variance": Spelling(
        lambda self, x: (
            (x - _mean(x)) / F.sqrt(F.var(x, axis=-1, keepdims=True) + EPS) * self.weight + self.bias
        ),
        _affine(8),
    ),
    "two axes": Spelling(lambda self, x: _standardized(x, (2, 3)) * self.weight + self.bias, _affine(4, 8)),
    "stored eps": Spelling(
        lambda self, x: _standardized(x, eps=self.eps) * self.weight + self.bias,
        {**_affine(8), "eps": mge.Tensor(np.float32(EPS))},
    ),
}


@pytest.mark.parametrize("name", LAYER_NORM)
def test_layer_norm(name: str) -> None:
    assert_composed(LAYER_NORM[name], "F.layer_norm", applied="LayerNorm")


CHANNEL_NORM = {
    "convnext": Spelling(lambda self, x: self.weight * _standardized(x, 1) + self.bias, _affine(6, 1, 1)),
    "keras": Spelling(lambda self, x: _keras(self, x, 1), _affine(1, 6, 1, 1)),
    "three axes": Spelling(
        lambda self, x: _standardized(F.flatten(x, 2), 1) * self.weight + self.bias, _affine(6, 1)
    ),
}


@each_of("name", CHANNEL_NORM)
def test_layer_norm_of_channels(name: str) -> None:
    flat = ("F.flatten",) if name == "three axes" else ()
    calls = (*flat, "F.transpose", "F.reshape", "F.reshape", "F.layer_norm", "F.transpose")
    result = composed(CHANNEL_NORM[name])
    assert sorted(labels(result.traced)) == sorted(calls)
    assert_composed(CHANNEL_NORM[name], *labels(result.traced), applied="ChannelNorm")


def test_layer_norm_of_channels_without_weights() -> None:
    calls = ("F.transpose", "F.layer_norm", "F.transpose")
    assert_composed(lambda x: _standardized(x, 1), *calls, applied="ChannelNorm")


def test_a_weight_of_another_rank_is_reshaped() -> None:
    spelling = Spelling(lambda self, x: _standardized(x) * self.weight + self.bias, _affine(1, 1, 1, 8))
    assert_composed(spelling, "F.reshape", "F.reshape", "F.layer_norm", applied="LayerNorm")


def test_a_weight_alone_stays_a_factor() -> None:
    spelling = Spelling(lambda self, x: _standardized(x) * self.weight, _affine(8, bias=False))
    assert_composed(spelling, "F.layer_norm", "Tensor.__mul__", applied="LayerNorm")


def _channels(self: Any, y: mge.Tensor) -> mge.Tensor:
    return y * self.weight.reshape(1, -1, 1, 1) + self.bias


@each_of(
    "spelling",
    [
        Spelling(lambda self, x: _standardized(x, (2, 3)) * self.weight + self.bias, _affine(1, 6, 1, 1)),
        Spelling(lambda self, x: _standardized(x, [-2, -1]) * self.weight + self.bias, _affine(6, 1, 1)),
        Spelling(lambda self, x: _keras(self, x, (2, 3)), _affine(1, 6, 1, 1)),
    ],
)
def test_instance_norm(spelling: Spelling) -> None:
    assert_composed(spelling, "F.reshape", "F.reshape", "F.instance_norm", applied="InstanceNorm")


def test_instance_norm_without_weights() -> None:
    assert_composed(lambda x: _standardized(x, (2, 3)), "F.instance_norm", applied="InstanceNorm")


def _grouped(norm: Callable[[Any, mge.Tensor], mge.Tensor], *split: int) -> Callable[..., mge.Tensor]:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        y = norm(self, F.reshape(x, (2, 3, *split)))
        return F.reshape(y, (2, 6, 4, 8)) * self.weight + self.bias

    return forward


GROUP_NORM = {
    "pytorch, instance norm module": Spelling(
        _grouped(lambda self, y: self.norm(y), -1, 1), {**_affine(6, 1, 1), "norm": M.InstanceNorm(3)}
    ),
    "instance norm function": Spelling(
        _grouped(lambda self, y: F.nn.instance_norm(y, False, eps=EPS), 8, 8), _affine(6, 1, 1)
    ),
    "means": Spelling(_grouped(lambda self, y: _standardized(y), -1), _affine(1, 6, 1, 1)),
    "means over several axes": Spelling(
        _grouped(lambda self, y: _standardized(y, (2, 3, 4)), 2, 4, 8), _affine(1, 6, 1, 1)
    ),
}


@each_of("name", GROUP_NORM)
def test_group_norm(name: str) -> None:
    assert_composed(
        GROUP_NORM[name],
        "F.reshape",
        "F.reshape",
        "F.group_norm",
        applied="GroupNorm",
        lost=("norm.weight", "norm.bias") if "module" in name else (),
    )


def _signal(norm: Callable[[Any, mge.Tensor], mge.Tensor]) -> Callable[..., mge.Tensor]:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        y = norm(self, F.reshape(F.flatten(x, 2), (2, 3, -1)))
        return F.reshape(y, (2, 6, 32)) * self.weight + self.bias

    return forward


def _as_image(self: Any, y: mge.Tensor) -> mge.Tensor:
    """The instance norm of a tensor with three axes, as the import writes it."""
    return F.reshape(self.norm(F.reshape(y, (-1, 3, 64, 1))), (-1, 3, 64))


SIGNALS = {
    "means": Spelling(_signal(lambda self, y: _standardized(y)), _affine(6, 1)),
    "imported": Spelling(_signal(_as_image), {**_affine(6, 1), "norm": M.InstanceNorm(3)}),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_group_norm_of_signals(name: str) -> None:
    lost = ("norm.weight", "norm.bias") if name == "imported" else ()
    result = composed(SIGNALS[name])
    calls = ["F.expand_dims", "F.flatten", "F.group_norm", "F.reshape", "F.reshape", "F.squeeze"]
    assert sorted(labels(result.traced)) == calls
    assert_composed(SIGNALS[name], *labels(result.traced), applied="GroupNorm", lost=lost)


def test_groups_that_are_normalized_otherwise_are_no_group_norm() -> None:
    def inner(self: Any, y: mge.Tensor) -> mge.Tensor:
        return F.reshape(self.norm(F.reshape(y, (6, 1, -1, 1))), (2, 3, -1))

    result = composed(Spelling(_grouped(inner, -1), {**_affine(6, 1, 1), "norm": M.InstanceNorm(1)}))
    assert "InstanceNorm" in labels(result.traced)
    reasons = [r.reason for r in result.results if r.rule == "GroupNorm"]
    assert "its groups are normalized in the shape (6, 1, 64, 1), not one by one" in reasons


RMS_NORM = {
    "llama": lambda self, x: x * (1.0 / F.sqrt(_mean(x**2) + 1e-6)) * self.weight,
    "weight first": lambda self, x: self.weight * (x / F.sqrt(_mean(x * x) + 1e-6)),
    "power": lambda self, x: self.weight * x * F.pow(F.mean(F.square(x), -1, True) + 1e-6, -0.5),
}


@pytest.mark.parametrize("name", RMS_NORM)
def test_rms_norm(name: str) -> None:
    spelling = Spelling(RMS_NORM[name], _affine(8, bias=False))
    assert_composed(spelling, "qtrace.graph.functions.rms_norm", applied="RmsNorm")


def test_rms_norm_without_a_weight() -> None:
    result = assert_composed(
        lambda x: x / F.sqrt(_mean(x * x, 1) + 1e-6), "qtrace.graph.functions.rms_norm", applied="RmsNorm"
    )
    assert result.traced.graph.outputs[0].expr.args[1:] == (None, 1, 1e-6)


def _length(x: mge.Tensor) -> mge.Tensor:
    return F.sqrt(F.sum(x * x, axis=1, keepdims=True))


NORMALIZE = {
    "pytorch": lambda x: x / F.broadcast_to(F.clip(F.norm(x, 2.0, 1, True), lower=1e-12), (2, 6, 4, 8)),
    "maximum": lambda x: x / F.maximum(_length(x), 1e-12),
    "tensorflow": lambda x: x * F.maximum(F.sum(F.square(x), axis=1, keepdims=True), 1e-12) ** -0.5,
    "bare": lambda x: x / _length(x),
    "bare norm": lambda x: x / F.norm(x, axis=1, keepdims=True),
}


@pytest.mark.parametrize("name", NORMALIZE)
def test_l2_normalization(name: str) -> None:
    assert_composed(NORMALIZE[name], "F.normalize", applied="Normalize")


SOFTMAX = {
    "tensorflow": lambda x: _softmax(x, 1),
    "last axis": lambda x: _softmax(x, -1),
    "without maximum": lambda x: F.exp(x) / F.exp(x).sum(axis=1, keepdims=True),
    "one exp": lambda x: _plain_softmax(x),
}


def _softmax(x: mge.Tensor, axis: int) -> mge.Tensor:
    powers = F.exp(x - F.max(x, axis=axis, keepdims=True))
    return powers / F.sum(powers, axis=axis, keepdims=True)


def _plain_softmax(x: mge.Tensor) -> mge.Tensor:
    powers = F.exp(x)
    return powers * (1.0 / powers.sum(1, True))


@each_of("name", ["tensorflow", "last axis", "one exp"])
def test_softmax(name: str) -> None:
    assert_composed(SOFTMAX[name], "F.softmax", applied="Softmax")


@each_of("shapes", [((1,), (1,)), ((1, 6, 1, 1), (1, 6, 1, 1)), ((1,), (6, 1, 1)), ((8,), (8,))])
def test_scale_and_shift(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    stored = {"scale": _parameter(*shapes[0]), "shift": _parameter(*shapes[1])}
    spelling = Spelling(lambda self, x: F.relu(x) * self.scale + self.shift, stored)
    assert_composed(spelling, "F.relu", "qtrace.graph.functions.scale_and_shift", applied="ScaleAndShift")


def test_a_scale_and_shift_of_1_and_0_stays_learnable() -> None:
    stored = {"scale": mge.Parameter([1.0]), "shift": mge.Parameter([0.0])}
    spelling = Spelling(lambda self, x: self.shift + self.scale * x, stored)
    assert_composed(spelling, "qtrace.graph.functions.scale_and_shift", applied="ScaleAndShift")


NEAR_MISSES: dict[str, tuple[Any, str, str]] = {
    "layer norm over the rows": (
        lambda x: _standardized(x, 2),
        "ChannelNorm",
        "its means are over the axes (2,) of 4, those of the channels are (1,)",
    ),
    "layer norm over the rows, not the last axis": (
        lambda x: _standardized(x, 2),
        "LayerNorm",
        "its means are over the axes (2,), those of a layer norm are the last of 4",
    ),
    "layer norm over two axes": (
        lambda x: (x - _mean(x)) / F.sqrt(_mean((x - _mean(x)) ** 2, 2) + EPS),
        "LayerNorm",
        "its means are over unequal axes: (3,), (2,)",
    ),
    "layer norm without eps": (
        lambda x: (x - _mean(x)) / F.sqrt(_mean((x - _mean(x)) ** 2)),
        "LayerNorm",
        "nothing small is added to the variance",
    ),
    "instance norm of rows": (
        lambda x: _standardized(x, (1, 2)),
        "InstanceNorm",
        "its means are over the axes (1, 2), those of an instance norm are (2, 3)",
    ),
    "group norm over the wrong axis": (
        Spelling(
            lambda self, x: F.reshape(_standardized(F.reshape(x, (2, 3, 8, 8)), 3), (2, 6, 4, 8)) + x,
        ),
        "GroupNorm",
        "its means are over the axes (3,) of (2, 3, 8, 8), not over each group",
    ),
    "rms norm without eps": (
        lambda x: x / F.sqrt(_mean(x * x)),
        "RmsNorm",
        "nothing small is added to the mean",
    ),
    "rms norm over two axes": (
        lambda x: x / F.sqrt(_mean(x * x, (2, 3)) + EPS),
        "RmsNorm",
        "its mean is over the axes (2, 3), not over one",
    ),
    "normalize with an added eps": (
        lambda x: x / (_length(x) + 1e-6),
        "Normalize",
        "1e-06 is added where F.normalize has a lower bound",
    ),
    "normalize by the sum of magnitudes": (
        lambda x: x / F.norm(x, 1.0, 1, True),
        "Normalize",
        "its norm has the order 1, not 2",
    ),
    "softmax over two axes": (
        lambda x: _softmax(x, (2, 3)),
        "Softmax",
        "its sum is over the axes (2, 3), not over one",
    ),
    "softmax with another maximum": (
        lambda x: F.exp(x - F.max(x, 1, True)) / F.exp(x - F.max(x, 1, True)).sum(2, True),
        "Softmax",
        "",
    ),
    "positions": (
        Spelling(
            lambda self, x: x * self.scale + self.shift,
            {"scale": _parameter(8), "shift": _parameter(1, 1, 4, 8)},
        ),
        "ScaleAndShift",
        "its shift has the shape (1, 1, 4, 8): numbers along 2 axes",
    ),
    "scale and shift along unequal axes": (
        Spelling(
            lambda self, x: x * self.scale + self.shift, {"scale": _parameter(8), "shift": _parameter(4, 1)}
        ),
        "ScaleAndShift",
        "its scale and its shift are along unequal axes",
    ),
    "numbers": (lambda x: x * 0.5 + 0.25, "ScaleAndShift", ""),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_of_norms_stay_uncomposed(name: str) -> None:
    if name.startswith("group norm"):  # the inner standardization is a layer norm of its own
        assert_composed(
            NEAR_MISSES[name][0],
            "F.reshape",
            "F.layer_norm",
            "F.reshape",
            "Tensor.__add__",
            applied="LayerNorm",
        )
        return
    assert_refused(*NEAR_MISSES[name])
