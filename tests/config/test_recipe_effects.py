"""What the packaged recipes do to small networks that have what their rules are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config.recipe import load_recipe, recipe_names
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation, ExprNote, Site
from qtrace.preparation.model import fake_quants
from qtrace.preparation.prepare import plan
from tests.nets import MobileNetV2, ResNet, images, net

X = images(2, 4, 8, 8)
TARGETS = tuple(name for name in recipe_names() if name.startswith("backend/"))
_PER_TENSOR = ("backend/megengine", "backend/ryzenai_xint8")
PER_CHANNEL = tuple(name for name in TARGETS if name not in _PER_TENSOR)


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _trace(module: M.Module, *inputs: np.ndarray) -> TracedModule:
    module.eval()
    return qtrace.trace(module, *(inputs or (X,)), check=False)


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """Plans a network, all on integers, under imported recipes and what else the importing file says."""

    def of(traced: TracedModule, *imports: str, more: str = "") -> Annotation:
        path = tmp_path / "mine.yaml"
        path.write_text(f"schema: qtrace/1\nimports: [{', '.join(imports)}]\nplacement: everything\n{more}")
        return plan(traced, path)

    return of


def _note(annotation: Annotation, name: str) -> ExprNote:
    return next(note for note in annotation.notes if note.name == name)


def _site(annotation: Annotation, name: str) -> Site:
    return next(site for site in annotation.sites if site.name == name)


def _activations(annotation: Annotation) -> list[Site]:
    return [site for site in annotation.sites if site.sort == "activation"]


def _weights(annotation: Annotation) -> dict[str, Any]:
    return {s.name: s.plan.scheme for s in annotation.sites if s.sort == "weight" and s.plan is not None}


def _twice_rounded(annotation: Annotation) -> set[str]:
    nodes = [site.node for site in _activations(annotation)]
    return {node for node in nodes if nodes.count(node) > 1}


# -- depthwise convolutions ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mobilenet() -> TracedModule:
    return _trace(MobileNetV2(0.25, blocks=(1, 2, 1)), images(1, 3, 32, 32))


@pytest.mark.quick(3)
@pytest.mark.parametrize("target", TARGETS)
def test_depthwise_weights_keep_8_bits_and_a_scale_each(mobilenet: TracedModule, planned: Any, target: str):
    weights = _weights(planned(mobilenet, target, "mobilenet_v2"))
    depthwise = [scheme for name, scheme in weights.items() if "depthwise" in name]
    if target == "backend/ncnn":  # computes them faster in float
        assert not depthwise
        return
    assert len(depthwise) == 4
    assert {scheme.bits for scheme in depthwise} == {8}
    assert {scheme.per_channel for scheme in depthwise} == {target in PER_CHANNEL}
    if target == "backend/generic_w4":
        assert {scheme.bits for name, scheme in weights.items() if "project" in name} == {4}


def test_depthwise_weights_keep_a_scale_each_where_a_file_takes_the_others(
    mobilenet: TracedModule, planned: Any
) -> None:
    weights = _weights(planned(mobilenet, "mobilenet_v2", more="weight: {axis: null}\n"))
    assert {name for name, scheme in weights.items() if not scheme.per_channel} == {
        name for name in weights if "depthwise" not in name
    }


# -- swish and gates ----------------------------------------------------------------------------------


def _swish(function: Any) -> TracedModule:
    """Two residual blocks whose branches are swishes of sums that others read too."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = function(self.a(x))
        x = function(self.b(x)) + x
        x = function(self.c(x)) + x
        return self.d(F.concat([x, function(self.e(x))], 1))

    # As many channels as make integers faster on every target.
    parts = {name: M.Conv2d(4 if name == "a" else 8, 8, 3, padding=1) for name in "abce"}
    return _trace(net(forward, **parts, d=M.Conv2d(16, 8, 1)))


