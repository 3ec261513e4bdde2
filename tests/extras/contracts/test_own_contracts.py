"""Our own files keep the contract of their target, and compute what the graph prepared for it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.extras.contracts import check_contract
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from tests.nets import MobileNetV2, ResNet, images, net, randomize
from tests.zoo.checks import rounded_to_nearest

X = images(2, 3, 32, 32)


def _resnet() -> M.Module:
    return randomize(ResNet(16, (1, 1)))


def _mobilenet() -> M.Module:
    return randomize(MobileNetV2(0.5, blocks=(1, 2, 1)))


def _detector() -> M.Module:
    """One head for two levels: boxes through exp, scores through sigmoid; SiLU behind the layers."""

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        x = F.silu(self.stem(x))
        levels = [F.silu(self.body(x)), F.silu(self.down(x))]
        boxes = [F.exp(self.box(level)).reshape(level.shape[0], 4, -1) for level in levels]
        scores = [F.sigmoid(self.score(level)).reshape(level.shape[0], 8, -1) for level in levels]
        return F.concat(boxes, 2), F.concat(scores, 2)

    parts = {"stem": M.Conv2d(3, 16, 3, 2, 1), "body": M.Conv2d(16, 16, 3, 1, 1)}
    parts |= {"down": M.Conv2d(16, 16, 3, 2, 1), "box": M.Conv2d(16, 4, 1), "score": M.Conv2d(16, 8, 1)}
    return net(forward, **parts)


def _transformer() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.transpose(F.flatten(self.patch(x), 2), (0, 2, 1))
        y = self.before(x)
        scores = F.matmul(self.q(y), F.transpose(self.k(y), (0, 2, 1))) * 0.25
        x = x + self.o(F.matmul(F.softmax(scores, axis=-1), self.v(y)))
        x = x + self.down(F.gelu(self.up(self.behind(x))))
        return self.head(F.mean(x, axis=1))

    layers = {name: M.Linear(16, 16) for name in ("q", "k", "v", "o", "head")}
    norms = {"before": M.LayerNorm(16), "behind": M.LayerNorm(16)}
    others = {"up": M.Linear(16, 32), "down": M.Linear(32, 16), "patch": M.Conv2d(3, 16, 4, 4)}
    return net(forward, **layers, **norms, **others)


@dataclass(frozen=True)
class Network:
    """A network and the recipe of its family."""

    build: Callable[[], M.Module]
    family: str


NETWORKS = {
    "residual": Network(_resnet, "resnet"),
    "mobile": Network(_mobilenet, "mobilenet_v2"),
    "detector head": Network(_detector, "retinanet"),
    "transformer block": Network(_transformer, "vit"),
}
# Recipe of a target -> the contract.
TARGETS = {
    "tensorrt": "tensorrt",
    "qnn": "qnn",
    "qnn_a16": "qnn",
    "ryzenai": "ryzenai",
    "ryzenai_a16w8": "ryzenai",
    "ryzenai_xint8": "ryzenai_xint8",
}
QUICK = {("residual", target) for target in ("tensorrt", "qnn", "ryzenai", "ryzenai_xint8")}
QUICK |= {("detector head", "qnn")}
CASES = [
    pytest.param(name, target, marks=[] if (name, target) in QUICK else [pytest.mark.slow])
    for name in NETWORKS
    for target in TARGETS
]


def _converted(module: M.Module, config: object) -> TracedModule:
    traced = qtrace.trace(module, X[:1], check=False)
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced, config), [X], progress=False))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "target"), CASES)
def test_an_export_keeps_the_contract_and_computes_what_the_graph_does(
    name: str, target: str, tmp_path: Path
) -> None:
    network = NETWORKS[name]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"schema: qtrace/1\nimports: [backend/{target}, {network.family}]\n")
    converted = _converted(network.build(), rounded_to_nearest(qtrace.load_recipe(recipe)))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = check_contract(path, TARGETS[target])
    assert report.findings == ()
    verified = qtrace.verify(path, converted, [X], optimized=False)
    assert verified.passed
    assert verified.worst_lsb() <= 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow]) for name in NETWORKS])
def test_a_file_for_esp_dl_computes_what_the_graph_does_with_powers_of_two(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"schema: qtrace/1\nimports: [backend/esp_dl, {network.family}]\n")
    converted = _converted(network.build(), rounded_to_nearest(qtrace.load_recipe(recipe)))
    sites = [site for site in QuantizedModel(converted).sites if site.sort != "bias"]
    assert len(sites) >= 10
    assert all((np.frexp(site.qparams.scale)[0] == 0.5).all() for site in sites)
    verified = qtrace.verify(qtrace.export(converted, tmp_path / "m.onnx"), converted, [X], optimized=False)
    assert verified.passed
    assert verified.worst_lsb() <= 1


def test_every_scale_is_a_power_of_two_and_biases_are_int8_in_xint8(tmp_path: Path) -> None:
    path = qtrace.export(_converted(_resnet(), "backend/ryzenai_xint8"), tmp_path / "m.onnx")
    model = onnx.load(str(path))
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    quantizers = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = [float(stored[node.input[1]]) for node in quantizers]
    assert len(scales) >= 40
    assert all(np.frexp(scale)[0] == 0.5 for scale in scales)
    for node in (n for n in model.graph.node if n.op_type in ("Conv", "Gemm")):
        bias = stored[producers[node.input[2]].input[0]]
        assert bias.dtype == np.int8
        assert bias.ndim == 1


def _gated() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.silu(self.a(x))
        x = F.hswish(self.b(x))
        return self.c(F.tanh(F.sigmoid(x) * 0.5 + x))

    return net(forward, **{name: M.Conv2d(3 if name == "a" else 8, 8, 3, 1, 1) for name in "abc"})


def test_sigmoid_and_tanh_of_16_bits_have_their_fixed_grids_on_qnn(tmp_path: Path) -> None:
    converted = _converted(_gated(), "backend/qnn_a16")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert check_contract(path, "qnn").findings == ()
    model = onnx.load(str(path))
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    sources = {name: node.op_type for node in model.graph.node for name in node.output}
    grids = {"Sigmoid": [], "Tanh": []}
    for node in model.graph.node:
        kind = sources.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
        if kind in grids:
            grids[kind].append((float(stored[node.input[1]]), int(stored[node.input[2]])))
    assert len(grids["Sigmoid"]) == 2
    assert set(grids["Sigmoid"]) == {(1 / 65536, 0)}
    assert grids["Tanh"] == [(1 / 32768, 32768)]
    verified = qtrace.verify(path, converted, [X], optimized=False)
    assert verified.worst_lsb() <= 1


def test_a_gate_is_rounded_where_the_target_has_no_kernel_for_the_product(tmp_path: Path) -> None:
    traced = qtrace.trace(_gated(), X[:1], check=False)
    kinds = {
        backend: [note.kind for note in qtrace.explain(traced, {"backend": backend}).annotation.notes]
        for backend in ("onnxruntime", "qnn", "ryzenai")
    }
    assert {"silu", "hswish"} <= set(kinds["onnxruntime"])
    for backend in ("qnn", "ryzenai"):
        assert not {"silu", "hswish"} & set(kinds[backend])
        assert kinds[backend].count("mul") == kinds["onnxruntime"].count("mul") + 2


def test_no_range_is_smaller_than_qnn_computes_with() -> None:
    module = net(lambda self, x: self.b(self.a(x) * 1e-9), a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 4, 3))
    for backend, widened in (("qnn", True), ("onnxruntime", False)):
        view = QuantizedModel(_converted(module, {"backend": backend}), "converted")
        ranges = [float(site.qparams.scale) * 255 for site in view.sites if site.sort == "activation"]
        assert (min(ranges) >= 1e-4 * (1 - 1e-6)) == widened


def test_a_convolution_gives_as_many_bits_as_it_reads_on_qnn(tmp_path: Path) -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 8, 3))
    wide = {"bits": 16}
    rules = [{"match": {"name": "b_out"}, "activation": wide, "output": wide}]
    converted = _converted(module, {"backend": "qnn", "rules": rules})
    widths = {
        s.name: s.qparams.scheme.bits for s in QuantizedModel(converted).sites if s.sort == "activation"
    }
    assert widths == {"x": 8, "a_out": 8, "a_out__b_out": 16, "b_out": 16}
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert check_contract(path, "qnn").findings == ()
    assert np.max(qtrace.verify(path, converted, [X], optimized=False).worst_lsb()) <= 1


def _check_file(module: M.Module, target: str, tmp_path: Path) -> tuple[TracedModule, onnx.ModelProto]:
    converted = _converted(module, f"backend/{target}")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert check_contract(path, target).findings == ()
    verified = qtrace.verify(path, converted, [X], optimized=False)
    assert verified.worst_lsb() <= 1
    return converted, onnx.load(str(path))


def test_a_layer_is_added_unrounded_through_an_identity_on_tensorrt(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.a(x))
        return self.c(F.relu(self.gate(self.b(x)) + x))

    layers = {"a": M.Conv2d(3, 16, 3), "b": M.Conv2d(16, 16, 3, 1, 1), "c": M.Conv2d(16, 16, 1)}
    converted, _ = _check_file(net(forward, **layers, gate=M.Identity()), "tensorrt", tmp_path)
    sites = {site.name for site in QuantizedModel(converted).sites if site.sort == "activation"}
    assert not [name for name in sites if name.startswith(("b_out", "gate"))]
    note = next(n for n in qtrace.explain(converted).annotation.notes if n.name == "b_out")
    assert "adds it in the same kernel" in note.reason


@pytest.mark.parametrize(("channels", "state"), [(3, "float"), (16, "int")])
def test_a_join_that_only_float_layers_read_is_not_rounded_on_tensorrt(
    channels: int, state: str, tmp_path: Path
) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.concat([F.relu(self.a(x)), F.relu(self.b(x))], 1)
        return self.c(F.transpose(F.transpose(x, (0, 1, 3, 2)), (0, 1, 3, 2)))

    layers = {"a": M.Conv2d(3, 8, 3), "b": M.Conv2d(3, 8, 3), "c": M.Conv2d(16, channels, 1)}
    converted, _ = _check_file(net(forward, **layers), "tensorrt", tmp_path)
    note = next(n for n in qtrace.explain(converted).annotation.notes if n.kind == "concat")
    assert note.state == state
    assert (note.reason == "no op on integers reads the result") == (state == "float")


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", ["qnn", "ryzenai"])
def test_stored_numbers_are_integers_where_a_target_computes_on_them(target: str, tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = self.a(x)
        return self.b(1.0 - (0.25 + x) / 3.0 - 0.5)

    module = net(forward, a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 8, 1))
    _, model = _check_file(module, target, tmp_path)
    made = {name: node for node in model.graph.node for name in node.output}
    kinds = ("Add", "Sub", "Div")
    reads = [name for node in model.graph.node if node.op_type in kinds for name in node.input]
    assert len(reads) == 8
    if target == "qnn":
        assert {made[name].op_type for name in reads} == {"DequantizeLinear"}


def test_a_computed_divisor_may_stay_float_on_qnn(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = self.a(x)
        return self.b(x / F.sqrt(F.sum(x * x, axis=1, keepdims=True) + 1e-3))

    _check_file(net(forward, a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 8, 1)), "qnn", tmp_path)
