"""ncnn nets: every op in ncnn beside the graph, integer by integer; what is fused; refusals."""

from __future__ import annotations

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
from qtrace.errors import ExportError
from qtrace.graph import functions
from qtrace.graph.types import TracedModule
from tests.nets import MobileNetV2, ResNet, images, net, randomize, side_by_side, spread, without_sites

RECIPE = "backend/ncnn"


def _converted(module: M.Module, *batches: Any, config: Any = RECIPE) -> TracedModule:
    example = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    prepared = qtrace.prepare(qtrace.trace(module, *example, check=False), _with_groups(config))
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


def _with_groups(config: Any) -> Any:
    """Returns a config for ncnn by which grouped convolutions are rounded, too."""
    config = qtrace.load_recipe(config) if isinstance(config, str) else config
    if config.backend != "ncnn":
        return config
    rule = {"match": {"op": "conv2d"}, "quantize": True, "optional": True}
    data = config.to_dict()
    return {**data, "rules": [*data.get("rules", ()), rule]}


def test_grouped_convolutions_stay_in_float_unless_a_rule_asks_for_them(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(4, 4), b=_conv(4, 4, groups=4))
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), RECIPE)
    notes = {note.name: note for note in qtrace.explain(prepared).annotation.notes}
    assert (notes["a_out"].state, notes["b_out"].state) == ("int", "float")
    assert "grouped convolutions faster in float" in notes["b_out"].reason
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.param")
    assert qtrace.verify(path, converted, [x]).passed


def _lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()[2:]]


def _kinds(path: Path) -> list[str]:
    return [line[0] for line in _lines(path)]


def _vgg() -> M.Module:
    layers: list[M.Module] = []
    for inside, outside in ((3, 8), (8, 16), (16, 16)):
        layers += [M.Conv2d(inside, outside, 3, 1, 1), M.ReLU(), M.MaxPool2d(2)]
    parts = {"features": M.Sequential(*layers), "a": M.Linear(256, 32), "b": M.Linear(32, 10)}
    return net(lambda self, x: self.b(F.relu(self.a(F.flatten(self.features(x), 1)))), **parts)


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [RECIPE, QConfig(backend="ncnn")], ids=["recipe", "results rounded"])
@pytest.mark.parametrize(
    "model",
    [ResNet(8, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1)), _vgg()],
    ids=["resnet", "mobilenet", "vgg"],
)
def test_networks_in_ncnn(model: M.Module, config: Any, tmp_path: Path) -> None:
    batches = [images(2, 3, 32, 32, seed=s) for s in range(3)]
    converted = _converted(randomize(model), *batches[:2], config=config)
    path = qtrace.export(converted, tmp_path / "m.param")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.param"]
    # As deployed, ncnn's depthwise kernels scale with an error of 1e-4; every op alone is exact.
    report = qtrace.verify(path, converted, batches[2:], min_sqnr_db=20)
    assert report.passed, report.table()
    assert report.worst_lsb() <= 1
    assert report.sqnr_db() > 35
    assert len(report.sites["op_by_op"]) >= 5


def _conv(inside: int = 4, outside: int = 6, **options: Any) -> M.Conv2d:
    return M.Conv2d(inside, outside, 3, padding=1, **options)


def _after(function: Callable[..., Any]) -> M.Module:
    """A layer of 8 bits, then ``function``."""
    return net(lambda self, x: function(self.conv(x)), conv=_conv())


def _excited(self: M.Module, x: Any) -> Any:
    y = self.conv(x)
    return y * F.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))


def _branches(self: M.Module, x: Any) -> Any:
    y = F.relu(self.a(x))
    return self.b(y) + self.c(y) + y


GAIN = np.array([1.0, -2.0, 0.5, 3.0, 1.0, 2.0], np.float32)

