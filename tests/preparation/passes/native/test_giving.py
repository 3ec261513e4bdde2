"""Sites take over the scales of MegEngine's own quantization; the graph computes MegEngine's integers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.quantization import QConfig as NativeConfig
from megengine.quantization import ema_fakequant_qconfig, ema_lowbit_fakequant_qconfig, quantize
from megengine.traced_module import TracedModule

import qtrace
from qtrace.config import backends
from qtrace.graph import GraphEditor
from qtrace.graph.native import drop_ranges, read_ranges
from qtrace.preparation.model import QuantizedModel
from tests.each import each_of
from tests.native_nets import ASYMMETRIC, MobileNet, ResNet, differences, images, trained
from tests.nets import net

X = images(7)
TARGETS = ("megengine", "onnxruntime", "tflite", "openvino", "tensorrt_10", "qnn", "generic")


@pytest.fixture(scope="module")
def resnet() -> M.Module:
    return trained(ResNet())


@pytest.fixture(scope="module")
def mobilenet() -> M.Module:
    return trained(MobileNet())


def prepared_for(model: M.Module, backend: str = "onnxruntime", **config: object) -> QuantizedModel:
    return QuantizedModel(qtrace.prepare(qtrace.trace(model, X, check=False), {"backend": backend, **config}))


def own_scales(model: M.Module) -> dict[str, tuple[float | None, float | None]]:
    ranges = read_ranges(qtrace.trace(model, X, check=False))
    assert ranges is not None
    pairs = ((path, (layer.activation, layer.weight)) for path, layer in ranges.layers.items())
    return {path: tuple(None if q is None else float(q.scale) for q in pair) for path, pair in pairs}  # type: ignore[misc]


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_every_op_computes_the_integers_of_megengines_own_quantize(
    name: str, backend: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    view = prepared_for(model, backend)
    assert all(fake.calibrated for fake in view.fake_quants.values())
    assert {module.phase for module in view.fake_quants.values()} == {"quantize"}
    steps = dict(differences(model, view.module, X))
    layers = [p for p, m in quantize(model, inplace=False).named_modules() if hasattr(m, "output_dtype")]
    assert set(steps) == {*layers, "mean"}
    assert max(steps.values()) <= 1.001, steps
    assert all(steps[path] <= 0.001 for path in layers), steps  # only the average is rounded otherwise


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_scales_of_every_site_are_the_models_own(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    view, own = prepared_for(model), own_scales(model)
    for site in view.sites:
        if site.sort == "bias":
            continue
        origin = view.record.native[site.group].origin
        path = origin.split(" of ")[1].split(" (")[0]
        assert float(site.qparams.scale) == own[path][site.sort == "weight"]
        assert not site.qparams.scheme.per_channel
    assert view.record.native["mean_out"].origin.startswith(
        "the result of "
    )  # as MegEngine's average keeps the scale
    assert view.record.native_notes == ()


def test_a_quantized_model_gives_the_same_graph(resnet: M.Module) -> None:
    first, second = (
        prepared_for(resnet),
        prepared_for(quantize(resnet, inplace=False).eval() or quantize(resnet, inplace=False)),
    )
    assert {g: f.qparams() for g, f in first.fake_quants.items()} == {
        g: f.qparams() for g, f in second.fake_quants.items()
    }
    x = mge.Tensor(X)
    np.testing.assert_array_equal(first.module(x).numpy(), second.module(x).numpy())


def test_the_exported_file_computes_the_same_integers(mobilenet: M.Module, tmp_path: Path) -> None:
    view = prepared_for(mobilenet)
    converted = qtrace.convert(view.module)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [X])
    assert report.passed


def test_calibrate_keeps_the_models_scales_and_sets_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Partly(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.conv = M.QuantStub(), M.ConvBnRelu2d(3, 4, 3)
            self.plain = M.Conv2d(4, 4, 1)
            self.plain.disable_quantize()

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            return F.sigmoid(self.plain(self.conv(self.quant(x))))

    with caplog.at_level(logging.WARNING, "qtrace"):
        view = prepared_for(trained(Partly()))
    missing = [name for name, fake in view.fake_quants.items() if not fake.calibrated]
    assert "plain_weight" in missing
    assert "conv_out" not in missing
    assert f"{len(missing)} of {len(view.fake_quants)} groups of sites lack a scale" in caplog.text
    assert all(name in caplog.text for name in missing)
    assert {fake.phase for fake in view.fake_quants.values()} == {"float"}
    kept = {name: fake.qparams() for name, fake in view.fake_quants.items() if fake.calibrated}
    qtrace.calibrate(view.module, [10 * X], progress=False)
    assert {name: view.fake_quants[name].qparams() for name in kept} == kept
    assert all(fake.calibrated for fake in view.fake_quants.values())
    summary = qtrace.explain(view.module).summary(None)
    assert f"From the model's own quantization: {len(kept)} of {len(view.fake_quants)} scales" in summary
    assert f"calibrated from data: {', '.join(sorted(missing))}" in summary


def test_explain_names_the_layer_of_a_scale(resnet: M.Module) -> None:
    explanation = qtrace.explain(qtrace.convert(prepared_for(resnet).module))
    text = "\n".join(
        part.text(None) for name in ("stem_out", "stem_weight") for part in explanation.why(name)
    )
    assert "from the model's own quantization (the result of stem (qat.ConvBnRelu2d))" in text
    assert "from the model's own quantization (the weight of stem (qat.ConvBnRelu2d))" in text
    sites = {site["name"]: site.get("native") for site in explanation.to_dict()["sites"]}
    assert sites["stem_out"] == "the result of stem (qat.ConvBnRelu2d)"
    assert "native_notes" not in explanation.to_dict()
    view = prepared_for(resnet, fakequant="lsq")
    scale = view.fake_quants["stem_out"].scale
    scale._reset(mge.Parameter(2 * scale.numpy()))
    text = "\n".join(part.text(None) for part in qtrace.explain(view.module).why("stem_out"))
    assert f"whose scale {own_scales(resnet)['stem'][0]:.4g} was trained on)" in text
    assert text.count("was trained on") == 1


def test_a_record_survives_files(resnet: M.Module, tmp_path: Path) -> None:
    view = prepared_for(resnet, "tensorrt", ptq=["fuse_bn", "equalize"])
    qtrace.save(view.module, tmp_path / "p.mge")
    record = QuantizedModel(qtrace.load(tmp_path / "p.mge")).record
    assert (record.native, record.native_notes) == (view.record.native, view.record.native_notes)
    assert record.native_notes[0].startswith("equalize: the weights were trained with the scales")


def test_algorithms_run_where_the_model_brings_no_scale() -> None:
    model = trained(ResNet(), steps=0)
    view = prepared_for(model, ptq=["fuse_bn", "equalize"])
    assert [report["algorithm"] for report in view.ptq] == ["fuse_bn", "equalize"]
    assert view.record.native == {}
    assert any("its MinMaxObserver has seen no finite value" in note for note in view.record.native_notes)
    summary = qtrace.explain(view.module).summary(None)
    assert "From the model's own quantization: 0 of 18 scales" in summary


@each_of(
    ("qconfig", "backend", "scheme", "note"),
    [
        (ema_lowbit_fakequant_qconfig, "onnxruntime", "int4 sym", ""),
        (ema_lowbit_fakequant_qconfig, "openvino", "uint8 affine", "its range was written as uint8 affine"),
        (ASYMMETRIC, "onnxruntime", "uint8 affine", ""),
        (ASYMMETRIC, "tflite", "int8 affine", ""),
        (ASYMMETRIC, "megengine", "int8 sym half-away", "its range was written as int8 sym half-away"),
        (ema_fakequant_qconfig, "ncnn", "int8 sym narrow half-away", "one step less at the lower end"),
    ],
)
def test_schemes_that_a_target_lacks_are_written_anew_and_named(
    qconfig: NativeConfig, backend: str, scheme: str, note: str
) -> None:
    view = prepared_for(trained(M.Sequential(M.QuantStub(), M.ConvBnRelu2d(3, 4, 3)), qconfig), backend)
    assert view.fake_quants["inp" if "inp" in view.fake_quants else "x"].scheme.describe() == scheme
    notes = [n for n in view.record.native_notes if note and note in n]
    assert bool(notes) == bool(note), view.record.native_notes
    if not note:
        assert view.record.native_notes == ()


def test_weights_of_four_bits_are_clipped_where_the_target_has_eight() -> None:
    model = trained(M.Sequential(M.QuantStub(), M.ConvBnRelu2d(3, 4, 3)), ema_lowbit_fakequant_qconfig)
    observer = model[1].weight_observer
    observer.min_val, observer.max_val = observer.min_val / 2, observer.max_val / 2
    view = prepared_for(model, "tflite")
    integers = next(
        s.integers(dict(view.float_tensors())["1.weight"].numpy()) for s in view.sites if s.sort == "weight"
    )
    assert (integers.min(), integers.max()) == (-8, 7)
    assert any("the same integers, of 4 bits" in n for n in view.record.native_notes)


def test_a_join_whose_target_ties_its_inputs_takes_the_scale_of_the_join() -> None:
    class Join(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.join = M.QuantStub(), M.Concat()
            self.a, self.b = M.ConvRelu2d(3, 4, 1), M.ConvRelu2d(3, 4, 1)

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            x = self.quant(x)
            return self.join([self.a(x), self.b(x)], 1)

    model = trained(Join())
    own = own_scales(model)
    free, tied = prepared_for(model), prepared_for(model, "tflite")
    assert float(free.fake_quants["a_out"].scale.numpy()) == own["a"][0]
    assert free.record.native_notes == ()
    (group,) = {s.group for s in tied.sites if s.node.name in ("a_out", "b_out")}
    assert float(tied.fake_quants[group].scale.numpy()) == own["join"][0]
    assert any(
        "tflite ties its sites, so a (qat.ConvRelu2d) gets the scale of join" in n
        for n in tied.record.native_notes
    )
    assert max(dict(differences(model, free.module, X)).values()) <= 1.001


def branch(relu: Callable[[mge.Tensor], mge.Tensor]) -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.fc(F.flatten(relu(self.conv(self.quant(x))), 1))

    return net(forward, quant=M.QuantStub(), conv=M.Conv2d(3, 2, 3), fc=M.LinearRelu(2 * 14 * 14, 4))


def test_a_relu_behind_a_layer_and_one_in_it_share_the_layers_scale() -> None:
    model = trained(branch(F.relu))
    own, view = own_scales(model), prepared_for(model)
    assert float(view.fake_quants["relu_out"].scale.numpy()) == own["conv"][0]
    apart = prepared_for(model, "megengine")  # its kernel of a linear layer has no relu
    assert backends.get("megengine").fused.get("linear") is None
    assert float(apart.fake_quants["linear_out"].scale.numpy()) == own["fc"][0]


def test_an_op_that_megengine_leaves_in_float_has_no_scale() -> None:
    view = prepared_for(trained(branch(F.sigmoid)))
    missing = [name for name, fake in view.fake_quants.items() if not fake.calibrated]
    assert missing == ["sigmoid_out"]


def test_a_norm_behind_a_quantized_layer_takes_its_scales_away() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.bn(self.conv(self.quant(x)))

    view = prepared_for(
        trained(net(forward, quant=M.QuantStub(), conv=M.Conv2d(3, 4, 3), bn=M.BatchNorm2d(4)))
    )
    calibrated = [name for name, fake in view.fake_quants.items() if fake.calibrated]
    assert calibrated == ["x"]
    assert any(
        n.startswith("conv (qat.Conv2d): its weight was changed behind its quantization")
        for n in view.record.native_notes
    )


def test_layers_that_the_user_removed_and_scales_without_a_site_are_named(resnet: M.Module) -> None:
    traced: TracedModule = qtrace.trace(resnet, X, check=False)
    linear = next(e for e in traced.graph.exprs() if e.outputs and e.outputs[0].name == "fc_out")
    with GraphEditor(traced) as editor:
        editor.replace_uses(linear.outputs[0], linear.inputs[1])
        editor.remove(linear)
    for _ in range(2):
        notes = QuantizedModel(qtrace.prepare(traced, {"backend": "tflite"})).record.native_notes
        assert (
            "fc (qat.Linear): no op of the graph calls the layer any more, so its scales are not used"
            in notes
        )
        vars(traced).pop("fc", None)
    region = qtrace.prepare(
        qtrace.trace(resnet, X, check=False), {"backend": "onnxruntime"}, inputs="blocks.1.*"
    )
    notes = QuantizedModel(region).record.native_notes
    assert any(
        n.startswith("no site rounds the weights of stem (qat.ConvBnRelu2d), blocks.0.conv1 (") for n in notes
    )
    assert any(n.startswith("no site rounds the results of quant (qat.QuantStub)") for n in notes)


def test_a_model_of_one_layer() -> None:
    layer = trained(M.Sequential(M.ConvBnRelu2d(3, 4, 3)))[0]
    view = prepared_for(layer)
    calibrated = {name for name, fake in view.fake_quants.items() if fake.calibrated}
    assert calibrated == set(view.fake_quants) - {"inp"}


def test_a_config_that_asks_for_another_scheme_is_followed(resnet: M.Module) -> None:
    rules = [{"match": {"name": "blocks.1.*"}, "activation": {"bits": 16}, "weight": {"bits": 4}}]
    view = prepared_for(resnet, "generic", rules=rules)
    assert view.fake_quants["blocks_1_conv1_out"].scheme.bits == 16
    assert view.fake_quants["blocks_1_conv2_weight"].scheme.bits == 4
    assert view.fake_quants["stem_out"].scheme.bits == 8
    (note,) = (n for n in view.record.native_notes if "uint16" in n)
    assert (
        "int8 sym cannot be used (the config asks for uint16 affine): its range was written as uint16" in note
    )
    own = own_scales(resnet)["blocks.1.conv1"][0]
    assert own is not None
    assert float(view.fake_quants["blocks_1_conv1_out"].scale.numpy()) == pytest.approx(own / 257, rel=1e-3)


def test_a_rounding_inside_of_a_composite_is_kept() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        x = self.conv(self.quant(x))
        return self.product(x, self.sigmoid(x))

    parts = {"product": M.Elemwise("MUL"), "sigmoid": M.Elemwise("SIGMOID")}
    model = trained(net(forward, quant=M.QuantStub(), conv=M.Conv2d(3, 4, 3), **parts))
    view = prepared_for(model)
    assert view.record.native["sigmoid_out"].origin == "the result of sigmoid (qat.Elemwise)"
    assert any("no Silu: the model's own quantization rounds sigmoid_out inside" in line for line in view.log)
    bare = qtrace.trace(model, X, check=False)
    drop_ranges(bare)
    composed = QuantizedModel(qtrace.prepare(bare, {"backend": "onnxruntime"}))
    assert "sigmoid_out" not in composed.fake_quants


def test_a_stub_behind_a_multiplication_gives_its_scale_to_the_input() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.conv(self.quant(x / 4))

    model = trained(net(forward, quant=M.QuantStub(), conv=M.ConvRelu2d(3, 4, 3)))
    own = own_scales(model)["quant"][0]
    assert own is not None
    view = prepared_for(model)
    assert view.annotation.factors == {"truediv_out": 0.25, "quant_out": 0.25}
    assert float(view.fake_quants["x"].scale.numpy()) == 4 * own
    assert all(fake.calibrated for fake in view.fake_quants.values())


def test_a_layer_under_two_names() -> None:
    class Shared(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.first = M.QuantStub(), M.ConvBnRelu2d(3, 3, 1)
            self.second = M.Identity()

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            return self.second(self.first(self.quant(x)))

    model = trained(Shared())
    model.second = model.first
    view = prepared_for(model)
    assert all(fake.calibrated for fake in view.fake_quants.values())
    assert view.record.native_notes == ()
    assert len({s.group for s in view.sites if s.sort == "weight"}) == 1
