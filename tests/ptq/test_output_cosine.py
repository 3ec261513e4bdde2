"""The search by output cosine: what it chooses is the best of what it tries, channel by channel."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.preparation.model import read_record
from tests.nets import images, left_lines, net

BATCHES = [images(2, 4, 8, 8, seed=s) for s in range(2)]


def _calibrated(*ptq: Any, axis: int | None = 0, **config: Any) -> Any:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 6, 3, padding=1), b=M.Conv2d(6, 4, 3)
    )
    traced = qtrace.trace(module, BATCHES[0], check=False)
    weight = {"bits": 3, "axis": axis, **config.pop("weight", {})}
    config = QConfig(backend="generic", weight=weight, ptq=ptq, **config)
    return qtrace.calibrate(qtrace.prepare(traced, config), BATCHES, progress=False)


def _first_layer(prepared: Any, scale: np.ndarray) -> np.ndarray:
    """Cosines of the first layer's channels with other scales, in numpy float64."""
    x = np.concatenate(BATCHES).astype(np.float32)
    weight, bias = prepared.a.weight.numpy().astype(np.float64), prepared.a.bias.numpy()
    scheme = prepared.qsites.a_weight.scheme
    s = scale.reshape(-1, 1, 1, 1)
    rounded = np.clip(np.rint(weight / s), scheme.qmin, scheme.qmax) * s
    rounded_input = prepared.qsites.x(mge.Tensor(x))

    def outputs(values: Any, kernel: np.ndarray) -> np.ndarray:
        y = F.conv2d(values, mge.Tensor(kernel.astype(np.float32)), mge.Tensor(bias), padding=1).numpy()
        return np.moveaxis(y.astype(np.float64), 1, 0).reshape(bias.size, -1)

    expected, actual = outputs(mge.Tensor(x), weight), outputs(rounded_input, rounded)
    return (expected * actual).sum(1) / np.sqrt((expected**2).sum(1) * (actual**2).sum(1))


@pytest.mark.parametrize("axis", [0, None])
def test_the_cosine_of_layers_rises(axis: int | None) -> None:
    plain, searched = (_calibrated(*ptq, axis=axis) for ptq in ((), ("output_cosine",)))
    report = read_record(searched).ptq[-1]
    assert report["algorithm"] == "output_cosine"
    assert [e["site"] for e in report["errors"]] == ["a_out", "b_out"]
    assert report["changed"]
    for name in ("a_weight", "b_weight"):
        ratio = getattr(searched.qsites, name).qparams().scale / getattr(plain.qsites, name).qparams().scale
        assert ((ratio >= 0.5 - 1e-6) & (ratio <= 1.2 + 1e-6)).all()

    def cosine(model: Any) -> float:
        qtrace.set_phase(model, "quantize")
        output = np.concatenate([model(mge.Tensor(b)).numpy().ravel() for b in BATCHES]).astype(np.float64)
        qtrace.set_phase(model, "float")
        expected = np.concatenate([model(mge.Tensor(b)).numpy().ravel() for b in BATCHES]).astype(np.float64)
        return float(output @ expected / np.sqrt((output @ output) * (expected @ expected)))

    assert cosine(searched) > cosine(plain)


def test_each_channel_gets_the_best_multiple() -> None:
    candidates = 8
    plain, searched = _calibrated(), _calibrated({"output_cosine": {"candidates": candidates}})
    start = plain.qsites.a_weight.qparams().scale.astype(np.float64)
    multiples = np.concatenate([[1.0], np.linspace(0.5, 1.2, candidates)])
    scores = np.stack([_first_layer(plain, start * m) for m in multiples])
    chosen = _first_layer(plain, searched.qsites.a_weight.qparams().scale.astype(np.float64))
    np.testing.assert_allclose(chosen, scores.max(axis=0), atol=2e-4)
    assert (chosen > scores[0] - 2e-4).all()


def test_powers_of_two_stay_so_and_transformed_weights_are_left() -> None:
    patch = {"power_of_two": True}
    prepared = _calibrated("output_cosine", weight=patch, activation=patch)
    for name in ("a_weight", "b_weight"):
        assert (np.frexp(getattr(prepared.qsites, name).qparams().scale)[0] == 0.5).all()
    left = left_lines(read_record(_calibrated("output_cosine", fakequant="dorefa")).ptq[-1])
    assert len(left) == 2
    assert "its fake quant transforms the weight" in left[0]
