"""BatchNorm re-estimated: its statistics where it is kept, the scales of channels where it is folded."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace import QConfig
from qtrace.preparation.model import read_record
from tests.nets import images, left_lines, net, randomize


def _module() -> M.Module:
    module = net(
        lambda self, x: self.b(F.relu(self.bn(self.a(x)))),
        a=M.Conv2d(3, 6, 3, bias=False),
        bn=M.BatchNorm2d(6),
        b=M.Conv2d(6, 4, 1),
    )
    return randomize(module)


DATA = [images(8, 3, 8, 8, seed=s) for s in range(2)]


def _calibrated(*ptq: str, bits: int = 3, **config: Any) -> Any:
    traced = qtrace.trace(_module(), DATA[0], check=False)
    config = {"weight": {"bits": bits}, **config}
    prepared = qtrace.prepare(traced, QConfig(backend="generic", ptq=ptq, **config))
    return qtrace.calibrate(prepared, DATA, progress=False)


def test_a_kept_norm_takes_the_statistics_of_the_quantized_layer() -> None:
    prepared = _calibrated("fuse_bn", "bn_reestimate", qat={"bn": {"fold": False}})
    x = prepared.qsites.x.quantize_dequantize(mge.Tensor(np.concatenate(DATA)))
    weight = prepared.qsites.a_weight.quantize_dequantize(prepared.a.weight)
    y = F.conv2d(x, weight).numpy().astype(np.float64)
    mean, variance = y.mean(axis=(0, 2, 3)), y.var(axis=(0, 2, 3))
    np.testing.assert_allclose(prepared.bn.running_mean.numpy().reshape(-1), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(prepared.bn.running_var.numpy().reshape(-1), variance, rtol=1e-4)
    assert any("estimated anew" in line for line in read_record(prepared).ptq[-1]["changed"])


def test_a_folded_layer_gets_mean_and_variance_back_with_the_same_integers() -> None:
    plain, prepared = _calibrated("fuse_bn"), _calibrated("fuse_bn", "bn_reestimate")
    report = read_record(prepared).ptq[-1]
    assert any(line.startswith("a_out: channels scaled") for line in report["changed"])
    assert all(e["after"] > e["before"] for e in report["errors"])
    for layer in ("a", "b"):
        integers = []
        for model in (plain, prepared):
            scale = getattr(model.qsites, f"{layer}_weight").scale.numpy()
            integers.append(np.clip(np.rint(getattr(model, layer).weight.numpy() / scale), -4, 3))
        np.testing.assert_array_equal(*integers)
    quantized = qtrace.convert(prepared)
    x = mge.Tensor(DATA[0])
    np.testing.assert_array_equal(quantized(x).numpy(), prepared(x).numpy())


def test_one_scale_a_tensor_is_left_with_the_reason() -> None:
    report = read_record(_calibrated("fuse_bn", "bn_reestimate", weight={"bits": 4, "axis": None})).ptq[-1]
    assert report["changed"] == []
    assert len(left_lines(report)) == 2
    assert "its weights have one scale" in left_lines(report)[0]
