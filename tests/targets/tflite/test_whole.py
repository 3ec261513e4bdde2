"""Files without floats: with integers at their ends, networks have no float tensor and LiteRT's integers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.graph.types import TracedModule
from qtrace.targets.tflite.runtime import find_kernels
from tests.nets import images, net
from tests.targets.tflite.files import kinds, tensors
from tests.zoo import mobilenet, resnet, segmentation
from tests.zoo.checks import rounded_to_nearest
from tests.zoo.detectors.entry import bounded, trained
from tests.zoo.detectors.yolo import Yolox

FLOAT32 = 0


def _converted(module: M.Module, batches: list[np.ndarray], config: QConfig | None = None) -> TracedModule:
    config = config or rounded_to_nearest(qtrace.load_recipe("backend/tflite"))
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


def _parts(self: Any, x: mge.Tensor) -> mge.Tensor:
    """One of each part of the networks below: residual sum, gate, pools, resizing, join, padding."""
    y = F.hswish(self.stem(x))
    gate = F.hsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
    y = self.shortcut(F.avg_pool2d(y, 2)) + F.silu(self.point(F.max_pool2d(y * gate, 3, 2, 1)))
    large = F.vision.interpolate(F.avg_pool2d(y, 3, 2, 1), scale_factor=2.0)
    y = F.concat([large, F.sigmoid(y), F.relu6(F.nn.pad(y[:, :, 1:], ((0, 0), (0, 0), (1, 0), (0, 0))))], 1)
    return self.fc(F.flatten(F.avg_pool2d(self.last(y), 4), 1))


PARTS = net(
    _parts,
    stem=M.Conv2d(4, 8, 3, padding=1),
    down=M.Conv2d(8, 4, 1),
    up=M.Conv2d(4, 8, 1),
    shortcut=M.Conv2d(8, 8, 1),
    point=M.Conv2d(8, 8, 1),
    last=M.Conv2d(24, 8, 1),
    fc=M.Linear(8, 5),
)


def _check_whole(model: TracedModule, batch: np.ndarray, path: Path) -> None:
    """Exports ``model`` with integers at the ends: no tensor is float, and each op is 1 LSB off at most."""
    qtrace.export(model, path, io="int8")
    assert [name for name, t in tensors(path).items() if t.type == FLOAT32] == []
    report = qtrace.verify(path, model, [batch], runtime="litert")
    assert report.passed, report.table()
    assert report.worst_lsb() <= 1
    assert report.kernels is not None
    assert report.kernels.floats == ()


def test_a_net_of_all_parts_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]
    model = _converted(PARTS, batches)
    with caplog.at_level(logging.INFO, "qtrace"):
        _check_whole(model, images(2, 4, 8, 8, seed=9), tmp_path / "m.tflite")
    assert "the TFLite file computes no op in float." in caplog.messages


NETWORKS: dict[str, tuple[Callable[[], M.Module], int]] = {
    "resnet": (resnet.resnet_d, 32),
    "mobilenet_v2": (mobilenet.mobilenet_v2_relu6, 32),
    "mobilenet_v3": (mobilenet.mobilenet_v3, 32),
    "unet": (segmentation.unet_bilinear, 32),
    "yolox": (lambda: trained(Yolox()), 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_whole(name: str, tmp_path: Path) -> None:
    build, size = NETWORKS[name]
    level = mge.config.async_level
    mge.config.async_level = 0 if name == "yolox" else level  # its ops race otherwise
    try:
        batches = [bounded(2, seed, size) for seed in range(3)]
        _check_whole(_converted(build(), batches[:2]), batches[2], tmp_path / "m.tflite")
    finally:
        mge.config.async_level = level


def test_resized_and_averaged_values_keep_the_grid(tmp_path: Path) -> None:
    """RESIZE_BILINEAR and AVERAGE_POOL_2D cannot change a scale: input and result are one group."""
    module = net(
        lambda self, x: self.b(F.vision.interpolate(F.avg_pool2d(F.relu(self.a(x)), 3, 1, 1), (16, 16))),
        a=M.Conv2d(4, 4, 1),
        b=M.Conv2d(4, 4, 1),
    )
    batches = [images(2, 4, 8, 8)]
    model = _converted(module, batches)
    sites = {s.node: s.group for s in qtrace.explain(model).annotation.sites if s.sort == "activation"}
    assert sites["relu_out"] == sites["avg_pool2d_out"] == sites["interpolate_out"]
    path = qtrace.export(model, tmp_path / "m.tflite", io="int8")
    written = tensors(path)
    scales = {float(written[f"{n}_int"].quantization.scale[0]) for n in ("relu_out", "interpolate_out")}
    assert len(scales) == 1


def test_what_stays_float_is_counted_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = net(
        lambda self, x: self.b(F.vision.interpolate(F.softmax(F.sigmoid(self.a(x)), 1), (16, 16))),
        a=M.Conv2d(4, 4, 1),
        b=M.Conv2d(4, 4, 1),
    )
    rules = [{"match": {"op": "interpolate"}, "output": {"bits": 8}}]
    batches = [images(2, 4, 8, 8)]
    model = _converted(module, batches, QConfig(backend="tflite", rules=rules))
    with caplog.at_level(logging.INFO, "qtrace"):
        path = qtrace.export(model, tmp_path / "m.tflite")
    floats = {kind: reason for _, kind, reason in find_kernels(path).floats}
    assert floats["softmax"].startswith("it keeps its accuracy")
    assert floats["sigmoid"] == "functions='float' computes it between DEQUANTIZE and QUANTIZE"
    assert floats["interpolate"] == "RESIZE_BILINEAR cannot change the scale, as its site demands"
    assert any(m.startswith("ops that compute in float in the TFLite file: 3: ") for m in caplog.messages)
    report = qtrace.verify(path, model, batches)
    assert report.passed, report.table()
    assert report.kernels is not None
    assert len(report.kernels.floats) == 3
    assert "RESIZE_BILINEAR" in kinds(path)
