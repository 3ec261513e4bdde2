"""Ops that read between pixels: RoiAlign and GridSample against MegEngine, in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace.errors import ExportError
from tests.each import each_of
from tests.nets import calibrated_if_quantized, images, net

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
    converted = qtrace.convert(calibrated_if_quantized(prepared, [inputs]))
    return qtrace.export(converted, folder / "m.onnx")


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CASES)
def test_sampling_in_float_matches_the_graph(name: str, tmp_path: Path) -> None:
    function, places = CASES[name]
    x, module = images(*SHAPE), _module(function)
    path = _export(module, (x, places), tmp_path, {"rules": [{"match": {}, "quantize": False}]})
    assert onnx.load(path).opset_import[0].version == 16
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"x": x, "y": places})
    np.testing.assert_allclose(output, module(T(x), T(places)).numpy(), atol=5e-6)


def test_regions_of_a_quantized_map(tmp_path: Path) -> None:
    """roi_align reads integers and is rounded, as pooling is."""
    x = images(*SHAPE)
    conv = M.Conv2d(4, 4, 3, padding=1)
    module = net(lambda self, x, r: self.d(F.vision.roi_align(self.c(x), r, 2)), c=conv, d=M.Conv2d(4, 5, 1))
    prepared = qtrace.prepare(qtrace.trace(module, x, REGIONS, check=False))
    converted = qtrace.convert(calibrated_if_quantized(prepared, [(x, REGIONS)]))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [(images(*SHAPE, seed=1), REGIONS)])
    assert report.passed, report.table()
    assert "roi_align_out_q" in report.sites["op_by_op"]


def _deformed(self: M.Module, x: T) -> T:
    return self.m(x, self.offset(x) * 2.0, F.sigmoid(self.mask(x)))


@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"stride": 2, "padding": 2, "dilation": 2, "bias": False}]
)
def test_deformable_convolution(options: dict[str, Any], tmp_path: Path) -> None:
    """In onnxruntime, which has no kernel for ONNX's own; a batch of another size, too."""
    window = {k: v for k, v in options.items() if k != "bias"}
    layers = {
        "m": M.DeformableConv2d(4, 5, 3, **options),
        "offset": M.Conv2d(4, 18, 3, **window),
        "mask": M.Conv2d(4, 9, 3, **window),
    }
    module, x = net(_deformed, **layers), images(*SHAPE)
    module.m.weight._reset(mge.Parameter(_RANDOM.normal(size=(5, 4, 3, 3)).astype(np.float32)))
    path = _export(module, (x,), tmp_path, {"rules": [{"match": {}, "quantize": False}]})
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (x, images(5, *SHAPE[1:], seed=2)):
        (output,) = session.run(None, {"x": batch})
        np.testing.assert_allclose(output, module(T(batch)).numpy(), atol=3e-5)


def test_deformable_convolution_as_a_function(tmp_path: Path) -> None:
    def forward(self: M.Module, x: T) -> T:
        return F.nn.deformable_conv2d(x, self.w, self.offset(x), F.sigmoid(self.mask(x)), self.b, padding=1)

    values = {n: mge.Parameter(_RANDOM.normal(size=s).astype(np.float32)) for n, s in _STORED.items()}
    layers = {"offset": M.Conv2d(4, 18, 3, padding=1), "mask": M.Conv2d(4, 9, 3, padding=1)}
    module, x = net(forward, **layers, **values), images(*SHAPE)
    path = _export(module, (x,), tmp_path, {"rules": [{"match": {}, "quantize": False}]})
    (output,) = ort.InferenceSession(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(output, module(T(x)).numpy(), atol=3e-5)


_STORED = {"w": (5, 4, 3, 3), "b": (1, 5, 1, 1)}

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
        r"the value 1.0 cannot become ONNX",
    ),
    "nearest": (
        lambda x, m: F.vision.remap(x, m, interp_mode="nearest"),
        PLACES,
        r"interp_mode='nearest' cannot become ONNX: use 'linear'",
    ),
    "channels last": (
        lambda x, m: F.vision.warp_affine(x, m, (5, 7)),
        MATRICES[:, :2],
        r"warp_affine has an ONNX form only with format='NCHW'",
    ),
}


@each_of("name", REFUSED)
def test_sampling_that_onnx_lacks_is_refused(name: str, tmp_path: Path) -> None:
    function, places, message = REFUSED[name]
    x = images(3, 4, 6, 8) if name != "channels last" else images(3, 6, 8, 4)
    with pytest.raises(ExportError, match=message):
        _export(_module(function), (x, places), tmp_path)
    assert list(tmp_path.iterdir()) == []
