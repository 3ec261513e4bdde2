"""A stored scale and shift behind a layer is folded into it; one that cannot be is left with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.walk import exprs
from qtrace.ops import read
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.folding import fuse_bn, fuse_scale
from tests.each import each_of
from tests.nets import net

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 6, 6)).astype(np.float32)
VOLUME = np.random.default_rng(5).standard_normal((2, 4, 3, 5, 4)).astype(np.float32)


def _parameter(*shape: int) -> mge.Parameter:
    return mge.Parameter(RNG.standard_normal(shape).astype(np.float32))


def _kinds(traced: Any) -> list[str]:
    calls = [read(e) for e in exprs(traced)]
    return [c.kind for c in calls if c is not None]


def _behind(layer: Callable[[], M.Module], *shapes: tuple[int, ...]) -> dict[str, Any]:
    return {"layer": layer(), "s": _parameter(*shapes[0]), "t": _parameter(*shapes[1])}


LAYERS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "one number": (_behind(lambda: M.Conv2d(4, 8, 3, padding=1), (1,), (1,)), X),
    "no bias": (_behind(lambda: M.Conv2d(4, 8, 3, bias=False), (1,), (8, 1, 1)), X),
    "groups": (_behind(lambda: M.Conv2d(4, 8, 3, groups=2), (1, 8, 1, 1), (1,)), X),
    "transposed": (_behind(lambda: M.ConvTranspose2d(4, 8, 3), (1, 8, 1, 1), (8, 1, 1)), X),
    "linear": (_behind(lambda: M.Linear(6, 8), (8,), (1,)), X),
    "row": (_behind(lambda: M.Conv1d(4, 8, 3), (1, 8, 1), (8, 1)), X[:, :, 0]),
    "volume": (_behind(lambda: M.Conv3d(4, 8, 3, padding=1), (1, 8, 1, 1, 1), (8, 1, 1, 1)), VOLUME),
    "volume in groups": (
        _behind(lambda: M.Conv3d(4, 8, 3, groups=2, bias=False), (1,), (1, 8, 1, 1, 1)),
        VOLUME,
    ),
    "transposed volume": (_behind(lambda: M.ConvTranspose3d(4, 8, 3), (1, 8, 1, 1, 1), (1,)), VOLUME),
}


def _scaled(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.relu(self.t + self.layer(x) * self.s)


@pytest.mark.parametrize("name", LAYERS)
def test_scale_and_shift_are_folded_into_the_layer(name: str) -> None:
    attributes, x = LAYERS[name]
    traced = qtrace.trace(net(_scaled, **attributes), x)
    prepared = qtrace.prepare(traced)
    kinds = [kind for kind in _kinds(prepared) if kind in ("mul", "add")]
    assert kinds == []
    assert {n for n, _ in prepared.named_parameters()} == {"layer.weight", "layer.bias"}
    expected = traced(mge.Tensor(x)).numpy()
    np.testing.assert_allclose(
        prepared(mge.Tensor(x)).numpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
    )


SINGLE: dict[str, Callable[[Any, mge.Tensor], mge.Tensor]] = {
    "shift": lambda self, x: F.relu(self.layer(x) + self.t),
    "shift first": lambda self, x: F.relu(self.t + self.layer(x)),
    "scale": lambda self, x: F.relu(self.layer(x) * self.s),
}


@pytest.mark.parametrize("form", SINGLE)
@pytest.mark.parametrize("name", LAYERS)
def test_single_shift_or_scale_is_folded(name: str, form: str) -> None:
    attributes, x = LAYERS[name]
    traced = qtrace.trace(net(SINGLE[form], **attributes), x)
    prepared = qtrace.prepare(traced)
    assert not {"mul", "add"} & set(_kinds(prepared))
    expected = traced(mge.Tensor(x)).numpy()
    np.testing.assert_allclose(
        prepared(mge.Tensor(x)).numpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
    )


@each_of("shape", [(1, 8, 4, 4), (2, 8, 1, 1), (4,)], ids=str)
def test_what_is_not_a_number_a_channel_stays_a_sum(shape: tuple[int, ...]) -> None:
    module = net(lambda self, x: self.layer(x) + self.t, layer=M.Conv2d(4, 8, 3), t=_parameter(*shape))
    traced = flatten(qtrace.trace(module, X, check=False))
    expand(traced)
    result = fuse_scale(traced)
    assert not result.changed
    assert not result.left
    assert _kinds(traced) == ["conv2d", "add"]


def test_a_layer_that_others_read_keeps_its_result() -> None:
    module = net(_read_twice, layer=M.Conv2d(4, 8, 3), t=_parameter(1, 8, 1, 1))
    traced = flatten(qtrace.trace(module, X, check=False))
    expected = traced(mge.Tensor(X)).numpy()
    expand(traced)
    result = fuse_scale(traced)
    assert [left.reason for left in result.left] == ["layer_out is also used elsewhere"]
    np.testing.assert_array_equal(traced(mge.Tensor(X)).numpy(), expected)


def _read_twice(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = self.layer(x)
    return (y + self.t) * y


def test_it_is_folded_behind_a_batch_norm_and_moves_its_statistics() -> None:
    attributes = _behind(lambda: M.Conv2d(4, 8, 1), (8, 1, 1), (1,))
    module = net(lambda self, x: self.bn(self.layer(x)) * self.s + self.t, **attributes, bn=M.BatchNorm2d(8))
    traced = flatten(qtrace.trace(module, X, check=False))
    expected = traced(mge.Tensor(X)).numpy()
    expand(traced)
    norms = fuse_bn(traced).norms
    result = fuse_scale(traced, norms)
    assert result.changed == ("layer_out: folded the scale and shift add_out",)
    assert _kinds(traced) == ["conv2d"]
    np.testing.assert_allclose(traced(mge.Tensor(X)).numpy(), expected, rtol=0, atol=1e-5)
    mean, deviation = result.norms["layer_out"]
    scale = attributes["s"].numpy().reshape(-1)
    np.testing.assert_allclose(mean, norms["layer_out"][0] * scale + attributes["t"].numpy(), rtol=1e-6)
    np.testing.assert_allclose(deviation, norms["layer_out"][1] * np.abs(scale), rtol=1e-6)


def _twice(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = self.layer(x)
    return F.relu(y * self.s + self.t) + y


def _shared(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.relu(self.layer(x) * self.s + self.t) + self.layer(x + 1)


LEFT: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "read twice": (_twice, (1,), "layer_out is also used elsewhere"),
    "shared": (_shared, (1,), "layer.weight is shared with another layer"),
    "along another axis": (_scaled, (6,), "s is not one number for each channel"),
}


@pytest.mark.parametrize("name", LEFT)
def test_unfoldable_scales_are_left_with_the_reason(name: str) -> None:
    forward, shape, reason = LEFT[name]
    traced = qtrace.trace(net(forward, **_behind(lambda: M.Conv2d(4, 8, 1), shape, (1,))), X)
    prepared = qtrace.prepare(traced)
    assert {"s", "t"} <= {n for n, _ in prepared.named_parameters()}
    assert "mul" in _kinds(prepared)
    (report,) = [r for r in qtrace.explain(prepared).ptq if r["algorithm"] == "fuse_bn"]
    assert reason in [entry["reason"] for entry in report["left"]]
    np.testing.assert_allclose(
        prepared(mge.Tensor(X)).numpy(), traced(mge.Tensor(X)).numpy(), rtol=0, atol=1e-5
    )
