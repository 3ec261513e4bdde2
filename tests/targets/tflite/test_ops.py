"""Every op that has a TFLite form: exported, run in LiteRT, and compared integer by integer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace import QConfig
from qtrace.graph import functions
from qtrace.graph.types import TracedModule
from qtrace.targets.tflite.backend import BACKEND
from tests.nets import images, net, side_by_side, spread, without_sites
from tests.targets.tflite.files import facts, kinds, kinds_by_input

IMAGE = (4, 8, 8)


def _conv(inside: int = 4, outside: int = 6, **options: object) -> M.Conv2d:
    return M.Conv2d(inside, outside, 3, padding=1, **options)


def _single_layer(layer: M.Module) -> M.Module:
    return net(lambda self, x: self.layer(x), layer=layer)


def _after(function: Callable[..., object]) -> M.Module:
    """A conv, then ``function``: its input is a site with negative values."""
    return net(lambda self, x: function(self.conv(x)), conv=_conv())


def _between(function: Callable[..., object]) -> M.Module:
    """A conv before and one behind: ``function`` stands between integers."""
    return net(lambda self, x: self.last(function(self.conv(x))), conv=_conv(), last=M.Conv2d(6, 4, 1))


def _two(function: Callable[..., object]) -> M.Module:
    return net(lambda self, x: function(self.a(x), self.b(x)), a=_conv(), b=_conv())


def _shuffle(y: mge.Tensor) -> mge.Tensor:
    n, c, h, w = y.shape
    return y.reshape(n, 2, c // 2, h, w).transpose(0, 2, 1, 3, 4).reshape(n, c, h, w)


def _halves(y: mge.Tensor) -> list[mge.Tensor]:
    """Even and odd channels, as ShuffleNetV2 takes them apart."""
    n, c, h, w = y.shape
    y = y.reshape(n * c // 2, 2, h * w).transpose(1, 0, 2).reshape(2, -1, c // 2, h, w)
    return [y[0], y[1]]


def _setitem(y: mge.Tensor) -> mge.Tensor:
    y = y * 1.0
    y[:, :, 2:4] = y[:, :, 2:4] * 0.5
    y[:, 5:] = 0.25
    return y


def _parts(y: mge.Tensor) -> mge.Tensor:
    first, middle, last = F.split(y, [1, 4], axis=1)
    return F.concat([last, middle, first], 1)


# name -> the net, and the operators of the file beside QUANTIZE and DEQUANTIZE at its ends.
CASES: dict[str, tuple[M.Module, str]] = {
    "conv1d": (net(lambda self, x: self.a(F.flatten(x, 2)), a=M.Conv1d(4, 6, 3)), None),
    "conv2d": (_single_layer(_conv()), "CONV_2D"),
    "conv2d_nobias": (_single_layer(_conv(bias=False)), "CONV_2D"),
    "conv2d_valid": (_single_layer(M.Conv2d(4, 6, 3)), "CONV_2D"),
    "conv2d_stride": (_single_layer(M.Conv2d(4, 6, 3, 2, 1)), "PAD CONV_2D"),
    "conv2d_dilation": (_single_layer(M.Conv2d(4, 6, 3, 1, 2, dilation=2)), "CONV_2D"),
    "conv2d_wide": (_single_layer(M.Conv2d(4, 6, (3, 1), (2, 1), (2, 0))), "PAD CONV_2D"),
    "conv2d_reflect": (_single_layer(_conv(padding_mode="reflect")), "MIRROR_PAD CONV_2D"),
    "conv2d_grouped": (_single_layer(_conv(4, 8, groups=2)), "CONV_2D"),
    "conv2d_depthwise": (_single_layer(_conv(4, 4, groups=4)), "DEPTHWISE_CONV_2D"),
    "conv2d_depthwise_twice": (_single_layer(_conv(4, 8, groups=4)), "DEPTHWISE_CONV_2D"),
    "conv_transpose2d": (_single_layer(M.ConvTranspose2d(4, 6, 4, 2, 1)), "TRANSPOSE_CONV"),
    "conv_transpose2d_valid": (_single_layer(M.ConvTranspose2d(4, 6, 2, 2)), "TRANSPOSE_CONV"),
    "conv_transpose2d_cut": (
        _single_layer(M.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1)),
        "TRANSPOSE_CONV STRIDED_SLICE",
    ),
    "conv_transpose2d_more": (
        _single_layer(M.ConvTranspose2d(4, 6, 2, 2, 0, output_padding=1)),
        "TRANSPOSE_CONV STRIDED_SLICE",
    ),
    "conv_transpose2d_grouped": (_single_layer(M.ConvTranspose2d(4, 4, 4, 2, 1, groups=2)), "TRANSPOSE_CONV"),
    "conv_transpose2d_dilated": (
        _single_layer(M.ConvTranspose2d(4, 6, 2, 2, 0, dilation=2)),
        "TRANSPOSE_CONV",
    ),
    "conv_transpose2d_relu": (
        net(lambda self, x: F.relu(self.conv(x)), conv=M.ConvTranspose2d(4, 6, 4, 2, 1)),
        "TRANSPOSE_CONV",
    ),
    "linear": (
        net(lambda self, x: self.fc(F.flatten(self.c(x), 1)), c=_conv(), fc=M.Linear(384, 7)),
        "CONV_2D RESHAPE FULLY_CONNECTED",
    ),
    "linear_dropped": (
        net(
            lambda self, x: self.fc(self.drop(F.flatten(self.c(x), 1))),
            c=_conv(),
            drop=M.Dropout(0.5),
            fc=M.Linear(384, 7),
        ),
        "CONV_2D RESHAPE FULLY_CONNECTED",
    ),
    "linear_nd": (_single_layer(M.Linear(8, 5)), "FULLY_CONNECTED"),
    "linear_nobias": (_single_layer(M.Linear(8, 5, bias=False)), "FULLY_CONNECTED"),
    "linear_relu": (net(lambda self, x: F.relu(self.fc(x)), fc=M.Linear(8, 5)), "FULLY_CONNECTED"),
    "linear_tokens": (
        net(
            lambda self, x: self.fc(F.flatten(self.c(x), 2).transpose(0, 2, 1)), c=_conv(), fc=M.Linear(6, 5)
        ),
        "CONV_2D RESHAPE FULLY_CONNECTED",
    ),
    "matmul": (_two(F.matmul), None),
    "matmul_transposed": (_two(lambda a, b: F.matmul(a, b, transpose_b=True)), None),
    "add": (_two(lambda a, b: a + b), "CONV_2D CONV_2D ADD"),
    "add_relu": (_two(lambda a, b: F.relu(a + b)), "CONV_2D CONV_2D ADD"),
    "add_scalar": (_after(lambda y: 1.5 + y), "CONV_2D ADD"),
    "add_parameter": (
        net(
            lambda self, x: self.conv(x) + self.table,
            conv=_conv(),
            table=mge.Parameter(images(1, 6, 8, 1)[0]),  # one number for each row: no part of the layer
        ),
        "CONV_2D ADD",
    ),
    "sub": (_two(lambda a, b: a - b), "CONV_2D CONV_2D SUB"),
    "sub_reversed": (_after(lambda y: 1.0 - y), "CONV_2D SUB"),
    "mul": (_two(lambda a, b: a * b), "CONV_2D CONV_2D MUL"),
    "mul_scalar": (_after(lambda y: y * -0.7), "CONV_2D MUL"),
    "mul_map": (_two(lambda a, b: a * F.mean(b, (2, 3), keepdims=True)), "CONV_2D CONV_2D MEAN MUL"),
    "div_scalar": (_between(lambda y: y / 3.0), "CONV_2D MUL CONV_2D"),
    "neg": (_between(lambda y: -y), "CONV_2D MUL CONV_2D"),
    "relu": (_after(F.relu), "CONV_2D"),
    "relu6": (_after(lambda y: F.relu6(y * 4.0)), "CONV_2D MUL"),
    "clip": (_after(lambda y: F.clip(y, -0.5, 0.75)), "CONV_2D"),
    "relu_alone": (net(lambda self, x: F.relu(x)), "ADD"),
    "relu_branch": (net(lambda self, x: (lambda y: F.relu(y) + y)(self.conv(x)), conv=_conv()), None),
    "sigmoid": (_between(F.sigmoid), "CONV_2D DEQUANTIZE LOGISTIC QUANTIZE CONV_2D"),
    "tanh": (_between(F.tanh), "CONV_2D DEQUANTIZE TANH QUANTIZE CONV_2D"),
    "hswish": (_between(F.hswish), "CONV_2D DEQUANTIZE HARD_SWISH QUANTIZE CONV_2D"),
    "hsigmoid": (_between(F.hsigmoid), "CONV_2D DEQUANTIZE ADD RELU6 MUL QUANTIZE CONV_2D"),
    "hard_sigmoid": (
        _between(lambda y: functions.hard_sigmoid(y)),
        "CONV_2D DEQUANTIZE MUL ADD MAXIMUM MINIMUM QUANTIZE CONV_2D",
    ),
    "mish": (_between(lambda y: functions.mish(y)), None),
    "gelu_tanh": (
        _between(lambda y: functions.gelu_tanh(y)),
        "CONV_2D DEQUANTIZE GELU QUANTIZE CONV_2D",
    ),
    "normalize": (_between(lambda y: F.normalize(y, 2, 1)), None),
    "normalize_rows": (_between(lambda y: F.normalize(y, axis=3, eps=1e-6)), None),
    "rms_norm": (_between(lambda y: functions.rms_norm(y, None, 1)), None),
    "rms_norm_weight": (
        net(
            lambda self, x: self.b(functions.rms_norm(self.a(x), self.weight)),
            a=_conv(),
            b=_conv(6, 4),
            weight=mge.Parameter(images(1, 1, 1, 8)[0, 0, 0]),
        ),
        None,
    ),
    "silu": (_between(F.silu), "CONV_2D DEQUANTIZE LOGISTIC QUANTIZE MUL CONV_2D"),
    "leaky_relu": (
        _between(lambda y: F.leaky_relu(y, 0.1)),
        "CONV_2D DEQUANTIZE LEAKY_RELU QUANTIZE CONV_2D",
    ),
    "prelu": (
        net(lambda self, x: self.last(self.p(self.c(x))), c=_conv(), p=M.PReLU(6), last=M.Conv2d(6, 4, 1)),
        "CONV_2D DEQUANTIZE PRELU QUANTIZE CONV_2D",
    ),
    "gelu": (_between(F.gelu), None),
    "softplus": (_between(F.softplus), None),
    "logsigmoid": (_between(F.logsigmoid), None),
    "max_pool2d": (_after(lambda y: F.max_pool2d(y, 3, 2, 1)), "CONV_2D PADV2 MAX_POOL_2D"),
    "max_pool2d_relu": (_after(lambda y: F.max_pool2d(F.relu(y), 3, 2, 1)), "CONV_2D PAD MAX_POOL_2D"),
    "max_pool2d_even": (_after(lambda y: F.max_pool2d(y, 2)), "CONV_2D MAX_POOL_2D"),
    "max_pool2d_same": (_after(lambda y: F.max_pool2d(y, 5, 1, 2)), "CONV_2D MAX_POOL_2D"),
    "avg_pool2d": (_between(lambda y: F.avg_pool2d(y, 2)), "CONV_2D DEPTHWISE_CONV_2D CONV_2D"),
    "avg_pool2d_whole": (_between(lambda y: F.avg_pool2d(y, 8)), "CONV_2D MEAN CONV_2D"),
    "avg_pool2d_border": (
        _between(lambda y: F.avg_pool2d(y, 3, 2, 1)),
        "CONV_2D AVERAGE_POOL_2D STRIDED_SLICE CONV_2D",
    ),
    "avg_pool2d_include": (
        _between(lambda y: F.avg_pool2d(y, 3, 2, 1, mode="average")),
        "CONV_2D PAD DEPTHWISE_CONV_2D CONV_2D",
    ),
    "avg_pool2d_same": (_between(lambda y: F.avg_pool2d(y, 3, 1, 1)), "CONV_2D AVERAGE_POOL_2D CONV_2D"),
    # Windows of even size with padding: no integer kernel leaves the padding out of their means.
    "avg_pool2d_even": (
        _between(lambda y: F.avg_pool2d(y, 2, 2, 1)),
        "CONV_2D DEQUANTIZE PAD AVERAGE_POOL_2D MUL QUANTIZE CONV_2D",
    ),
    "adaptive_avg_pool2d": (_after(lambda y: F.adaptive_avg_pool2d(y, 1)), "CONV_2D MEAN"),
    "adaptive_avg_pool2d_windows": (
        _after(lambda y: F.adaptive_avg_pool2d(y, (2, 4))),
        "CONV_2D DEPTHWISE_CONV_2D",
    ),
    "adaptive_avg_pool2d_overlapping": (
        _after(lambda y: F.adaptive_avg_pool2d(y, (3, 5))),
        "CONV_2D DEPTHWISE_CONV_2D",
    ),
    "adaptive_max": (_after(lambda y: F.adaptive_max_pool2d(y, 3)), "CONV_2D MAX_POOL_2D"),
    "mean": (_after(lambda y: F.mean(y, (2, 3))), "CONV_2D MEAN"),
    "mean_channels": (_after(lambda y: F.mean(y, 1, keepdims=True)), "CONV_2D MEAN"),
    "sum": (_after(lambda y: F.sum(y, 2)), None),
    "max": (_after(lambda y: F.max(y, 1)), "CONV_2D REDUCE_MAX"),
    "reshape": (_after(lambda y: y.reshape(-1, 12, 4, 8)), None),
    "reshape_tokens": (_after(lambda y: y.reshape(y.shape[0], y.shape[1], -1)), None),
    "channel_shuffle": (_between(_shuffle), "CONV_2D RESHAPE TRANSPOSE RESHAPE CONV_2D"),
    "pixel_shuffle": (
        net(
            lambda self, x: self.last(F.pixel_shuffle(self.conv(x), 2)),
            conv=_conv(4, 8),
            last=M.Conv2d(2, 4, 1),
        ),
        "CONV_2D RESHAPE TRANSPOSE RESHAPE CONV_2D",
    ),
    "transpose": (_after(lambda y: F.transpose(y, (0, 2, 3, 1))), "CONV_2D"),
    "transpose_back": (_between(lambda y: F.transpose(y, (0, 1, 3, 2))), "CONV_2D TRANSPOSE CONV_2D"),
    "expand_squeeze": (_between(lambda y: F.squeeze(F.expand_dims(y, 1), 1)), "CONV_2D CONV_2D"),
    "concat": (_two(lambda a, b: F.concat([a, b], 1)), "CONV_2D CONV_2D CONCATENATION"),
    "concat_rows": (_two(lambda a, b: F.concat([a, b], -1)), "CONV_2D CONV_2D CONCATENATION"),
    "stack": (_two(lambda a, b: F.stack([a, b], 1)), None),
    "split": (_after(lambda y: F.split(y, 2, axis=1)[0] + F.split(y, 2, axis=1)[1]), None),
    "split_sections": (_between(_parts), None),
    "getitem": (_after(lambda y: y[:, 1:4, ::2, -1]), None),
    "getitem_list": (_after(lambda y: y[:, [3, 0, 5]]), "CONV_2D GATHER"),
    "getitem_first": (_after(lambda y: y[1] + y[0]), None),
    "halves": (
        net(
            lambda self, x: F.concat([self.last(h) for h in _halves(self.conv(x))], 1),
            conv=_conv(),
            last=M.Conv2d(3, 4, 1),
        ),
        "CONV_2D RESHAPE STRIDED_SLICE RESHAPE STRIDED_SLICE RESHAPE CONV_2D CONV_2D CONCATENATION",
    ),
    "focus": (_after(lambda y: F.concat([y[:, :, ::2, ::2], y[..., 1::2, 1::2]], 1)), None),
    "nearest": (
        _after(lambda y: F.vision.interpolate(y, scale_factor=2, mode="nearest")),
        "CONV_2D RESIZE_NEAREST_NEIGHBOR",
    ),
    "nearest_uneven": (_after(lambda y: F.vision.interpolate(y, (5, 13), mode="nearest")), None),
    "interpolate": (
        _between(lambda y: F.vision.interpolate(y, (16, 16), mode="bilinear")),
        "CONV_2D RESIZE_BILINEAR CONV_2D",
    ),
    "interpolate_corners": (
        _between(lambda y: F.vision.interpolate(y, (15, 15), mode="bilinear", align_corners=True)),
        "CONV_2D RESIZE_BILINEAR CONV_2D",
    ),
    "pad": (_between(lambda y: F.nn.pad(y, ((0, 0), (0, 0), (1, 2), (0, 1)))), "CONV_2D PAD CONV_2D"),
    "repeat": (_after(lambda y: F.repeat(y, 2, axis=2)), None),
    "tile": (_after(lambda y: F.tile(y, (1, 1, 2, 1))), None),
    "roll": (_after(lambda y: F.roll(y, 3, 1)), None),
    "broadcast_to": (_after(lambda y: F.broadcast_to(y[:, :1], (y.shape[0], 5, 8, 8))), None),
    "setitem": (_after(_setitem), None),
    "where": (_after(lambda y: F.where(y > 0.25, y, y * 0.5)), None),
    "astype": (_after(lambda y: y * (y > 0.0).astype("float32")), None),
    "bn_alone": (net(lambda self, x: self.c(F.relu(self.bn(x))), bn=M.BatchNorm2d(4), c=_conv()), None),
    "softmax": (_after(lambda y: F.softmax(y, 1)), None),
    "layer_norm": (
        net(
            lambda self, x: self.fc(self.norm(F.flatten(self.c(x), 2).transpose(0, 2, 1))),
            c=_conv(),
            norm=M.LayerNorm(6),
            fc=M.Linear(6, 5),
        ),
        None,
    ),
    "group_norm": (
        net(
            lambda self, x: self.last(self.norm(self.c(x))), c=_conv(), norm=M.GroupNorm(2, 6), last=_conv(6)
        ),
        None,
    ),
    "argmax": (_after(lambda y: F.argmax(y, 1)), None),
    "two_outputs": (
        net(lambda self, x: {"a": self.a(x), "b": F.relu(self.b(x))}, a=_conv(), b=_conv()),
        None,
    ),
}


def _kind(name: str) -> str:
    """The kind of op that a case is named after, if the target computes it on integers."""
    return max((k for k in BACKEND.ops if name == k or name.startswith(f"{k}_")), key=len, default="")


def test_every_kind_that_the_target_computes_on_integers_has_a_case() -> None:
    assert {_kind(name) for name in CASES if _kind(name)} == BACKEND.ops


def converted(module: M.Module, batches: list[Any], **config: object) -> TracedModule:
    """The whole road to a converted module for LiteRT."""
    example = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    traced = qtrace.trace(module, *example, check=False)
    prepared = qtrace.prepare(traced, QConfig(**{"backend": "tflite", **config}))
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


def _fixes_its_batch(name: str) -> bool:
    return name.startswith("conv_transpose2d") or name in ("setitem", "broadcast_to")


_FREE, _FIXED = ([name for name in CASES if _fixes_its_batch(name) is fixed] for fixed in (False, True))


@pytest.mark.parametrize("names", [*spread(_FREE, 8), _FIXED], ids=lambda names: names[0])
def test_ops_run_in_litert_as_in_the_graph(names: list[str], tmp_path: Path) -> None:
    module = side_by_side({name: CASES[name][0] for name in names})
    batches = [tuple(images(3, *IMAGE, seed=s) for _ in names) for s in range(2)]
    model = converted(module, batches)
    notes = qtrace.explain(model).annotation.notes
    for name in names:
        if (kind := _kind(name)) and kind not in BACKEND.pieces:
            states = {n.state for n in notes if n.kind == kind and n.name.startswith(f"{name}_")}
            assert states & {"int", "fused"}, name
    path = qtrace.export(model, tmp_path / "m.tflite")
    # Another batch size than the trace had, where no operator fixes it.
    free = facts(path)["free_batch"]
    assert free or names is _FIXED
    last = tuple(images(5 if free else 3, *IMAGE, seed=9) for _ in names)
    report = qtrace.verify(path, model, [batches[0], last], min_sqnr_db=35.0)
    assert report.passed, report.table()
    assert not without_sites(names, report.sites["op_by_op"])
    for name, inside in zip(names, kinds_by_input(path), strict=True):
        operators = CASES[name][1]
        if operators is not None:
            own = " ".join(inside).removeprefix("QUANTIZE ").removesuffix(" DEQUANTIZE")
            assert own == operators, name


KINDS = ("sigmoid", "tanh", "hswish", "hsigmoid", "silu", "leaky_relu", "gelu")


@pytest.mark.parametrize("kind", KINDS)
def test_tables_hold_the_integers_of_the_graph(kind: str, tmp_path: Path) -> None:
    batches = [images(3, *IMAGE, seed=s) for s in range(2)]
    model = converted(_between(getattr(F, kind)), batches)
    path = qtrace.export(model, tmp_path / "m.tflite", functions="table")
    table = qtrace.verify(path, model, batches)
    assert table.passed
    assert table.equal_share() == 1.0
    inside = kinds(path)[1:-1]
    if kind != "gelu":  # the graph keeps its result in float, unless the next op asks
        product = ["MUL"] if kind in BACKEND.pieces else []
        assert inside == ["CONV_2D", "CAST", "ADD", "GATHER", *product, "CONV_2D"]
    assert not {"DEQUANTIZE", "QUANTIZE"} & set(inside)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "hswish", "leaky_relu"])
def test_native_kernels_are_two_steps_off_at_most(kind: str, tmp_path: Path) -> None:
    batches = [images(3, *IMAGE, seed=s) for s in range(2)]
    model = converted(_between(getattr(F, kind)), batches)
    path = qtrace.export(model, tmp_path / "m.tflite", functions="native")
    code = {"sigmoid": "LOGISTIC", "hswish": "HARD_SWISH"}.get(kind, kind.upper())
    assert code in kinds(path)
    assert kinds(path).count("DEQUANTIZE") == 1
    report = qtrace.verify(path, model, batches, max_lsb=2, min_equal=0.6, min_sqnr_db=25.0)
    assert report.passed, report.table()


@pytest.mark.parametrize("functions", ["table", "native"])
def test_products_of_activations_on_integers_are_one_step_off_at_most(functions: str, tmp_path: Path) -> None:
    batches = [images(3, *IMAGE, seed=s) for s in range(2)]
    model = converted(_two(F.matmul), batches)
    path = qtrace.export(model, tmp_path / "m.tflite", functions=functions)
    assert kinds(path).count("DEQUANTIZE") == 1
    report = qtrace.verify(path, model, batches, min_equal=0.995)
    assert report.passed, report.table()