OPS: dict[str, M.Module] = {
    "conv": _after(lambda y: y),
    "conv_nobias": net(lambda self, x: self.c(x), c=_conv(bias=False)),
    "conv_rectangular": net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, (3, 5), (2, 1), (1, 2))),
    "conv_dilated": net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, 3, padding=2, dilation=2)),
    "conv_grouped": net(lambda self, x: self.c(x), c=M.Conv2d(4, 8, 3, groups=2)),
    "conv_grouped_wide": net(lambda self, x: self.b(self.a(x)), a=_conv(4, 16), b=_conv(16, 32, groups=2)),
    "conv_depthwise": net(lambda self, x: self.c(x), c=_conv(4, 4, groups=4)),
    "conv_depthwise_multiplied": net(lambda self, x: self.c(x), c=_conv(4, 8, groups=4)),
    "conv_reflect": net(lambda self, x: self.c(x), c=_conv(padding_mode="reflect")),
    "conv_transpose": net(
        lambda self, x: self.c(self.t(x)), t=M.ConvTranspose2d(4, 4, 4, 2, 1, groups=2), c=_conv()
    ),
    "conv_transpose_output_padding": net(
        lambda self, x: self.c(self.t(x)), t=M.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1), c=_conv()
    ),
    "linear": net(lambda self, x: self.fc(F.flatten(x, 1)), fc=M.Linear(256, 7)),
    "linear_matrix": net(lambda self, x: self.fc(F.flatten(x, 1, 2)), fc=M.Linear(8, 5)),
    "batch_norm": net(lambda self, x: self.c(F.relu(self.bn(x))), c=_conv(), bn=M.BatchNorm2d(4)),
    "relu": _after(F.relu),
    "relu6": _after(lambda y: F.relu6(y * 4.0)),
    "clip": _after(lambda y: F.clip(y, -0.5, 0.75)),
    "clip_below": _after(lambda y: F.clip(y, lower=0.25)),
    "leaky_relu": _after(lambda y: F.leaky_relu(y, 0.1)),
    "prelu": net(lambda self, x: self.act(self.conv(x)), conv=_conv(), act=M.PReLU(6)),
    "sigmoid": _after(F.sigmoid),
    "tanh": _after(F.tanh),
    "silu": _after(F.silu),
    "hswish": _after(F.hswish),
    "hard_sigmoid": _after(functions.hard_sigmoid),
    "mish": _after(functions.mish),
    "gelu_tanh": _after(functions.gelu_tanh),
    "hsigmoid": _after(F.hsigmoid),
    "exp_abs_neg": _after(lambda y: F.exp(-F.abs(y))),
    "numbers": _after(lambda y: 2.0 - (y * 0.4 + 1.5) / 3.0),
    "halved": _after(lambda y: F.max_pool2d(y * 0.5, 2)),
    "sub_max_div": net(
        lambda self, x: F.maximum(self.a(x) - self.b(x), self.a(x)) / 2.0, a=_conv(), b=_conv()
    ),
    "gain": net(
        lambda self, x: self.conv(x) * self.gain,
        conv=_conv(),
        gain=mge.Parameter(GAIN.reshape(1, 6, 1, 1)),
    ),
    "excitation": net(_excited, conv=_conv(4, 4), squeeze=M.Conv2d(4, 4, 1)),
    "branches": net(_branches, a=_conv(4, 4), b=_conv(4, 4), c=_conv(4, 4)),
    "max_pool": _after(lambda y: F.max_pool2d(y, 3, 2, 1)),
    "avg_pool": _after(lambda y: F.avg_pool2d(y, 3, 2, 1)),
    "avg_pool_include": _after(lambda y: F.avg_pool2d(y, 3, 2, 1, mode="average")),
    "adaptive_avg": _after(lambda y: F.adaptive_avg_pool2d(y, (2, 4))),
    "adaptive_max": _after(lambda y: F.adaptive_max_pool2d(y, 1)),
    "mean": _after(lambda y: F.mean(y, (2, 3))),
    "mean_kept": _after(lambda y: F.mean(y, 1, keepdims=True)),
    "nearest": _after(lambda y: F.vision.interpolate(y, scale_factor=2, mode="nearest")),
    "bilinear": _after(lambda y: F.vision.interpolate(y, (16, 16), mode="bilinear")),
    "bicubic": _after(lambda y: F.vision.interpolate(y, (16, 16), mode="bicubic")),
    "bilinear_corners": _after(
        lambda y: F.vision.interpolate(y, (15, 15), mode="bilinear", align_corners=True)
    ),
    "concat_split": _after(lambda y: F.concat(F.split(y, [1, 3], axis=1)[::-1], 1)),
    "flatten": _after(lambda y: F.flatten(y, 1)),
    "reshape": _after(lambda y: y.reshape(y.shape[0], 12, 4, 8)),
    "transpose": _after(lambda y: F.transpose(y, (0, 2, 3, 1))),
    "pad": _after(lambda y: F.nn.pad(y, ((0, 0), (0, 0), (1, 2), (0, 1)))),
    "softmax": _after(lambda y: F.softmax(F.flatten(y, 1))),
    "pixel_shuffle": net(lambda self, x: F.pixel_shuffle(self.c(x), 2), c=_conv(4, 8)),
    "dropout": net(lambda self, x: self.d(self.conv(x)), conv=_conv(), d=M.Dropout(0.5)),
}


