"""Plain traced modules in float: names and structure that an importer reads, options, other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.errors import ExportError
from qtrace.graph import functions
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import graph_hash
from tests.each import each_of
from tests.nets import ResNet, images, net, randomize


def run(path: Path, *inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs of an ONNX file in onnxruntime."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs, strict=True)))


def same(path: Path, traced: TracedModule, *inputs: np.ndarray) -> None:
    """The outputs of the file are those of the module, within 1e-5 of the largest value."""
    expected = traced(*map(mge.Tensor, inputs))
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    for left, right in zip(expected, run(path, *inputs), strict=True):
        assert np.abs(left.numpy() - right).max() <= 1e-5 * np.abs(right).max()


def _names(model: Any, kind: str) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type == kind]


def _stored(model: Any) -> dict[str, np.ndarray]:
    """The initializers without the constants of ops."""
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {name: value for name, value in values.items() if not name.startswith("const_")}


class Block(M.Module):
    """A fused layer, a function and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = M.ConvBn2d(4, 4, 3, padding=1)
        self.act = M.PReLU(4)
        self.gain = mge.Parameter(np.full((1, 4, 1, 1), 0.5, np.float32))

    def forward(self, x: Any) -> Any:
        return F.relu(self.act(self.conv(x)) * self.gain)