FUNCTIONS = {
    "silu": F.silu,
    "product": lambda x: x * F.sigmoid(x),
    "hswish": F.hswish,
    "hard product": lambda x: x * F.relu6(x + 3.0) / 6.0,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", ["mobilenet_v3", "efficientnet", "csp_darknet"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("target", ["backend/onnxruntime", "backend/tensorrt", "backend/tflite"])
def test_what_a_swish_gives_has_a_range_by_squared_error(
    planned: Any, family: str, function: str, target: str
) -> None:
    traced = _swish(FUNCTIONS[function])
    annotation = planned(traced, target, family, more="observers: {activation: minmax}\n")
    read = [_note(annotation, name).inputs for name in ("b_out", "c_out", "d_out", "e_out")]
    assert {_site(annotation, group).plan.observer for groups in read for group in groups} == {"mse"}
    assert _twice_rounded(annotation) == set()


def test_a_swish_written_as_a_product_stays_whole(planned: Any) -> None:
    annotation = planned(_swish(FUNCTIONS["product"]), "yolox")
    whole = planned(_swish(FUNCTIONS["silu"]), "yolox")
    assert [(n.kind, n.state) for n in annotation.notes] == [(n.kind, n.state) for n in whole.notes]
    assert len(_activations(annotation)) == len(_activations(whole))


def test_what_a_gate_reads_is_not_clipped(planned: Any) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.a(x))
        return self.b(x * F.sigmoid(self.fc(F.mean(x, axis=(2, 3), keepdims=True))))

    annotation = planned(_trace(net(forward, a=_conv(), b=_conv(), fc=M.Conv2d(4, 4, 1))), "regnet_y")
    observers = {site.name: site.plan.observer for site in _activations(annotation)}
    assert {name for name, observer in observers.items() if observer == "minmax"} == {"fc_out"}


# -- detectors ----------------------------------------------------------------------------------------


def _detector() -> M.Module:
    """One head for two levels: boxes through a learned scale and exp, scores through sigmoid."""

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        levels = [F.silu(self.body(x)), F.silu(self.down(x))]
        boxes = [F.exp(self.box(level) * self.scale).reshape(2, 4, -1) for level in levels]
        scores = [F.sigmoid(self.score(level)).reshape(2, 4, -1) for level in levels]
        return F.concat(boxes, 2), F.concat(scores, 2)

    parts = {"body": _conv(), "down": _conv(stride=2), "box": _conv(), "score": _conv()}
    return net(forward, **parts, scale=mge.Parameter(np.float32([1.5])))


@pytest.fixture(scope="module")
def detector() -> TracedModule:
    return _trace(_detector())


# What the last layers give: nothing is rounded, or to so many bits.
_LAST = {
    "backend/qnn": 16,
    "backend/qnn_a16": 16,
    "backend/snpe": 16,
    "backend/tflite": 8,
    "backend/megengine": 8,
    "backend/esp_dl": 8,
    "backend/esp_dl_s3": 8,
}


# Convolutions of four channels, which the backend tensorrt leaves in float, say nothing about its recipes.
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "backend/tensorrt"])
@pytest.mark.parametrize("family", ["yolox", "retinanet", "detr"])
def test_a_detector_computes_on_integers_and_decodes_in_float(
    detector: TracedModule, planned: Any, family: str, target: str
) -> None:
    annotation = planned(detector, target, family)
    for name in ("box_out", "box_1_out", "score_out", "score_1_out"):
        note = _note(annotation, name)
        assert note.state == "int"
        assert all(note.inputs)
        bits = _site(annotation, name).plan.scheme.bits if note.output else None
        assert bits == _LAST.get(target)
    tail = [n for n in annotation.notes if n.kind in ("exp", "mul", "sigmoid", "concat", "reshape")]
    pieces = {
        n.name for n in tail if set(n.reads) & {"body_out", "down_out"}
    }  # of SiLU, on targets without it
    assert len(pieces) in (0, 4)
    tail = [n for n in tail if n.name not in pieces]
    assert {n.state for n in tail} <= {"float", "carried"}
    assert {n.state for n in tail if n.kind != "reshape"} == {"float"}


def test_levels_keep_ranges_of_their_own_until_a_file_shares_them(planned: Any) -> None:
    traced = _trace(_detector())
    apart = planned(traced, "retinanet")
    assert _note(apart, "box_out").inputs != _note(apart, "box_1_out").inputs
    shared = planned(traced, "retinanet", more="rules: [{match: {shared: true}, share: true}]\n")
    assert _note(shared, "box_out").inputs == _note(shared, "box_1_out").inputs


