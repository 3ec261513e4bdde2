"""Dumps for MegEngine's int8 kernels, run by its graph inference beside the graph; refusals."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import DataError, ExportError
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import MobileNetV2, ResNet, images, net, randomize, side_by_side, spread, without_sites

RECIPE = "backend/megengine"


def _converted(module: M.Module, *batches: Any, config: Any = RECIPE) -> TracedModule:
    example = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    prepared = qtrace.prepare(qtrace.trace(module, *example, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


def _export(converted: TracedModule, folder: Path) -> Path:
    path = qtrace.export(converted, folder / "m.mge", format="megengine")
    assert [p.name for p in folder.iterdir()] == ["m.mge"]
    return path


def _operators(path: Path) -> Counter[tuple[str, str]]:
    """Counts operators by type and result type, in the graph that MegEngine loads."""
    from megengine.core.tensor.megbrain_graph import load_graph
    from megengine.utils.comp_graph_tools import get_dep_vars

    loaded = load_graph(io.BytesIO(path.read_bytes()))
    return Counter((v.owner.type, str(np.dtype(v.dtype))) for v in get_dep_vars(loaded.output_vars_list))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "model", [ResNet(8, (1, 1, 1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))], ids=["resnet", "mobilenet"]
)
def test_networks_in_megengine(model: M.Module, tmp_path: Path) -> None:
    batches = [images(2, 3, 32, 32, seed=s) for s in range(3)]
    converted = _converted(randomize(model), *batches[:2])
    path = _export(converted, tmp_path)
    report = qtrace.verify(path, converted, batches[2:])
    assert report.passed, report.table()
    assert report.worst_lsb() == 0
    assert report.worst_lsb("deployed") == 0
    kinds = _operators(path)
    layers = sum(s.sort == "weight" for s in qtrace.explain(converted).annotation.sites)
    assert kinds["ConvBiasForward", "int8"] == layers
    assert kinds["ElemwiseMultiType", "int8"] >= 2
    assert kinds["MatrixMul", "float32"] == 0
    # The integers of weights and biases are stored, not made at run time.
    assert kinds["ImmutableTensor", "int8"] == layers


def _conv(inside: int = 4, outside: int = 6, **options: Any) -> M.Conv2d:
    return M.Conv2d(inside, outside, 3, padding=1, **options)


def _after(function: Callable[..., Any]) -> M.Module:
    return net(lambda self, x: function(self.conv(x)), conv=_conv())


def _cat(self: M.Module, x: Any) -> Any:
    return self.c(F.concat([self.a(x), F.relu(self.b(x)), x], 1))


OPS: dict[str, M.Module] = {
    "conv": _after(lambda y: y),
    "conv_nobias": net(lambda self, x: self.c(x), c=_conv(bias=False)),
    "conv_stride_dilation": net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, 3, 2, 2, dilation=2)),
    "conv_grouped": net(lambda self, x: self.c(x), c=_conv(4, 8, groups=2)),
    "conv_depthwise": net(lambda self, x: self.c(x), c=_conv(4, 4, groups=4)),
    "conv_reflect": net(lambda self, x: self.c(x), c=_conv(padding_mode="reflect")),
    "conv_transpose": net(lambda self, x: self.c(x), c=M.ConvTranspose2d(4, 6, 4, 2, 1, bias=False)),
    "conv_transpose_bias": net(lambda self, x: self.c(x), c=M.ConvTranspose2d(4, 6, 4, 2, 1)),
    "linear": net(lambda self, x: self.fc(F.flatten(x, 1)), fc=M.Linear(256, 7)),
    "linear_nd": net(lambda self, x: self.fc(x), fc=M.Linear(8, 5)),
    "relu": _after(F.relu),
    "relu_of_two": _after(lambda y: F.relu(y) + y),
    "relu6": _after(lambda y: F.relu6(y * 4.0)),
    "sigmoid": _after(F.sigmoid),
    "add": net(lambda self, x: self.a(x) + self.b(x), a=_conv(), b=_conv()),
    "add_relu": net(lambda self, x: F.relu(self.a(x) + self.b(x)), a=_conv(), b=_conv()),
    "add_number": _after(lambda y: 1.5 + y),
    "add_broadcast": _after(lambda y: y + F.adaptive_avg_pool2d(y, 1)),
    "mul": net(lambda self, x: self.a(x) * F.sigmoid(self.b(x)), a=_conv(), b=_conv()),
    "halved": _after(lambda y: F.max_pool2d(y * 0.5, 2)),
    "concat": net(_cat, a=_conv(), b=_conv(), c=_conv(16, 4)),
    "max_pool": _after(lambda y: F.max_pool2d(y, 3, 2, 1)),
    "avg_pool": _after(lambda y: F.avg_pool2d(y, 3, 2, 1)),
    "adaptive": _after(lambda y: F.adaptive_avg_pool2d(y, 1)),
    "mean": _after(lambda y: F.mean(y, (2, 3))),
    "reshape": _after(lambda y: y.reshape(y.shape[0], 12, -1)),
    "transpose": _after(lambda y: F.transpose(y, (0, 2, 3, 1))),
    "getitem": _after(lambda y: y[:, 1:4, ::2]),
    "split": _after(lambda y: F.concat(F.split(y, [1, 4], axis=1)[::-1], 1)),
    "pad": _after(lambda y: F.nn.pad(y, ((0, 0), (0, 0), (1, 2), (0, 1)))),
    "nearest": _after(lambda y: F.vision.interpolate(y, scale_factor=2, mode="nearest")),
    "bilinear": _after(lambda y: F.vision.interpolate(y, (16, 16), mode="bilinear")),
    "softmax": _after(lambda y: F.softmax(F.flatten(y, 1))),
    "identity": net(
        lambda self, x: self.d(self.same(self.c(x))), c=_conv(), d=M.Dropout(), same=M.Identity()
    ),
}


@pytest.mark.parametrize("names", spread(OPS, 4), ids=lambda names: names[0])
def test_ops_run_in_megengine_as_in_the_graph(names: list[str], tmp_path: Path) -> None:
    batches = [tuple(images(3, 4, 8, 8, seed=s) for _ in names) for s in range(2)]
    converted = _converted(side_by_side({name: OPS[name] for name in names}), *batches)
    path = _export(converted, tmp_path)
    # Another batch size than the trace had.
    last = tuple(images(5, 4, 8, 8, seed=9) for _ in names)
    report = qtrace.verify(path, converted, [batches[0], last])
    assert report.passed, report.table()
    assert not without_sites(names, report.sites["op_by_op"])


def test_several_inputs_and_outputs_have_their_names_and_order(tmp_path: Path) -> None:
    a, b = images(2, 4, 8, 8), images(2, 4, 8, 8, seed=1)
    conv = _conv(4, 4)
    module = net(
        lambda self, first, second: {"z": F.exp(second), "a": (self.c(second), self.c(first))}, c=conv
    )
    prepared = qtrace.prepare(qtrace.trace(module, a, b, check=False), RECIPE)
    converted = qtrace.convert(qtrace.calibrate(prepared, [(a, b)], progress=False))
    path = _export(converted, tmp_path)
    report = qtrace.verify(path, converted, [(a, b)])
    assert report.passed, report.table()
    from megengine.utils.comp_graph_tools import GraphInference

    outputs = GraphInference(io.BytesIO(path.read_bytes())).run(inp_dict={"first": a, "second": b})
    assert list(outputs) == [n.name.removesuffix("_q") for n in converted.graph.outputs]


def test_the_format_must_be_named_since_models_have_the_same_suffix(tmp_path: Path) -> None:
    converted = _converted(_after(F.relu), images(2, 4, 8, 8))
    with pytest.raises(ExportError, match=r"m\.mge could be a model .* qtrace\.save .*format='megengine'"):
        qtrace.export(converted, tmp_path / "m.mge")
    qtrace.save(converted, tmp_path / "model.mge")
    with pytest.raises(ExportError, match=r"model\.mge is a model that qtrace\.save .*format='megengine'"):
        qtrace.verify(tmp_path / "model.mge", converted, [images(2, 4, 8, 8)])
    path = qtrace.export(converted, tmp_path / "dump.mge", format="megengine")
    with pytest.raises(DataError, match=r"dump\.mge is not a saved model: qtrace\.save"):
        qtrace.load(path)


REFUSED: dict[str, tuple[Any, str]] = {
    "affine": (QConfig(), r"site x is uint8 affine, .*signed and symmetric.*recipe backend/megengine"),
    "per channel": (
        QConfig(backend="generic", activation={"signed": True, "symmetric": True, "rounding": "half_away"}),
        r"site conv_weight is int8 sym per-channel.*one scale for each tensor",
    ),
    "narrow": (
        QConfig(backend="ncnn", weight={"axis": None}),
        r"site x is int8 sym narrow.*saturate at -128",
    ),
    "rounding": (
        QConfig(backend="generic", activation={"signed": True, "symmetric": True}),
        r"site x is int8 sym, .*half away from zero",
    ),
    "4 bits": (
        QConfig(backend="generic", activation={"bits": 4, "signed": True, "symmetric": True}),
        r"site x is int4 sym, .*have 8 bits",
    ),
}


@each_of("case", REFUSED)
def test_other_schemes_are_refused_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    config, problem = REFUSED[case]
    converted = _converted(_after(F.relu), images(2, 4, 8, 8), config=config)
    with pytest.raises(ExportError, match=problem):
        qtrace.export(converted, tmp_path / "m.mge", format="megengine")
    assert list(tmp_path.iterdir()) == []


def test_ops_that_megengine_merges_are_verified_under_both_names(tmp_path: Path) -> None:
    """Two calls of the same from the same: the dump keeps one of the two names."""

    def forward(self, x):
        x = F.relu(self.conv(x))
        first, second = F.max_pool2d(x, 2), F.max_pool2d(x, 2)
        return self.last(first), self.last(second) + second

    batches = [images(2, 4, 8, 8, seed=s) for s in range(2)]
    converted = _converted(net(forward, conv=_conv(), last=_conv(6, 6)), *batches)
    report = qtrace.verify(_export(converted, tmp_path), converted, batches[:1])
    assert report.passed, report.table()
    assert {"max_pool2d_out", "max_pool2d_out_1"} <= set(report.sites["op_by_op"])
