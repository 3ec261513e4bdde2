"""Batches that are held back decide for each layer whether its correction stays."""

from __future__ import annotations

import re
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.preparation.model import read_record
from qtrace.ptq.layers import held_back as room
from qtrace.ptq.layers.held_back import OutputErrors, gain_text, held_back, summed
from qtrace.ptq.layers.quantized import quantized_layers
from tests.nets import images, left_lines, net

GPTQ: tuple[Any, ...] = ("fuse_bn", {"gptq": {"refit": True, "places": 16}})
BIAS: tuple[Any, ...] = ("fuse_bn", "bias_correction")


def _prepared(ptq: tuple[Any, ...], channels: int = 8, bits: int = 3) -> Any:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))),
        a=M.Conv2d(channels, 8, 3, padding=1),
        b=M.Conv2d(8, 6, 1),
    )
    config = QConfig(backend="generic", weight={"bits": bits, "axis": 0}, ptq=ptq)
    return qtrace.prepare(qtrace.trace(module, images(1, channels, 4, 4), check=False), config)


def _report(ptq: tuple[Any, ...], batches: list[np.ndarray], **options: Any) -> tuple[Any, dict[str, Any]]:
    prepared = _prepared(ptq, batches[0].shape[1], **options)
    qtrace.calibrate(prepared, batches, progress=False, engine="megengine")
    return prepared, read_record(prepared).ptq[-1]


def test_every_fourth_batch_is_held_back_if_there_are_four() -> None:
    assert [held_back(count) for count in (1, 3, 4, 9)] == [(), (), (3,), (3, 7)]


def test_errors_are_sums_over_channels() -> None:
    rng = np.random.default_rng(0)
    prepared = _prepared(GPTQ)
    layer = quantized_layers(prepared)[0][0]
    pairs = [tuple(rng.normal(size=(2, 8, 4, 4)).astype(np.float32) for _ in range(2)) for _ in range(2)]
    each = {i: OutputErrors.of([pair], layer) for i, pair in enumerate(pairs)}
    both = summed(each)
    error = np.concatenate([one - other for one, other in pairs]).astype(np.float64)
    shift = rng.normal(size=8)
    shifted = error - shift[:, None, None]
    np.testing.assert_allclose(both.mean, error.mean(axis=(0, 2, 3)), rtol=1e-6)
    assert both.noise() == pytest.approx((error**2).sum())
    assert both.noise(shift) == pytest.approx((shifted**2).sum())
    assert both.centered_noise == pytest.approx(((error - error.mean((0, 2, 3), keepdims=True)) ** 2).sum())
    signal = sum((one.astype(np.float64) ** 2).sum() for one, _ in pairs)
    assert both.decibels(2.0) == pytest.approx(10 * np.log10(signal / 2))
    assert both.decibels(0.0) is None
    assert summed(each, [1]).count == 32


def test_the_gain_is_described() -> None:
    assert gain_text(2.0, 1.0, ()) == ""
    assert gain_text(2.0, 1.0, (3,)) == "on 1 held-back batch the error falls by 3.01 dB"
    assert gain_text(1.0, 2.0, (3, 7)) == "on 2 held-back batches the error rises by 3.01 dB"
    assert gain_text(1.0, 1.001, (3,)) == "on 1 held-back batch the error changes by less than 0.01 dB"
    assert gain_text(0.0, 2.0, (3,)) == "on 1 held-back batch the error goes from 0 to 2"


@pytest.mark.parametrize("ptq", [GPTQ, BIAS])
def test_a_real_gain_stays_and_the_record_says_so(ptq: tuple[Any, ...]) -> None:
    batches = [images(4, 8, 8, 8, seed=seed) for seed in range(8)]
    prepared, report = _report(ptq, batches)
    assert len(report["changed"]) == 2
    assert all("on 2 held-back batches the error falls by" in line for line in report["changed"])
    assert all(error["after"] >= error["before"] for error in report["errors"])
    assert qtrace.explain(prepared).ptq[-1]["changed"] == report["changed"]


def _planted(seed: int) -> np.ndarray:
    """An image with values in four channels, in which no other image has any."""
    x = np.zeros((1, 32, 4, 4), np.float32)
    x[:, 4 * seed : 4 * seed + 4] = np.random.default_rng(seed).normal(size=(1, 4, 4, 4)) * 3
    return x


@pytest.mark.quick(1)
@pytest.mark.parametrize("ptq", [GPTQ, BIAS])
def test_an_overfit_to_a_few_images_is_refused(ptq: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [_planted(seed) for seed in range(4)]
    plain = _prepared(("fuse_bn",), 32)
    qtrace.calibrate(plain, batches, progress=False, engine="megengine")
    prepared, report = _report(ptq, batches)
    lines = "\n".join(left_lines(report))
    assert re.search("on 1 held-back batch the error (rises|changes) by", lines)
    assert any(line.startswith("a_out:") for line in left_lines(report))
    shown = "\n".join(qtrace.explain(prepared).algorithms())
    assert re.search("held-back batch the error (rises|changes) by", shown)
    weights = [model.a.weight.numpy() for model in (prepared, plain)]
    np.testing.assert_array_equal(*weights)
    monkeypatch.setattr(room, "HELD_EVERY", 9)  # the same images change the layer if none is held back
    _, report = _report(ptq, batches)
    assert "a_out" in "\n".join(report["changed"])


def test_a_value_that_is_not_finite_is_refused() -> None:
    layer = quantized_layers(_prepared(GPTQ))[0][0]
    value = np.full((1, 8, 4, 4), np.nan, np.float32)
    with pytest.raises(qtrace.errors.CalibrationError, match="a_out has values that are NaN"):
        OutputErrors.of([(value, value)], layer)