def test_boxes_inside_of_a_network_are_float_as_well(planned: Any) -> None:
    def forward(self: M.Module, x: mge.Tensor, rois: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.body(x))
        size = F.exp(self.rpn(x)[:, :, 0, 0])
        boxes = rois + F.concat([size[:, :1] * 0.0, size], 1)
        return self.fc(F.flatten(F.vision.roi_align(x, boxes, output_shape=(2, 2)), 1))

    rois = np.float32([[0, 1, 1, 4, 4], [1, 2, 2, 6, 6]])
    traced = _trace(net(forward, body=_conv(), rpn=_conv(), fc=M.Linear(16, 3)), X, rois)
    annotation = planned(traced, "faster_rcnn")
    assert _note(annotation, "rpn_out").output == ""
    assert _note(annotation, "body_out").state == "int"
    assert _note(annotation, "fc_out").output == ""
    assert {n.state for n in annotation.notes if n.kind == "exp"} == {"float"}


# -- transformers -------------------------------------------------------------------------------------


def _own_norm(x: mge.Tensor) -> mge.Tensor:
    mean = F.mean(x, -1, keepdims=True)
    return (x - mean) / F.sqrt(F.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5)


def _encoder(norm: Any) -> TracedModule:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = norm(self, x)
        scores = F.matmul(self.q(y), self.k(y), transpose_b=True) * 0.3 + self.position
        x = x + self.o(F.matmul(F.softmax(scores, axis=-1), self.v(y)))
        x = x + self.down(F.gelu(self.up(norm(self, x))))
        return self.head(F.mean(norm(self, x), 1))

    parts: dict[str, Any] = {name: M.Linear(8, 8) for name in ("q", "k", "v", "o", "head")}
    parts |= {"up": M.Linear(8, 16), "down": M.Linear(16, 8), "norm": M.LayerNorm(8)}
    bias = mge.Parameter(np.zeros((6, 6), np.float32))
    return _trace(net(forward, **parts, position=bias), images(2, 1, 6, 8)[:, 0])


@pytest.mark.parametrize("written", [False, True], ids=["LayerNorm", "written out"])
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_between_the_products_of_a_transformer_all_is_float(planned: Any, family: str, written: bool) -> None:
    traced = _encoder((lambda _, x: _own_norm(x)) if written else (lambda self, x: self.norm(x)))
    annotation = planned(traced, family)
    states = {(n.kind, n.state) for n in annotation.notes if n.state not in ("shape", "carried")}
    assert {kind for kind, state in states if state == "int"} <= {"linear", "matmul", "mean", "add"}
    assert {n.state for n in annotation.notes if n.kind in ("linear", "matmul")} == {"int"}
    assert {"softmax", "gelu"} <= {kind for kind, state in states if state == "float"}
    for name in ("o_out", "down_out", "up_out"):
        assert _note(annotation, name).output == ""
    for name in ("q_out", "k_out", "v_out"):
        assert _note(annotation, name).output


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", ["backend/onnxruntime", "backend/snpe", "backend/tensorrt_10"])
def test_tokens_and_neighbours_are_joined_in_float(planned: Any, target: str) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = F.transpose(F.flatten(self.patches(x), 2), (0, 2, 1))
        x = F.concat([F.broadcast_to(self.token, (x.shape[0], 1, 4)), x], axis=1) + self.position
        x = x + self.fc(self.norm(x))
        x = F.concat([x[:, 1::2], x[:, 2::2]], axis=2)
        return self.head(self.merged(x))

    parts: dict[str, Any] = {"patches": M.Conv2d(4, 4, 2, 2), "fc": M.Linear(4, 4), "head": M.Linear(8, 3)}
    parts |= {"norm": M.LayerNorm(4), "merged": M.LayerNorm(8)}
    parts |= {n: mge.Parameter(np.ones((1, c, 4), np.float32)) for n, c in (("token", 1), ("position", 17))}
    annotation = planned(_trace(net(forward, **parts)), target, "vit")
    assert [note.state for note in annotation.notes if note.kind == "concat"] == ["float", "float"]
    assert _twice_rounded(annotation) == set()
    for name in ("patches_out", "fc_out"):
        note = _note(annotation, name)
        assert note.state == "int"
        # onnxruntime has no integer convolution that gives floats.
        rounds = name == "patches_out" and target == "backend/onnxruntime"
        expected = 8 if rounds else _LAST.get(target)
        assert (_site(annotation, name).plan.scheme.bits if note.output else None) == expected