@pytest.mark.parametrize("names", spread(OPS, 6), ids=lambda names: names[0])
def test_ops_run_in_ncnn_as_in_the_graph(names: list[str], tmp_path: Path) -> None:
    batches = [tuple(images(3, 4, 8, 8, seed=s) for _ in names) for s in range(2)]
    converted = _converted(side_by_side({name: OPS[name] for name in names}), *batches)
    path = qtrace.export(converted, tmp_path / "m.param")
    # Another batch size: a net computes one sample.
    last = tuple(images(5, 4, 8, 8, seed=9) for _ in names)
    report = qtrace.verify(path, converted, [batches[0], last], min_sqnr_db=35)
    assert report.passed, report.table()
    assert not without_sites(names, report.sites["op_by_op"])


# Ops that read what a rounding before them stands for, or move it.
_PAIRS = ("branches", "excitation", "gain", "max_pool", "avg_pool", "concat_split", "pixel_shuffle")


@pytest.mark.parametrize("name", ["conv_grouped_wide", "halved", "relu6", "hswish", *_PAIRS])
def test_op_between_roundings(name: str, tmp_path: Path) -> None:
    """Results are rounded, too: what an op gives is compared as integers."""
    module, x = OPS[name], images(3, 4, 8, 8)
    converted = _converted(module, x, config=QConfig(backend="ncnn"))
    path = qtrace.export(converted, tmp_path / "m.param")
    report = qtrace.verify(path, converted, [x, images(2, 4, 8, 8, seed=3)], min_sqnr_db=25)
    assert report.passed, report.table()


