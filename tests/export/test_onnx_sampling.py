"""Ops that read between pixels: RoiAlign and GridSample against MegEngine, in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace.errors import ExportError
from tests.nets import images, net

T = mge.Tensor
_RANDOM = np.random.default_rng(3)
SHAPE = (3, 4, 6, 8)
# An ordinary region, one of less than a pixel, one that is larger than the image, all of it.
REGIONS = np.array(
    [[0, 0.5, 0.6, 4.2, 3.9], [1, 2.1, 1.0, 2.4, 1.3], [2, -3, -2, 9, 12], [0, 0, 0, 7, 5]], np.float32
)
PLACES = _RANDOM.uniform(-3, 11, (3, 5, 6, 2)).astype(np.float32)
MATRICES = (np.eye(3) + _RANDOM.normal(size=(3, 3, 3)) * 0.05).astype(np.float32)

# What is sampled, and with what.
CASES: dict[str, tuple[Callable[[T, T], T], np.ndarray]] = {
    "roi_align": (lambda x, r: F.vision.roi_align(x, r, (2, 3)), REGIONS),
    "roi_align_scaled": (
        lambda x, r: F.vision.roi_align(x, r, 2, spatial_scale=0.5, sample_points=3),
        REGIONS,
    ),
    "roi_align_unaligned": (
        lambda x, r: F.vision.roi_align(x, r, (2, 2), aligned=False, spatial_scale=0.5),
        REGIONS,
    ),
    "remap": (lambda x, m: F.vision.remap(x, m), PLACES),
    "remap_constant": (lambda x, m: F.vision.remap(x, m, border_mode="constant"), PLACES),
    "warp_perspective": (lambda x, m: F.vision.warp_perspective(x, m, (5, 7)), MATRICES),
    "warp_perspective_constant": (
        lambda x, m: F.vision.warp_perspective(x, m, (5, 7), border_mode="constant"),
        MATRICES,
    ),
    "warp_affine": (lambda x, m: F.vision.warp_affine(x, m, (5, 7), format="NCHW"), MATRICES[:, :2]),
}


def _module(function: Callable[[T, T], T]) -> M.Module:
    return net(lambda self, x, y: function(x, y))


def _export(module: M.Module, inputs: tuple[np.ndarray, ...], folder: Path, config: object = None) -> Path:
    prepared = qtrace.prepare(qtrace.trace(module, *inputs, check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, [inputs], progress=False))
    return qtrace.export(converted, folder / "m.onnx")


@pytest.mark.parametrize("name", CASES)
def test_float(name: str, tmp_path: Path) -> None:
    function, places = CASES[name]
    x, module = images(*SHAPE), _module(function)
    path = _export(module, (x, places), tmp_path, {"rules": [{"match": {}, "quantize": False}]})
    assert onnx.load(path).opset_import[0].version == 16
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x, "y": places})
    np.testing.assert_allclose(found, module(T(x), T(places)).numpy(), atol=5e-6)


def test_regions_of_a_quantized_map(tmp_path: Path) -> None:
    """roi_align reads integers and is rounded, as pooling is."""
    x = images(*SHAPE)
    conv = M.Conv2d(4, 4, 3, padding=1)
    module = net(lambda self, x, r: self.d(F.vision.roi_align(self.c(x), r, 2)), c=conv, d=M.Conv2d(4, 5, 1))
    prepared = qtrace.prepare(qtrace.trace(module, x, REGIONS, check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, [(x, REGIONS)], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [(images(*SHAPE, seed=1), REGIONS)])
    assert report.passed, report.table()
    assert "roi_align_out_q" in report.sites["op_by_op"]


REFUSED: dict[str, tuple[Callable[[T, T], T], np.ndarray, str]] = {
    "largest sample": (
        lambda x, r: F.vision.roi_align(x, r, 2, mode="max"),
        REGIONS,
        r"roi_align takes the largest sample.*use mode='average'.*roi_align_out",
    ),
    "uneven samples": (
        lambda x, r: F.vision.roi_align(x, r, 2, sample_points=(2, 3)),
        REGIONS,
        r"2 x 3 samples.*make sample_points one number",
    ),
    "border": (
        lambda x, m: F.vision.remap(x, m, border_mode="wrap"),
        PLACES,
        r"remap with border_mode='wrap'.*use 'replicate'",
    ),
    "border value": (
        lambda x, m: F.vision.remap(x, m, border_mode="constant", scalar=1.0),
        PLACES,
        r"the value 1.0 has no ONNX form",
    ),
    "nearest": (
        lambda x, m: F.vision.remap(x, m, interp_mode="nearest"),
        PLACES,
        r"interp_mode='nearest' has no ONNX form: use 'linear'",
    ),
    "channels last": (
        lambda x, m: F.vision.warp_affine(x, m, (5, 7)),
        MATRICES[:, :2],
        r"warp_affine has an ONNX form only with format='NCHW'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_has_not_is_refused(name: str, tmp_path: Path) -> None:
    function, places, message = REFUSED[name]
    x = images(3, 4, 6, 8) if name != "channels last" else images(3, 6, 8, 4)
    with pytest.raises(ExportError, match=message):
        _export(_module(function), (x, places), tmp_path)
    assert list(tmp_path.iterdir()) == []