# -- maps, branches, targets --------------------------------------------------------------------------


def test_a_mask_between_scaling_and_softmax_changes_nothing(planned: Any) -> None:
    def forward(self: M.Module, x: mge.Tensor, mask: mge.Tensor) -> mge.Tensor:
        scores = F.matmul(self.q(x), F.transpose(self.k(x), (0, 2, 1))) * 0.3
        scores += mask
        return F.matmul(F.softmax(scores, axis=-1), self.v(x))

    module = net(forward, q=M.Linear(8, 8), k=M.Linear(8, 8), v=M.Linear(8, 8))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    mask = np.zeros((2, 5, 5), np.float32)
    mask[:, :, 3:] = -np.inf
    traced = _trace(module, x, mask)
    annotation = planned(traced, "detr")
    assert {_note(annotation, n).state for n in ("mul_out", "iadd_out", "softmax_out")} == {"float"}
    assert {note.state for note in annotation.notes if note.kind in ("matmul", "linear")} == {"int"}
    prepared = qtrace.prepare(traced, "detr")
    qtrace.calibrate(prepared, [(x, mask)], progress=False)
    assert np.isfinite(prepared(mge.Tensor(x), mge.Tensor(mask)).numpy()).all()


@pytest.mark.parametrize("family", ["deeplabv3plus", "unet", "simplebaseline"])
def test_maps_of_scores_leave_in_float(planned: Any, family: str) -> None:
    module = net(
        lambda self, x: F.vision.interpolate(self.b(F.relu(self.a(x))), scale_factor=2.0),
        a=_conv(),
        b=_conv(),
    )
    annotation = planned(_trace(module), family)
    assert [site.node for site in _activations(annotation)] == ["x", "relu_out"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("recipe", ["repvgg", "int8", "resnet+openvino"])
def test_branches_of_repvgg_become_one_convolution(recipe: str) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return F.relu(self.bn3(self.c3(x)) + self.bn1(self.c1(x)) + self.bn0(x))

    norms = {f"bn{i}": M.BatchNorm2d(4) for i in (0, 1, 3)}
    module = net(forward, c3=_conv(bias=False), c1=M.Conv2d(4, 4, 1, bias=False), **norms)
    traced = _trace(module)
    kinds = [n.kind for n in plan(traced, recipe).notes if n.state != "shape"]
    assert kinds == ["conv2d", "relu"]
    prepared = qtrace.prepare(traced, recipe)
    got, want = prepared(mge.Tensor(X)).numpy(), module(mge.Tensor(X)).numpy()
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_family_without_samples_is_placed_quietly_as_by_default(recwarn: pytest.WarningsRecorder) -> None:
    traced = _trace(net(lambda self, x: F.relu(self.b(F.relu(self.a(x)) + x)), a=_conv(), b=_conv()))
    notes = [plan(traced, name).placement for name in ("resnet", "int8")]
    assert all(note is not None for note in notes)
    assert notes[0] == notes[1]
    assert plan(traced, "resnet+tensorrt").placement is None
    assert [w for w in recwarn if "subnormal" not in str(w.message)] == []


def test_results_are_float_on_ncnn_and_layers_round_what_they_read(planned: Any) -> None:
    module = net(lambda self, x: F.relu(self.b(F.relu(self.a(x)) + x)), a=_conv(), b=_conv())
    annotation = planned(_trace(module), "backend/ncnn", "resnet")
    assert [site.node for site in _activations(annotation)] == ["x", "add_out"]
    assert {n.state for n in annotation.notes if n.kind == "conv2d"} == {"int"}
    assert {n.output for n in annotation.notes if n.state in ("int", "fused")} == {""}
    assert {s.plan.scheme.describe() for s in _activations(annotation)} == {"int8 sym narrow half-away"}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("target", "conv", "linear"),
    [
        ("tflite", "int8 sym per-channel(0) narrow", "int8 sym narrow"),
        ("qnn", "int8 sym per-channel(0) narrow", "int8 sym narrow"),
        ("snpe", "uint8 affine", "uint8 affine"),
        ("openvino", "int8 sym per-channel(0) narrow", "int8 sym per-channel(0) narrow"),
        ("generic_shift", "int8 sym narrow pow2", "int8 sym narrow pow2"),
        ("megengine", "int8 sym half-away", "int8 sym half-away"),
    ],
)
def test_weights_as_each_target_has_them(planned: Any, target: str, conv: str, linear: str) -> None:
    module = net(lambda self, x: self.fc(F.flatten(self.a(x), 1)), a=_conv(), fc=M.Linear(256, 3))
    weights = _weights(planned(_trace(module), f"backend/{target}", "resnet"))
    assert {name: scheme.describe() for name, scheme in weights.items()} == {
        "a_weight": conv,
        "fc_weight": linear,
    }


