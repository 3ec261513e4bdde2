"""Outputs whose parts lost to one grid, as calibration saw other ranges: the cure restores them."""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.sums import sqnr_db
from qtrace.config.recipe import load_recipe
from qtrace.preparation.passes._view import MixedRanges
from qtrace.sensitivity.diagnosis import cure_recipe, diagnose
from tests.nets import images, net, randomize

X = images(4, 3, 12, 12, seed=1)


def _concat(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = self.b(F.relu(self.a(x)))
    return F.concat([F.exp(y[:, :4]) * 64, F.sigmoid(y[:, 4:] - 3)], axis=1)


def _last_axis(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = F.flatten(self.b(F.relu(self.a(x))), 2).transpose(0, 2, 1)
    packed = F.concat([F.exp(y[..., :4]) * 64, F.sigmoid(y[..., 4:] - 3)], axis=-1)
    return packed.transpose(0, 2, 1)


def _setitem(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = self.b(F.relu(self.a(x)))
    out = F.sigmoid(y - 3) * 1.0
    out[:, :4] = F.exp(y[:, :4]) * 64
    return out


def _raw(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return self.raw(F.relu(self.a(x)))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("forward", "target"),
    [
        (_concat, "onnxruntime"),
        (_concat, "tflite"),
        (_last_axis, "onnxruntime"),
        (_setitem, "onnxruntime"),
        (_raw, "onnxruntime"),
        (_raw, "tflite"),
    ],
)
def test_the_cure_leaves_the_lost_part_in_float(
    forward: Callable[..., mge.Tensor], target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    parts = {"a": M.Conv2d(3, 8, 3, padding=1), "b": M.Conv2d(8, 12, 1), "raw": M.Conv2d(8, 12, 1)}
    module = randomize(net(forward, **parts), 0)
    large = np.where(np.arange(12) < 4, 400.0, 1.0).astype(np.float32)
    module.raw.weight._reset(module.raw.weight.numpy() * large.reshape(12, 1, 1, 1))
    module.raw.bias._reset(module.raw.bias.numpy() * large.reshape(1, 12, 1, 1))
    traced = qtrace.trace(module, X, check=False)
    monkeypatch.setattr("qtrace.preparation.prepare.find_mixed_ranges", lambda *_: MixedRanges())

    def calibrate(config: object) -> tuple[mge.module.Module, float]:
        prepared = qtrace.calibrate(qtrace.prepare(traced, config), [X], progress=False)
        exact, rounded = (f(mge.Tensor(X)).numpy()[:, 4:] for f in (module, qtrace.convert(prepared)))
        return prepared, sqnr_db(exact, rounded)

    name = f"backend/{target}"
    prepared, lost = calibrate(name)
    diagnosis = diagnose(prepared, [X], progress=False)
    file = tmp_path / "cure.yaml"
    file.write_text(cure_recipe(diagnosis.causes, diagnosis.cures, name))
    cured = calibrate(load_recipe(str(file)))[1]
    assert lost < 15
    assert cured > 28, file.read_text()