class Net(M.Module):
    """Each norm, grouped and transposed convolutions, and modules that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = M.Sequential(Block(), M.Conv2d(4, 8, 3, groups=2, bias=False), M.BatchNorm2d(8))
        self.up = M.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.inst, self.group, self.layer = M.InstanceNorm(4), M.GroupNorm(2, 4), M.LayerNorm(4)
        self.fc, self.head = M.Linear(4, 4), M.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        x = self.group(self.inst(self.up(self.stage(x))))
        x = F.flatten(x, 2).transpose(0, 2, 1)
        x = self.fc(self.fc(self.layer(x)))
        return self.head(x.mean(1))


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(randomize(Net()), images(2, 4, 8, 8), check=False)


def test_modules_come_back_by_name_and_kind(traced: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(traced, tmp_path / "net.onnx")
    model = onnx.load(path)
    assert [node.name for node in model.graph.node] == [
        "/stage/0/conv/conv/Conv",
        "/stage/0/conv/bn/BatchNormalization",
        "/stage/0/act/PRelu",
        "/stage/0/Mul",
        "/stage/0/Relu",
        "/stage/1/Conv",
        "/stage/2/BatchNormalization",
        "/up/ConvTranspose",
        "/inst/InstanceNormalization",
        "/group/GroupNormalization",
        *(name for name in _names(model, "Reshape")),
        "/Transpose",
        "/layer/LayerNormalization",
        "/fc/MatMul",
        "/fc/Add",
        "/fc_1/MatMul",
        "/fc_1/Add",
        "/ReduceMean",
        "/head/Gemm",
    ]
    values, state = _stored(model), traced.state_dict()
    assert set(values) == set(state)
    # In ONNX's layout: groups are joined, biases are vectors, the weight behind MatMul is transposed.
    assert values["stage.1.weight"].shape == (8, 2, 3, 3)
    assert values["stage.0.conv.conv.bias"].shape == (4,)
    np.testing.assert_array_equal(values["fc.weight"], state["fc.weight"].T)
    np.testing.assert_array_equal(values["head.weight"], state["head.weight"])
    np.testing.assert_array_equal(values["stage.2.running_var"].ravel(), state["stage.2.running_var"].ravel())
    same(path, traced, images(2, 4, 8, 8, seed=1))


def test_the_batch_axis_is_free(traced: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(traced, tmp_path / "net.onnx")
    same(path, traced, images(5, 4, 8, 8, seed=1))
    (info,) = onnx.load(path).graph.input
    assert (info.name, info.type.tensor_type.shape.dim[0].dim_param) == ("x", "N")


@each_of(
    ("opset", "whole"),
    [(13, ()), (17, ("LayerNormalization",)), (21, ("LayerNormalization", "GroupNormalization"))],
)
def test_the_opset_decides_which_norms_are_one_node(
    opset: int, whole: tuple[str, ...], traced: TracedModule, tmp_path: Path
) -> None:
    path = qtrace.export(traced, tmp_path / "net.onnx", opset=opset)
    model = onnx.load(path)
    assert model.opset_import[0].version == opset
    kinds = {node.op_type for node in model.graph.node}
    assert {"LayerNormalization", "GroupNormalization"} & kinds == set(whole)
    assert {"BatchNormalization", "InstanceNormalization"} <= kinds
    groups = set() if "GroupNormalization" in whole else {"group_out_groups_0", "group_out_groups_1"}
    assert set(_stored(model)) == {*traced.state_dict(), *groups}, "ones and zeros where groups are instances"
    same(path, traced, images(2, 4, 8, 8, seed=1))


def test_the_lowest_opset_that_keeps_modules_is_chosen(tmp_path: Path) -> None:
    traced = qtrace.trace(randomize(ResNet(4, (1,))), images(2, 3, 16, 16), check=False)
    model = onnx.load(qtrace.export(traced, tmp_path / "a.onnx"))
    assert (model.opset_import[0].version, model.ir_version) == (13, 8)
    model = onnx.load(qtrace.export(traced, tmp_path / "a.onnx", opset=19))
    assert (model.opset_import[0].version, model.ir_version) == (19, 9)


def test_a_norm_without_parameters(tmp_path: Path) -> None:
    norms = (M.BatchNorm2d(4, affine=False), M.GroupNorm(2, 4, affine=False), M.LayerNorm(6, affine=False))
    module = M.Sequential(randomize(M.Sequential(M.Conv2d(4, 4, 1))), *norms)
    module.eval()
    traced = qtrace.trace(module, images(2, 4, 6, 6), check=False)
    path = qtrace.export(traced, tmp_path / "m.onnx")
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds[1:] == ["BatchNormalization", "GroupNormalization", "LayerNormalization"]
    same(path, traced, images(3, 4, 6, 6, seed=1))


def test_names_that_are_taken(tmp_path: Path) -> None:
    """A second call, a module with the name of that call, a parameter with the name of a tensor."""

    class Named(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.conv_1 = M.Conv2d(4, 4, 1), M.Conv2d(4, 4, 1)
            self.relu_out = mge.Parameter(np.full((1, 4, 1, 1), 3.0, np.float32))

        def forward(self, x: Any) -> Any:
            relu_out = F.relu(self.conv_1(self.conv(self.conv(x))))
            return relu_out * self.relu_out + F.relu(x)

    traced = qtrace.trace(randomize(Named()), images(2, 4, 6, 6), check=False)
    path = qtrace.export(traced, tmp_path / "m.onnx")
    model = onnx.load(path)
    assert _names(model, "Conv") == ["/conv/Conv", "/conv_2/Conv", "/conv_1/Conv"]
    assert _names(model, "Relu") == ["/Relu", "/Relu_1"]
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)
    same(path, traced, images(2, 4, 6, 6, seed=1))


def test_a_weight_that_two_ops_read_in_different_forms(tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        flat = F.linear(x, self.fc.weight, self.fc.bias)
        return self.fc(flat.reshape(2, 1, 4)) + flat.reshape(2, 1, 4) * F.mean(self.fc.weight)

    traced = qtrace.trace(net(forward, fc=M.Linear(4, 4)), images(1, 2, 4)[0], check=False)
    path = qtrace.export(traced, tmp_path / "m.onnx")
    assert {"fc.weight", "fc.bias"} <= set(_stored(onnx.load(path)))
    same(path, traced, images(1, 2, 4, seed=1)[0])


def test_the_file_says_that_it_is_float(traced: TracedModule, tmp_path: Path) -> None:
    model = onnx.load(qtrace.export(traced, tmp_path / "net.onnx"))
    facts = {p.key: p.value for p in model.metadata_props}
    assert set(facts) == {"qtrace.version", "qtrace.stage", "qtrace.graph"}
    assert facts["qtrace.stage"] == "float"
    assert facts["qtrace.graph"] == graph_hash(traced)


def test_the_module_is_unchanged_and_a_loaded_one_gives_the_same_file(
    traced: TracedModule, tmp_path: Path
) -> None:
    before = {name: value.copy() for name, value in traced.state_dict().items()}
    first = qtrace.export(traced, tmp_path / "a.onnx").read_bytes()
    assert not hasattr(traced, "qtrace_record")
    after = traced.state_dict()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    qtrace.save(traced, tmp_path / "float.mge")
    loaded = qtrace.load(tmp_path / "float.mge")
    assert qtrace.export(loaded, tmp_path / "b.onnx").read_bytes() == first
    prepared = qtrace.prepare(traced)
    assert qtrace.explain(prepared).annotation.sites


def test_large_tensors_go_into_a_file_of_their_own(tmp_path: Path) -> None:
    traced = qtrace.trace(
        net(lambda self, x: self.fc(x), fc=M.Linear(64, 64)), images(1, 2, 64)[0], check=False
    )
    path = qtrace.export(traced, tmp_path / "net.onnx", external=True)
    assert (tmp_path / "net.onnx.data").exists()
    same(path, traced, images(1, 2, 64, seed=1)[0])


# -- other formats --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet() -> TracedModule:
    return qtrace.trace(randomize(ResNet(4, (1, 1))), images(2, 3, 32, 32), check=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".param"])
def test_verify_compares_the_outputs_of_float_files(
    suffix: str, resnet: TracedModule, tmp_path: Path
) -> None:
    path = qtrace.export(resnet, tmp_path / f"m{suffix}")
    report = qtrace.verify(path, resnet, [images(2, 3, 32, 32, seed=s) for s in (1, 2)])
    assert report.passed, report.summary()
    assert report.sqnr_db() > 100
    assert report.table().startswith("a float file: its outputs are compared\noutputs: reference 1")


def test_verify_refuses_files_of_other_modules(resnet: TracedModule, tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    other = qtrace.trace(randomize(ResNet(4, (1, 1)), seed=5), x, check=False)
    path = qtrace.export(resnet, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="it comes from a quantized module or one with other weights"):
        qtrace.verify(path, other, [x])
    converted = qtrace.convert(qtrace.calibrate(qtrace.prepare(resnet), [x], progress=False))
    with pytest.raises(ExportError, match="is not an export of this module: it lacks integers of"):
        qtrace.verify(path, converted, [x])


def test_verify_fails_where_the_file_computes_something_else(resnet: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(resnet, tmp_path / "m.onnx")
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.name.endswith("fc.weight"))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    onnx.save(model, path)
    report = qtrace.verify(path, resnet, [images(2, 3, 32, 32)])
    assert not report.passed
    assert "60.0 dB needed" in report.summary()
    assert "LSB" not in report.summary()
    assert qtrace.verify(path, resnet, [images(2, 3, 32, 32)], min_sqnr_db=30.0).passed


def test_caffe_computes_what_the_module_does(resnet: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(resnet, tmp_path / "m.prototxt")
    x = images(2, 3, 32, 32, seed=1)
    loaded = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
    loaded.setInput(x)
    np.testing.assert_allclose(loaded.forward(), resnet(mge.Tensor(x)).numpy(), atol=1e-5)


def test_formats_without_a_composite_get_its_pieces(tmp_path: Path) -> None:
    stored = {"s": mge.Parameter([0.98]), "t": mge.Parameter([0.01]), "c": M.Conv2d(3, 4, 3)}
    module = net(lambda self, x: functions.scale_and_shift(F.relu(self.c(x)), self.s, self.t), **stored)
    x = images(2, 3, 8, 8)
    traced = qtrace.trace(module, x, check=False)
    path = qtrace.export(traced, tmp_path / "m.prototxt")
    loaded = cv2.dnn.readNetFromCaffe(str(path), str(path.with_suffix(".caffemodel")))
    loaded.setInput(x)
    np.testing.assert_allclose(loaded.forward(), traced(mge.Tensor(x)).numpy(), atol=1e-5)
    assert qtrace.export(traced, tmp_path / "m.tflite").stat().st_size
    file = onnx.load(qtrace.export(traced, tmp_path / "m.onnx"))
    assert [n.op_type for n in file.graph.node] == ["Conv", "Relu", "Mul", "Add"]


@each_of("format", ["dot", "megengine", "onnx_float"])
def test_formats_of_quantized_modules_refuse(format: str, resnet: TracedModule, tmp_path: Path) -> None:
    sentence = (
        f"format {format} writes quantized modules, and ResNet is a plain traced module: prepare, calibrate "
        "and convert it first, or write it in float as caffe, msc, ncnn, onnx or tflite."
    )
    with pytest.raises(ExportError) as caught:
        qtrace.export(resnet, tmp_path / "m.out", format=format)
    assert str(caught.value) == sentence
    assert not list(tmp_path.iterdir())


@each_of(
    ("name", "options", "sentence"),
    [
        (
            "m.onnx",
            {"packed": True},
            "format onnx lacks option 'packed' for a plain traced module; it knows",
        ),
        ("m.tflite", {"io": "int8"}, "lacks option 'io' for a plain traced module; it knows: nms"),
        ("m.prototxt", {"params": "ncnn"}, "lacks option 'params' for a plain traced module"),
        ("m.onnx", {"opset": 12}, "opset=12 is no choice of the ONNX export: choose one from 13 to 21"),
        ("m.onnx", {"opset": True}, "opset=True is no choice"),
        ("m.onnx", {"new": 1}, "format onnx lacks option 'new'; it knows: external, opset"),
    ],
)
def test_options_are_refused(
    name: str, options: dict[str, Any], sentence: str, resnet: TracedModule, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=sentence):
        qtrace.export(resnet, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


@each_of("name", ["m.onnx", "m.tflite", "m.param", "m.prototxt"])
def test_an_op_without_a_form_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    module = net(lambda self, x: F.svd(self.fc(x))[1], fc=M.Linear(4, 4))
    traced = qtrace.trace(module, np.eye(4, dtype=np.float32), check=False)
    with pytest.raises(ExportError, match=r" cannot become .*test_plain\.py:\d+") as caught:
        qtrace.export(traced, tmp_path / name)
    assert "svd_out" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_opset_that_lacks_an_op_is_refused(tmp_path: Path) -> None:
    def forward(self: Any, x: Any, matrix: Any) -> Any:
        return F.vision.warp_affine(self.conv(x), matrix, (6, 6), format="NCHW")

    matrix = np.tile(np.array([[[1, 0, 0.5], [0, 1, 0.25]]], np.float32), (2, 1, 1))
    traced = qtrace.trace(net(forward, conv=M.Conv2d(4, 4, 1)), images(2, 4, 6, 6), matrix, check=False)
    with pytest.raises(ExportError, match=r"opset=13 lacks GridSample: .* choose 16"):
        qtrace.export(traced, tmp_path / "m.onnx", opset=13)
    for opset in (16, 21):  # opset 20 renamed the mode
        same(qtrace.export(traced, tmp_path / "m.onnx", opset=opset), traced, images(2, 4, 6, 6), matrix)


def test_native_quantization_is_refused(tmp_path: Path) -> None:
    from megengine.quantization import ema_fakequant_qconfig, quantize_qat

    module = quantize_qat(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 1)), True, ema_fakequant_qconfig)
    traced = mge.traced_module.trace_module(module, mge.Tensor(images(2, 4, 6, 6)))
    with pytest.raises(
        ExportError, match=r"cannot be exported: c is a qat\.Conv2d.*call qtrace.trace on the model"
    ):
        qtrace.export(traced, tmp_path / "m.onnx")
