"""Caffe nets, run by OpenCV beside the float module; parameter files that speak of their blobs; refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.targets.caffe.writer import message
from tests.nets import MobileNetV2, ResNet, images, net, randomize


def _converted(module: M.Module, x: np.ndarray, config: Any = None) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def _run(path: Path, x: np.ndarray) -> np.ndarray:
    loaded = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
    loaded.setInput(x)
    return loaded.forward()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "model", [ResNet(4, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))], ids=["resnet", "mobilenet"]
)
def test_opencv_computes_what_the_module_does(model: M.Module, tmp_path: Path) -> None:
    randomize(model)
    x = images(2, 3, 64, 64)
    path = qtrace.export(_converted(model, x), tmp_path / "m.prototxt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.caffemodel", "m.prototxt"]
    np.testing.assert_allclose(_run(path, x), model(mge.Tensor(x)).numpy(), atol=1e-5)


def _conv(inside: int = 4, outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(inside, outside, 3, padding=1, **options)


def _after(function: Callable[..., Any]) -> M.Module:
    return net(lambda self, x: function(self.conv(x)), conv=_conv())


def _excited(self: M.Module, x: Any) -> Any:
    y = self.conv(x)
    return y * F.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))


OPS: dict[str, M.Module] = {
    "conv_grouped_dilated": net(
        lambda self, x: self.c(x), c=M.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2)
    ),
    "conv_transpose": net(lambda self, x: self.c(x), c=M.ConvTranspose2d(4, 6, 4, 2, 1, groups=2)),
    "linear": net(lambda self, x: self.fc(F.flatten(x, 1)), fc=M.Linear(324, 7)),
    "linear_nd": net(lambda self, x: self.fc(x), fc=M.Linear(9, 5, bias=False)),
    "batch_norm": net(lambda self, x: self.c(F.relu(self.bn(x))), c=_conv(), bn=M.BatchNorm2d(4)),
    "relu6": _after(lambda y: F.relu6(y * 4.0)),
    "clip": _after(lambda y: F.clip(y, -0.5, 0.75)),
    "leaky_relu": _after(lambda y: F.leaky_relu(y, 0.1)),
    "prelu": net(lambda self, x: self.act(self.conv(x)), conv=_conv(), act=M.PReLU(4)),
    "hswish": _after(F.hswish),
    "hsigmoid": _after(F.hsigmoid),
    "silu": _after(F.silu),
    "tanh": _after(F.tanh),
    "numbers": _after(lambda y: 2.0 - (y * 0.5 + 1.5) / 3.0),
    "sub": net(lambda self, x: self.a(x) - self.b(x), a=_conv(), b=_conv()),
    "mul": net(lambda self, x: self.a(x) * self.b(x), a=_conv(), b=_conv()),
    "maximum": net(lambda self, x: F.maximum(self.a(x), self.b(x)), a=_conv(), b=_conv()),
    "excitation": net(_excited, conv=_conv(), squeeze=M.Conv2d(4, 4, 1)),
    "gain": net(
        lambda self, x: self.conv(x) * self.gain + self.shift,
        conv=_conv(),
        gain=mge.Parameter(np.array([1.0, -2.0, 0.5, 3.0], np.float32).reshape(1, 4, 1, 1)),
        shift=mge.Parameter(np.array([1.0, 2.0, 0.5, -3.0], np.float32).reshape(4, 1, 1)),
    ),
    "max_pool_floor": _after(lambda y: F.max_pool2d(y, 2)),
    "max_pool_pad": _after(lambda y: F.max_pool2d(y, 3, 2, 1)),
    "avg_pool": _after(lambda y: F.avg_pool2d(y, 3, 3)),
    "avg_pool_pad": _after(lambda y: F.avg_pool2d(y, 3, 2, 1, mode="average")),
    "adaptive": _after(lambda y: F.adaptive_avg_pool2d(y, 3)),
    "adaptive_max": _after(lambda y: F.adaptive_max_pool2d(y, 1)),
    "mean": _after(lambda y: F.mean(y, (2, 3))),
    "nearest": _after(lambda y: F.vision.interpolate(y, scale_factor=2, mode="nearest")),
    "concat_split": _after(lambda y: F.concat(F.split(y, [1, 3], axis=1)[::-1], 1)),
    "reshape": _after(lambda y: y.reshape(y.shape[0], 2, -1)),
    "transpose": _after(lambda y: F.transpose(y, (0, 2, 3, 1))),
    "softmax": _after(lambda y: F.softmax(F.flatten(y, 1))),
    "dropout": net(lambda self, x: self.d(self.conv(x)), conv=_conv(), d=M.Dropout(0.5)),
}


@pytest.mark.parametrize("name", OPS)
def test_op(name: str, tmp_path: Path) -> None:
    module, x = OPS[name], images(2, 4, 9, 9)
    path = qtrace.export(_converted(module, x), tmp_path / "m.prototxt")
    expected = module(mge.Tensor(x)).numpy()
    outputs = _run(path, x)
    assert outputs.shape == expected.shape
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


def test_only_sizes_that_differ_say_how_they_are_rounded(tmp_path: Path) -> None:
    x = images(1, 4, 8, 8)
    even = qtrace.export(_converted(_after(lambda y: F.max_pool2d(y, 2)), x), tmp_path / "even.prototxt")
    odd = qtrace.export(_converted(_after(lambda y: F.max_pool2d(y, 3)), x), tmp_path / "odd.prototxt")
    assert "ceil_mode" not in even.read_text()
    assert "ceil_mode: false" in odd.read_text()


RECIPES = {
    "tensorrt-10": "backend/tensorrt_10",
    "aimet-0.6.1": "backend/qnn",
    "mgeconvert": "backend/megengine",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", RECIPES)
def test_names_of_parameter_files_are_blobs_and_layers(params: str, tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    converted = _converted(randomize(ResNet(4, (1, 1, 1, 1))), x, RECIPES[params])
    qtrace.export(converted, tmp_path / "m.prototxt", params=params)
    (path,) = (p for p in tmp_path.iterdir() if p.suffix not in (".prototxt", ".caffemodel"))
    if params == "tensorrt-10":
        names = {line.split(":")[0] for line in path.read_text().splitlines()[1:]}
    else:
        data = json.loads(path.read_text())
        groups = [data] if params == "mgeconvert" else [data["activation_encodings"], data["param_encodings"]]
        names = {name for group in groups for name in group}
    stored = message("NetParameter").FromString((tmp_path / "m.caffemodel").read_bytes())
    weights = {layer.name for layer in stored.layer}
    blobs = {
        line.split('"')[1] for line in (tmp_path / "m.prototxt").read_text().splitlines() if "top:" in line
    }
    parameters = {n for n in names if n.endswith((".weight", ".bias"))}
    assert {n.rpartition(".")[0] for n in parameters} == (set() if params == "tensorrt-10" else weights)
    assert names - parameters <= blobs
    assert len(names - parameters) > 10


def test_an_ncnn_table_for_a_net(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=_conv(), b=M.Conv2d(4, 4, 3, groups=4))
    rules = [
        {"match": {}, "quantize_output": False},
        {"match": {"name": "b"}, "quantize": True},
    ]  # it has groups
    config = {"backend": "ncnn", "rules": rules}
    qtrace.export(_converted(module, x, config), tmp_path / "m.prototxt", params="ncnn")
    lines = [line.split() for line in (tmp_path / "m.table").read_text().splitlines()]
    assert [(line[0], len(line)) for line in lines] == [
        ("a_out_param_0", 5),
        ("b_out_param_0", 5),
        ("a_out", 2),
        ("b_out", 2),
    ]


def test_an_ncnn_table_for_a_residual_net_with_a_pooled_stem(tmp_path: Path) -> None:
    """Its first sum reads the pooled map in float: the table says how layers round, and nothing else does."""
    x = images(1, 3, 32, 32)
    converted = _converted(randomize(ResNet(4, (1, 1))), x, "backend/ncnn")
    qtrace.export(converted, tmp_path / "m.prototxt", params="ncnn")
    layers = [n.name for n in qtrace.explain(converted).annotation.notes if n.kind in ("conv2d", "linear")]
    written = [line.split()[0] for line in (tmp_path / "m.table").read_text().splitlines()]
    assert sorted(written) == sorted([*layers, *(f"{name}_param_0" for name in layers)])


REFUSED: dict[str, tuple[M.Module, str]] = {
    "no form": (_after(lambda y: F.sin(y)), r"sin_out: F\.sin cannot become Caffe"),
    "output padding": (
        net(lambda self, x: self.c(x), c=M.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1)),
        r"c_out: .*lacks output_padding",
    ),
    "uneven windows": (_after(lambda y: F.adaptive_avg_pool2d(y, 2)), "adaptive_avg_pool2d_out: .*unequal"),
    "mean without padding": (
        _after(lambda y: F.avg_pool2d(y, 3, 2, 1)),
        "avg_pool2d_out: .*counts the padding",
    ),
    "bilinear": (_after(lambda y: F.vision.interpolate(y, (18, 18))), "interpolate_out: .*nearest"),
    "broadcast": (_after(lambda y: y + F.mean(y, 1, keepdims=True)), "mean_out: .*whole image only"),
    "shapes": (
        _after(lambda y: y + F.adaptive_avg_pool2d(y, 1)),
        r"add_out: Caffe cannot add \(2, 4, 9, 9\)",
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_node_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    module, problem = REFUSED[case]
    with pytest.raises(ExportError, match=problem):
        qtrace.export(_converted(module, images(2, 4, 9, 9)), tmp_path / "m.prototxt")
    assert list(tmp_path.iterdir()) == []


def test_the_net_may_not_have_the_name_of_the_weights(tmp_path: Path) -> None:
    converted = _converted(_after(F.relu), images(2, 4, 9, 9))
    with pytest.raises(ExportError, match=r"m\.caffemodel is the name of the weights"):
        qtrace.export(converted, tmp_path / "m.caffemodel", format="caffe")


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (lambda y: F.argmax(y, axis=1), "output 0, argmax_out, is of type int32"),
        (lambda y: (y, (y > 0).astype("uint8")), "output 1, astype_out, is of type uint8"),
        (lambda y: (y, mge.Tensor([1.0, 2.0])), "output 1, const_tensor, is a constant"),
    ],
)
def test_outputs_that_are_no_blobs_are_refused(after, word, tmp_path):
    traced = qtrace.trace(
        net(lambda self, x: after(self.c(x)), c=M.Conv2d(4, 4, 3)), images(1, 4, 8, 8), check=False
    )
    with pytest.raises(ExportError, match=word):
        qtrace.export(traced, tmp_path / "net.prototxt")
    assert not list(tmp_path.iterdir())
