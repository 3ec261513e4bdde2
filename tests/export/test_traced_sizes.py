"""Sizes that forward computes from shapes, casts that change nothing, and parts that nothing reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.errors import ConfigError, ExportError
from qtrace.graph.flatten import flatten
from qtrace.graph.open_axes import traced_value
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import read_record
from tests.each import each_of
from tests.nets import images, net

Forward = Callable[[Any, mge.Tensor], mge.Tensor]

SUFFIXES = {"onnxruntime": ".onnx", "tflite": ".tflite", "ncnn": ".param"}
IMAGES = images(2, 3, 8, 8)


def _net(after: Forward) -> M.Module:
    """A convolution, then ``after``, which may call the convolution ``last``."""
    return net(
        lambda self, x: after(self, F.relu(self.conv(x))),
        conv=M.Conv2d(3, 4, 3, padding=1),
        last=M.Conv2d(4, 4, 1),
    )


def _converted(module: M.Module, backend: str, x: np.ndarray = IMAGES) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), f"backend/{backend}")
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def _verify(module: M.Module, backend: str, folder: Path, x: np.ndarray = IMAGES) -> Path:
    converted = _converted(module, backend, x)
    path = qtrace.export(converted, folder / f"m{SUFFIXES.get(backend, '.onnx')}")
    report = qtrace.verify(path, converted, [x])
    assert report.passed, report.table()
    return path


def _doubled(self: Any, x: mge.Tensor) -> mge.Tensor:
    widths = ((0, 0), (0, 0), (0, x.shape[2] // 2), (1, 1))
    return self.last(F.nn.pad(x, widths))


SIZES: dict[str, Forward] = {
    "avg_pool2d": lambda self, x: F.avg_pool2d(x, x.shape[2]),
    "avg_pool2d pair": lambda self, x: self.last(F.avg_pool2d(x, (x.shape[2], x.shape[3]))),
    "avg_pool2d stride": lambda self, x: F.avg_pool2d(x, 2, stride=x.shape[2] // 4),
    "max_pool2d": lambda self, x: F.max_pool2d(x, x.shape[3] // 2),
    "adaptive_avg_pool2d": lambda self, x: F.adaptive_avg_pool2d(x, x.shape[2] // 2),
    "adaptive_max_pool2d": lambda self, x: F.adaptive_max_pool2d(x, (x.shape[2] // 4, 2)),
    "pad": _doubled,
}


def _correlated(self: Any, x: mge.Tensor) -> mge.Tensor:
    """Correlates each channel of each sample with a kernel of its own, as Siamese trackers do."""
    batch, channels, height, width = (x.shape[axis] for axis in range(4))
    kernels = F.adaptive_avg_pool2d(self.last(x), 3).reshape(batch * channels, 1, 1, 3, 3)
    y = F.conv2d(x.reshape(1, batch * channels, height, width), kernels, groups=batch * channels)
    return y.reshape(batch, channels, height - 2, width - 2)


def _conditional(self: Any, x: mge.Tensor) -> mge.Tensor:
    """Convolves each sample with a weight of its own, as CondConv does."""
    weights = F.matmul(F.mean(x, (2, 3)), F.reshape(F.concat([self.last.weight] * 9), (4, 36)))
    batch = x.shape[0]
    kernels = F.repeat(F.expand_dims(weights.reshape(batch, 4, 3, 3), 1), 4, 1)
    y = F.conv2d(x.reshape(1, batch * 4, 8, 8), kernels, padding=1, groups=batch)
    return self.last(F.relu(y.reshape(batch, 4, 8, 8)))


@each_of("backend", ["onnxruntime", "openvino"])
@each_of("after", [_correlated, _conditional])
def test_groups_that_come_from_the_batch_fix_it(after: Forward, backend: str, tmp_path: Path) -> None:
    path = _verify(_net(after), backend, tmp_path)
    (source,) = onnx.load(path).graph.input
    assert [size.dim_value for size in source.type.tensor_type.shape.dim] == [2, 3, 8, 8]


@pytest.mark.parametrize("backend", ["tflite", "ncnn"])
def test_kernels_from_data_are_refused_before_the_calibration(backend: str) -> None:
    traced = qtrace.trace(_net(_correlated), IMAGES, check=False)
    with pytest.raises(ConfigError, match=f"conv2d_out: its weight is computed .* files for {backend} hold"):
        qtrace.prepare(traced, f"backend/{backend}")


def test_groups_computed_from_channels_leave_the_batch_open(tmp_path: Path) -> None:
    module = _net(lambda self, x: F.conv2d(x, self.kernels, groups=x.shape[1]))
    module.kernels = mge.Parameter(images(4, 1, 1, 3, 3))
    (source,) = onnx.load(_verify(module, "onnxruntime", tmp_path)).graph.input
    assert source.type.tensor_type.shape.dim[0].dim_param == "N"


@pytest.mark.quick(3)
@pytest.mark.parametrize("backend", SUFFIXES)
@pytest.mark.parametrize("case", SIZES)
def test_a_size_computed_from_shapes_is_exported(case: str, backend: str, tmp_path: Path) -> None:
    _verify(_net(SIZES[case]), backend, tmp_path)


def test_explain_says_that_a_size_is_fixed() -> None:
    prepared = qtrace.prepare(
        qtrace.trace(_net(SIZES["avg_pool2d"]), IMAGES, check=False), "backend/onnxruntime"
    )
    text = _reasons(prepared)["avg_pool2d_out"]
    assert text == "computed from shapes, and fixed at the traced size: kernel_size 8"


def _reasons(prepared: TracedModule) -> dict[str, str]:
    return {n.name: n.reason for n in read_record(prepared).annotation.notes}


def test_the_graph_itself_follows_other_sizes() -> None:
    module = _net(SIZES["avg_pool2d"])
    prepared = qtrace.prepare(qtrace.trace(module, IMAGES, check=False), "backend/onnxruntime")
    other = mge.Tensor(images(1, 3, 12, 12))
    np.testing.assert_allclose(prepared(other).numpy(), module(other).numpy(), atol=1e-6)


def test_a_size_computed_from_values_is_refused_in_a_sentence(tmp_path: Path) -> None:
    module = _net(lambda self, x: F.avg_pool2d(x, F.floor(F.abs(x).max()).astype("int32") * 0 + 2))
    converted = _converted(module, "onnxruntime")
    with pytest.raises(ExportError, match="its kernel_size is computed from values"):
        qtrace.export(converted, tmp_path / "m.onnx")


def test_traced_value_reads_shapes_and_numbers_only() -> None:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        return x.mean() + (x.shape[2] + 31) // 32 * 32 + F.arange(x.shape[1]).sum()

    flat = flatten(qtrace.trace(net(forward), IMAGES, check=False))
    values = {n.name: traced_value(n) for e in exprs(flat) for n in e.outputs}
    assert values["mul_out"] == 32
    assert values["sum_out"] == 3
    assert values["mean_out"] is None
    assert values[flat.graph.outputs[0].name] is None


CASTS: dict[str, Forward] = {
    "dtype of a weight": lambda self, x: self.last(x.astype(self.last.weight.dtype)),
    "name": lambda self, x: self.last(x.astype("float32")),
    "before the output": lambda self, x: self.last(x).astype(np.float32),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("case", "backend"), list(zip(CASTS, itertools.cycle(SUFFIXES), strict=False)))
def test_a_cast_to_the_same_type_is_an_identity(case: str, backend: str, tmp_path: Path) -> None:
    _verify(_net(CASTS[case]), backend, tmp_path)


def test_a_cast_to_the_same_type_has_a_caffe_form(tmp_path: Path) -> None:
    qtrace.export(_converted(_net(CASTS["name"]), "tensorrt"), tmp_path / "m.prototxt")


# -- writing between bounds that are computed ----------------------------------------------------------


def _padded(x: mge.Tensor, multiple: int, batch: bool = False) -> mge.Tensor:
    count, channels, height, width = x.shape
    tall = (height + multiple - 1) // multiple * multiple
    wide = (width + multiple - 1) // multiple * multiple
    frame = F.full((count, channels, tall, wide), 0.0, dtype=x.dtype)
    if batch:
        frame[:count, :channels, :height, :width] = x
    else:
        frame[:, :, :height, :width] = x
    return frame


def _overwritten(self: Any, x: mge.Tensor) -> mge.Tensor:
    x[:, 1:3, x.shape[2] // 4 : x.shape[2] // 2, 1:] = 0.5
    return self.last(x)


def _row(self: Any, x: mge.Tensor) -> mge.Tensor:
    x[:, :, x.shape[2] // 2] = 0.5
    return self.last(x)


WRITES: dict[str, Forward] = {
    "padded": lambda self, x: self.last(_padded(x, 5)),
    "padded by all four bounds": lambda self, x: self.last(_padded(x, 5, batch=True)),
    "nothing left to pad": lambda self, x: self.last(_padded(x, 4)),
    "a region": _overwritten,
    "a row": _row,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("backend", ["onnxruntime", "tflite"])
@pytest.mark.parametrize("case", WRITES)
def test_writing_between_computed_bounds(case: str, backend: str, tmp_path: Path) -> None:
    if (case, backend) == ("a row", "tflite"):
        with pytest.raises(ExportError, match=r"writing at .* cannot become TFLite: write at slices"):
            _verify(_net(WRITES[case]), backend, tmp_path)
        return
    _verify(_net(WRITES[case]), backend, tmp_path)


class Backbone(M.Module):
    """Two strides, and a pyramid of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = M.ConvBnRelu2d(3, 8, 3, 2, 1)
        self.down = M.ConvBnRelu2d(8, 8, 3, 2, 1)
        self.lateral = M.Conv2d(8, 8, 1)

    def forward(self, x: mge.Tensor) -> list[mge.Tensor]:
        fine = self.stem(x)
        coarse = self.down(fine)
        return [self.lateral(fine) + F.vision.interpolate(coarse, scale_factor=2), coarse]