def test_activations_and_roundings_are_fused(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(
        lambda self, x: self.c(F.relu6(self.b(F.relu(self.a(x))))),
        a=_conv(4, 4),
        b=_conv(4, 4, groups=4),
        c=_conv(4, 4),
    )
    path = qtrace.export(_converted(module, x), tmp_path / "m.param")
    assert _kinds(path) == ["Input", "Quantize", "Convolution", "ConvolutionDepthWise", "Convolution"]
    first, second, third = (set(line) for line in _lines(path)[2:])
    assert {"8=102", "9=1", "relu_out_int"} <= first
    assert {"8=101", "9=3", "7=4"} <= second
    assert {"8=2", "c_out"} <= third


def test_a_result_that_others_read_in_float_is_not_fused(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: (lambda y: self.b(y) + y)(self.a(x)), a=_conv(4, 4), b=_conv(4, 4))
    converted = _converted(module, x)
    path = qtrace.export(converted, tmp_path / "m.param")
    assert not any("8=102" in line for line in _lines(path))
    assert "Cast" not in _kinds(path)
    assert "Split" in _kinds(path)


def test_four_bit_weights_are_stored_as_int8(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.c(x), c=_conv())
    config = QConfig(backend="generic", activation=NCNN, weight={**NCNN, "bits": 4})
    converted = _converted(module, x, config=config)
    path = qtrace.export(converted, tmp_path / "m.param")
    assert qtrace.verify(path, converted, [x]).passed


NCNN = {"signed": True, "symmetric": True, "narrow": True, "rounding": "half_away"}


def test_several_inputs_and_outputs_have_their_names_and_order(tmp_path: Path) -> None:
    a, b = images(2, 4, 8, 8), images(2, 4, 8, 8, seed=1)

    def forward(self: M.Module, first: Any, second: Any) -> Any:
        y = F.relu(self.c(second))
        return {"z": y, "a": self.c(first), "m": F.flatten(self.d(y), 1)}

    module = net(forward, c=_conv(4, 4), d=_conv(4, 4))
    prepared = qtrace.prepare(qtrace.trace(module, a, b, check=False), RECIPE)
    converted = qtrace.convert(qtrace.calibrate(prepared, [(a, b)], progress=False))
    path = qtrace.export(converted, tmp_path / "m.param")
    lines = _lines(path)
    assert [line[1] for line in lines if line[0] == "Input"] == ["qtrace/first", "qtrace/second"]
    assert [line[-1] for line in lines[-3:]] == [n.name.removesuffix("_q") for n in converted.graph.outputs]
    report = qtrace.verify(path, converted, [(a, b)])
    assert report.passed, report.table()


REFUSED: dict[str, tuple[M.Module, Any, str]] = {
    "another backend": (
        _after(F.relu),
        QConfig(),
        r"x_q: site x is uint8 affine, .*signed and symmetric.*: prepare .* with the recipe backend/ncnn",
    ),
    "the full range": (
        _after(F.relu),
        QConfig(backend="megengine"),
        r"site x is int8 sym half-away, .*begin at -127",
    ),
    "rounding": (
        _after(F.relu),
        QConfig(backend="generic", activation={**NCNN, "rounding": "half_even"}),
        r"site x is int8 sym narrow, .*half away from zero",
    ),
    "4 bits": (
        _after(F.relu),
        QConfig(backend="generic", activation={**NCNN, "bits": 4}),
        r"site x is int4 .*8 bits",
    ),
    "no form": (
        _after(lambda y: F.cumsum(y, 1)),
        RECIPE,
        r"cumsum_out: it cannot become ncnn.*\(in F\.cumsum, .*\.py:\d+\)",
    ),
    "an output of integers": (
        _after(lambda y: F.argmax(y, axis=1)),
        RECIPE,
        r"argmax_out is int32, where ncnn computes in floats: end the graph before it",
    ),
    "the batch": (
        _after(lambda y: F.relu(y.reshape(2, -1))),
        RECIPE,
        r"reshape_out: it mixes samples of the batch",
    ),
    "a mean of all": (_after(lambda y: y + F.mean(y)), RECIPE, r"mean_out: it reduces the batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_node_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    module, config, problem = REFUSED[case]
    with pytest.raises(ExportError, match=problem):
        qtrace.export(_converted(module, images(2, 4, 8, 8), config=config), tmp_path / "m.param")
    assert list(tmp_path.iterdir()) == []


def test_the_net_may_not_have_the_name_of_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"m\.bin is the name of the weights"):
        qtrace.export(_converted(_after(F.relu), images(2, 4, 8, 8)), tmp_path / "m.bin", format="ncnn")


@pytest.mark.parametrize(
    "outputs",
    [
        lambda self, x: (x, self.conv(x), x),
        lambda self, x: (x, x, x, self.conv(x)),
    ],
)
def test_a_tensor_that_is_several_outputs_has_a_blob_for_each(outputs: Any, tmp_path: Path) -> None:
    x = images(1, 3, 6, 6, seed=2)
    converted = _converted(randomize(net(outputs, conv=M.Conv2d(3, 4, 1)), 0), x)
    file = tmp_path / "net.param"
    qtrace.export(converted, file)
    assert qtrace.verify(file, converted, [x], min_equal=0.98).passed
