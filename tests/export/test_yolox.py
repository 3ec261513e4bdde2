"""YOLOX as it is published, as a whole: a shared upsampling layer, and boxes decoded in forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.zoo.detectors.entry import bounded, trained
from tests.zoo.detectors.yolo import Block, Pafpn, Yolox

Tensor = mge.Tensor
FORMS = {"m.onnx": "backend/onnxruntime", "m.tflite": "backend/tflite"}


class Upsample(M.Module):
    """Twice as many rows and columns."""

    def forward(self, x: Tensor) -> Tensor:
        return F.vision.interpolate(x, scale_factor=2, mode="nearest")


class SharedPafpn(Pafpn):
    """Calls one upsampling layer at both of its levels."""

    def __init__(self, width: int, conv: Any) -> None:
        super().__init__(width, conv)
        self.upsample = Upsample()

    def grow(self, x: Tensor) -> Tensor:
        return self.upsample(x)


class Published(Yolox):
    """Decodes in forward; ``in_place`` writes into the rows, as YOLOX does; else they are joined."""

    def __init__(self, width: int, in_place: bool) -> None:
        super().__init__(infer=True, width=width)
        self.backbone = SharedPafpn(width, Block)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            return super().forward(x)
        rows = []
        for t, stride in zip(self.head(self.backbone(x), True), (8, 16, 32), strict=True):
            rows.append(self.decode(F.transpose(F.flatten(t, 2), (0, 2, 1)), t, stride))
        return F.concat(rows, axis=1)

    def decode(self, rows: Tensor, t: Tensor, stride: int) -> Tensor:
        height, width = t.shape[2], t.shape[3]
        places = F.reshape(F.arange(height), (-1, 1)) * 0 + F.reshape(F.arange(width), (1, -1))
        across = F.reshape(places, (1, -1, 1))
        places = F.reshape(F.arange(height), (-1, 1)) + F.reshape(F.arange(width), (1, -1)) * 0
        grid = F.concat([across, F.reshape(places, (1, -1, 1))], axis=2)
        centers = (rows[..., :2] + grid) * stride
        return F.concat([centers, F.exp(rows[..., 2:4]) * stride, rows[..., 4:]], axis=2)


@pytest.fixture(autouse=True)
def _serial() -> Iterator[None]:
    level, mge.config.async_level = mge.config.async_level, 0  # F.arange races in a queue
    yield
    mge.config.async_level = level


def _check_whole(model: M.Module, batch: int, size: int, file: str, folder: Path) -> None:
    """Traces at one batch size, exports, verifies; the boxes are those of each sample alone."""
    batches = [bounded(batch, seed, size) for seed in range(3)]
    traced = qtrace.trace(model, batches[0], check=False)
    alone = np.concatenate([traced(Tensor(x[None])).numpy() for x in batches[2]])
    np.testing.assert_allclose(traced(Tensor(batches[2])).numpy(), alone, rtol=1e-4, atol=1e-3)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"schema: qtrace/1\nimports: [{FORMS[file]}, yolox]\n")
    prepared = qtrace.prepare(traced, recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, batches[:2], progress=False))
    path = qtrace.export(converted, folder / file)
    report = qtrace.verify(path, converted, batches[2:])
    assert report.worst_lsb() <= 1, report.table()
    assert report.passed, report.table()


@pytest.mark.slow
@pytest.mark.parametrize("file", FORMS)
def test_tiny_yolox_exports_and_verifies(file: str, tmp_path: Path) -> None:
    _check_whole(trained(Published(4, in_place=True)), 2, 32, file, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "joined"])
@pytest.mark.parametrize("file", FORMS)
def test_yolox_exports_and_verifies_in_every_form(
    file: str, in_place: bool, batch: int, tmp_path: Path
) -> None:
    _check_whole(trained(Published(8, in_place)), batch, 96, file, tmp_path)