@pytest.mark.quick(3)
@pytest.mark.parametrize("target", TARGETS)
def test_a_network_runs_on_every_target(planned: Any, target: str, tmp_path: Path) -> None:
    traced = _trace(ResNet(4, (1, 1), 5), images(1, 3, 16, 16))
    planned(traced, target, "resnet")
    prepared = qtrace.prepare(traced, tmp_path / "mine.yaml")
    batch = images(4, 3, 16, 16, seed=1)
    qtrace.calibrate(prepared, [batch], progress=False)
    got = qtrace.convert(prepared)(mge.Tensor(batch)).numpy()
    want = traced(mge.Tensor(batch)).numpy()
    bits = min(scheme.bits for scheme in _weights(planned(traced, target, "resnet")).values())
    assert 10 * np.log10(np.sum(want**2) / np.sum((got - want) ** 2)) > (20 if bits == 8 else 5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [ResNet(4, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))])
def test_w4a4_learns_scales_inside_and_keeps_those_at_both_ends(model: M.Module) -> None:
    traced = _trace(model, images(1, 3, 32, 32))
    fakes = list(fake_quants(qtrace.prepare(traced, "w4a4_lsq")))
    assert {(fq.scheme.bits, type(fq)) for fq in fakes} == {
        (4, qtrace.fakequant.LSQFakeQuant),
        (8, qtrace.fakequant.FixedFakeQuant),
    }
    assert {"x", "fc_weight"} <= {fq.site for fq in fakes if fq.scheme.bits == 8}


def test_a_new_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the packaged ones it is known by its name, and goes with every target."""
    for folder in ("backend", "common"):
        (tmp_path / folder).mkdir()
    packaged = Path(qtrace.__file__).parent / "recipes"
    common = ("common/default", "common/placement", "common/imagenet", "common/depthwise")
    for name in ("backend/tensorrt_10", *common):
        (tmp_path / f"{name}.yaml").write_text((packaged / f"{name}.yaml").read_text())
    (tmp_path / "mynet.yaml").write_text(
        "schema: qtrace/1\n"
        "description: MyNet\n"
        "imports: [common/imagenet, common/depthwise]\n"
        "rules:\n"
        "  # Its sums of three branches need more room.\n"
        "  - match: {op: add}\n"
        "    observers: {activation: minmax}\n"
    )
    monkeypatch.setattr("qtrace.config.recipe._HOME", tmp_path)
    assert "mynet" in recipe_names()
    assert load_recipe("mynet").rules[-1].origin == "qtrace/recipes/mynet.yaml:6"
    (tmp_path / "use.yaml").write_text("schema: qtrace/1\nimports: [backend/tensorrt_10, mynet]\n")
    annotation = plan(
        _trace(MobileNetV2(0.25, blocks=(1, 2, 1)), images(1, 3, 32, 32)), tmp_path / "use.yaml"
    )
    assert annotation.backend == "tensorrt_10"
    sums = {note.inputs for note in annotation.notes if note.kind == "add"}
    assert {_site(annotation, group).plan.observer for groups in sums for group in groups} == {"minmax"}
