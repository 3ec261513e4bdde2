"""A layer with its BatchNorm kept: channels that the BatchNorm switches off."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from tests.nets import images, net

BATCHES = [images(4, 3, 8, 8, seed=s) for s in range(3)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("gamma", [0.0, 1e-9])
def test_a_channel_that_is_switched_off_keeps_its_bias(gamma: float, tmp_path: Path) -> None:
    module = net(
        lambda self, x: self.bn(self.conv(x)), conv=M.Conv2d(3, 4, 3, padding=1), bn=M.BatchNorm2d(4)
    )
    module.bn.weight[:, 1:] = gamma
    module.bn.bias[:, 1] = 0.75
    module.bn.bias[:, 2] = 0.0
    # One of a few channels counts, however small: its output would stay in float beside the others.
    rounded = {"match": {"op": "conv2d"}, "quantize": True}
    config = QConfig(qat={"bn": {"fold": False}}, rules=[rounded])
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    qtrace.calibrate(prepared, BATCHES, progress=False)
    x = mge.Tensor(BATCHES[0])
    got, want = prepared(x).numpy(), module(x).numpy()
    step = float(prepared.qsites.bn_out.qparams().scale)
    assert np.abs(got - want)[:, 1:].max() <= 0.51 * step
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(x).numpy(), got)
    report = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, BATCHES)
    assert report.passed, report.table()