class Detector(M.Module):
    """A one-stage detector that pads its images itself and decodes boxes around anchors."""

    def __init__(self, multiple: int = 4, anchors: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.multiple, self.classes = multiple, classes
        self.backbone = Backbone()
        self.tower = M.Conv2d(8, 8, 3, 1, 1)
        self.scores = M.Conv2d(8, anchors * classes, 3, 1, 1)
        self.boxes = M.Conv2d(8, anchors * 4, 3, 1, 1)

    def forward(self, image: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        padded = _padded((image - 0.1) / 1.5, self.multiple)
        scores, boxes = [], []
        for level, stride in zip(self.backbone(padded), (2, 4), strict=True):
            y = F.relu(self.tower(level))
            found = self.scores(y).transpose(0, 2, 3, 1).reshape(y.shape[0], -1, self.classes)
            scores.append(F.sigmoid(found))
            offsets = self.boxes(y).transpose(0, 2, 3, 1).reshape(y.shape[0], -1, 4)
            boxes.append(self._decoded(offsets, y.shape[-2:], stride))
        return F.concat(scores, 1), F.concat(boxes, 1)

    @staticmethod
    def _decoded(offsets: mge.Tensor, size: mge.Tensor, stride: int) -> mge.Tensor:
        rows = F.arange(size[0]) * stride
        columns = F.arange(size[1]) * stride
        ys = F.broadcast_to(F.reshape(rows, (-1, 1, 1)), (size[0], size[1], 2)).flatten()
        xs = F.broadcast_to(F.reshape(columns, (1, -1, 1)), (size[0], size[1], 2)).flatten()
        centers = F.stack([xs, ys], 1)
        middle = offsets[:, :, :2] * stride + centers
        extent = F.exp(F.minimum(offsets[:, :, 2:], 4.0)) * stride
        return F.concat([middle - extent * 0.5, middle + extent * 0.5], 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [18, 20], ids=["padded", "not padded"])
def test_a_detector_that_pads_its_images_is_exported_whole(size: int, tmp_path: Path) -> None:
    x = images(2, 3, size, size)
    path = _verify(net(lambda self, i: self.detector(i), detector=Detector()), "onnxruntime", tmp_path, x)
    (batch, *_), *_ = (o.type.tensor_type.shape.dim for o in onnx.load(path).graph.output)
    assert batch.dim_param == "N"


# -- parts that nothing reads --------------------------------------------------------------------------


def _two_of_four(self: Any, x: mge.Tensor) -> mge.Tensor:
    first, _, third, _ = F.split(x, 4, axis=1)
    return F.relu(first + third)


def _shape_of_a_part(self: Any, x: mge.Tensor) -> mge.Tensor:
    first, second = F.split(x, 2, axis=1)
    return F.reshape(first, (second.shape[0], -1))


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", SUFFIXES)
@pytest.mark.parametrize("forward", [_two_of_four, _shape_of_a_part])
def test_a_split_with_an_unused_part(forward: Forward, backend: str, tmp_path: Path) -> None:
    _verify(_net(forward), backend, tmp_path)


def test_an_unused_part_is_no_output_of_an_ncnn_net(tmp_path: Path) -> None:
    import ncnn

    path = qtrace.export(_converted(_net(_two_of_four), "ncnn"), tmp_path / "m.param")
    loaded = ncnn.Net()
    assert loaded.load_param(str(path)) == 0
    assert list(loaded.output_names()) == ["relu_out_1"]


def test_an_unused_part_is_no_output_of_a_caffe_net(tmp_path: Path) -> None:
    path = qtrace.export(_converted(_net(_two_of_four), "tensorrt"), tmp_path / "m.prototxt")
    text = path.read_text()
    silence = text[text.index('type: "Silence"') :]
    assert 'bottom: "split_out_1"' in silence
    assert 'bottom: "split_out_3"' in silence
