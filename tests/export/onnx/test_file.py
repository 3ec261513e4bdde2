"""The file: types, names, opset, a free batch, integer kernels; refusals before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import qtrace
from qtrace import QConfig
from qtrace.errors import ExportError, GraphError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from tests.nets import ResNet, calibrated_if_quantized, images, net, randomize


def _converted(module: M.Module, x: np.ndarray, **config: object) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), QConfig(**config))
    return qtrace.convert(calibrated_if_quantized(prepared, [x]))


def test_types_names_and_versions(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    converted = _converted(randomize(ResNet(8, (1, 1))), x)
    path = qtrace.export(converted, tmp_path / "m.onnx", weights="int8")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 13)]
    assert model.ir_version <= 10
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    weights = [s for s in qtrace.explain(converted).annotation.sites if s.sort == "weight"]
    assert weights
    for site in weights:
        stored = values[f"{site.name}_int"]
        assert stored.dtype == np.int8
        assert values[f"{site.name}_scale"].shape == (stored.shape[0],)
    biases = [s for s in qtrace.explain(converted).annotation.sites if s.sort == "bias"]
    for site in biases:
        assert values[f"{site.name}_int"].dtype == np.int32
        want = values[f"{site.activation}_scale"] * values[f"{site.weight}_scale"]
        np.testing.assert_array_equal(values[f"{site.name}_scale"], want)
    # Tensors are named like the nodes of the graph.
    produced = {o for n in model.graph.node for o in n.output}
    notes = qtrace.explain(converted).annotation.notes
    assert {n.name for n in notes if n.kind != "identity"} <= produced
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    assert not any(v.dtype == np.float32 and v.size > 200 for v in values.values()), (
        "a float weight was written"
    )


def test_fused_to_integer_kernels(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    path = qtrace.export(_converted(randomize(ResNet(8, (1, 1))), x), tmp_path / "m.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 6
    assert kinds.count("QLinearAdd") == 2
    assert "Conv" not in kinds
    assert "Relu" not in kinds


def test_the_batch_is_free(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    path = qtrace.export(_converted(randomize(ResNet(4, (1, 1))), x), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for count in (1, 7):
        (y,) = session.run(None, {name: images(count, 3, 32, 32)})
        assert y.shape == (count, 10)


def test_four_bit_weights_are_written_as_int8(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    converted = _converted(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), x, weight={"bits": 4})
    path = qtrace.export(converted, tmp_path / "m.onnx", weights="int8")
    values = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    assert values["c_weight_int"].dtype == np.int8
    assert np.abs(values["c_weight_int"]).max() == 7
    assert qtrace.verify(path, converted, [x]).passed


@pytest.mark.quick(1)
@pytest.mark.parametrize(("bits", "opset", "kind"), [(4, 13, "UINT8"), (16, 21, "UINT16")])
def test_activations_of_4_and_16_bits(bits: int, opset: int, kind: str, tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    rules = [{"match": {}, "activation": {"bits": bits}}]
    converted = _converted(randomize(ResNet(8, (1, 1))), x, rules=rules)
    path = qtrace.export(converted, tmp_path / "m.onnx", weights="int8")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    assert model.ir_version <= 10
    kinds = {t.data_type for t in model.graph.initializer if t.name == "x_zero_point"}
    assert kinds == {onnx.TensorProto.DataType.Value(kind)}
    report = qtrace.verify(path, converted, [x])
    assert report.worst_lsb() <= 1
    assert report.equal_share() >= 0.999


def test_one_op_of_16_bits_among_8(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    rules = [{"match": {"position": "last"}, "output": {"bits": 16}}]
    converted = _converted(randomize(ResNet(8, (1, 1))), x, rules=rules)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, [x]).passed


def test_weights_of_4_bits_can_be_packed(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    converted = _converted(randomize(ResNet(16, (1, 1))), x, weight={"bits": 4})
    plain = qtrace.export(converted, tmp_path / "plain.onnx")
    packed = qtrace.export(converted, tmp_path / "packed.onnx", packed=True)
    assert packed.stat().st_size < 0.7 * plain.stat().st_size
    stored = {t.name: t.data_type for t in onnx.load(packed).graph.initializer}
    weights = [f"{s.name}_int" for s in qtrace.explain(converted).annotation.sites if s.sort == "weight"]
    assert {stored[name] for name in weights} == {onnx.TensorProto.INT4}
    for path in (plain, packed):
        assert qtrace.verify(path, converted, [x]).passed


def test_an_op_without_an_onnx_form_is_named(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: F.svd(self.c(x))[1], c=M.Conv2d(4, 4, 3))
    with pytest.raises(ExportError, match=r"svd_out.*end the graph before it.*F\.svd"):
        qtrace.export(_converted(module, x), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3))
    converted = _converted(module, x)
    with pytest.raises(ExportError, match=r"'\.xyz'.*onnx"):
        qtrace.export(converted, tmp_path / "m.xyz")
    with pytest.raises(ExportError, match=r"unknown format 'tflit'.*onnx"):
        qtrace.export(converted, tmp_path / "m.bin", format="tflit")
    with pytest.raises(ExportError, match="not a folder"):
        qtrace.export(converted, tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(GraphError, match="not a converted"):
        qtrace.export(module, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="is prepared, not converted"):
        qtrace.export(qtrace.prepare(qtrace.trace(module, x, check=False)), tmp_path / "m.onnx")
    for option in ("packed", "external"):
        with pytest.raises(ExportError, match=f"{option}='no way' is no choice.*true or false"):
            qtrace.export(converted, tmp_path / "m.onnx", **{option: "no way"})
    assert not list(tmp_path.iterdir())
    assert qtrace.export(converted, tmp_path / "m.bin", format="onnx").exists()


def test_an_old_file_is_replaced_whole(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    converted = _converted(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), x)
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    qtrace.export(converted, path, force=True)
    onnx.checker.check_model(onnx.load(path))
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert all(fq.phase == "quantize" for fq in fake_quants(converted))


# -- names ---------------------------------------------------------------------------------------------


def _names(module: M.Module, *examples: object, path: Path) -> tuple[list[str], list[str], list[str]]:
    """Inputs, outputs and ops of the file, which must compute what the graph does."""
    prepared = qtrace.prepare(qtrace.trace(module, *examples, check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, [examples], progress=False))
    # As the command line does it: from a file.
    qtrace.save(converted, path / "m.mge")
    target = qtrace.export(qtrace.load(path / "m.mge"), path / "m.onnx")
    report = qtrace.verify(target, converted, [examples])
    assert report.passed, report.table()
    graph = onnx.load(target).graph
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    return inputs, outputs, [n.op_type for n in graph.node]


def _conv() -> M.Conv2d:
    return M.Conv2d(4, 4, 3, padding=1)


OUTPUTS = {
    "quantized": (lambda y: y, ["c_out"]),
    "carried": (lambda y: F.flatten(y, 1), ["flatten_out"]),
    "float": (lambda y: F.softmax(F.flatten(y, 1)), ["softmax_out"]),
    "read inside": (lambda y: (F.sigmoid(y), y), ["sigmoid_out", "c_out"]),
    "dict": (lambda y: {"b": F.sigmoid(y), "a": y}, ["sigmoid_out", "c_out"]),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_named_like_their_nodes_without_copies(name: str, tmp_path: Path) -> None:
    after, expected = OUTPUTS[name]
    _, outputs, kinds = _names(
        net(lambda self, x: after(self.c(x)), c=_conv()), images(2, 4, 8, 8), path=tmp_path
    )
    assert outputs == expected
    assert "Identity" not in kinds


def test_what_is_returned_twice_or_is_an_input_is_copied(tmp_path: Path) -> None:
    def forward(self: M.Module, x: object) -> object:
        y = self.c(x)
        return y, y, x, self.same(y)

    module = net(forward, c=_conv(), same=M.Identity())
    inputs, outputs, kinds = _names(module, images(2, 4, 8, 8), path=tmp_path)
    assert inputs == ["x"]
    assert outputs == ["c_out", "c_out_output", "x_output", "same_out"]
    assert kinds.count("Identity") == 3


def test_inputs_are_named_like_the_arguments(tmp_path: Path) -> None:
    module = net(lambda self, input, filter, x_1: self.c(input) + filter * x_1, c=_conv())
    x = images(2, 4, 8, 8)
    assert _names(module, x, x, x, path=tmp_path)[0] == ["input", "filter", "x_1"]
    parts = net(lambda self, input, x: self.c(input[0]) + input[1] * x, c=_conv())
    assert _names(parts, (x, x), x, path=tmp_path)[0] == ["input_0", "input_1", "x"]


# -- what ONNX cannot compute --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "ties"), [("megengine", "half away from zero"), ("esp_dl_s3", "half up")]
)
def test_another_rounding_than_onnx_has_is_refused(tmp_path: Path, backend: str, ties: str) -> None:
    x, module = images(2, 4, 8, 8), net(lambda self, x: self.c(x), c=_conv())
    message = f"site x rounds {ties}, as backend {backend} does, but ONNX rounds half to even.*onnxruntime"
    with pytest.raises(ExportError, match=message):
        qtrace.export(_converted(module, x, backend=backend), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
    floats = _converted(module, x, backend=backend, rules=[{"match": {}, "quantize": False}])
    report = qtrace.verify(qtrace.export(floats, tmp_path / "m.onnx"), floats, [x])
    assert report.passed


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda y: y[:, :: y.shape[1] // 2], r"getitem_out_1: a step that is computed.*fixed"),
        (lambda y: y.astype("float16"), r"astype_out: .*astype.*float16.*float32"),
    ],
)
def test_computed_steps_and_float16_name_the_node(
    after: Callable[[object], object], message: str, tmp_path: Path
) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: after(self.c(x)), c=_conv())
    with pytest.raises(ExportError, match=message):
        qtrace.export(_converted(module, x), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("opset", [17, 18, 21])
def test_a_higher_opset_holds_the_same_integers(opset: int, tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)

    def forward(self: Any, x: Any) -> Any:
        return self.fc(self.norm(F.mean(F.relu(self.c(x)), (2, 3))))

    converted = _converted(net(forward, c=M.Conv2d(4, 4, 3), norm=M.LayerNorm(4), fc=M.Linear(4, 3)), x)
    path = qtrace.export(converted, tmp_path / "m.onnx", opset=opset)
    assert onnx.load(path).opset_import[0].version == opset
    report = qtrace.verify(path, converted, [x])
    assert report.passed
    assert report.worst_lsb() == 0


def test_an_opset_that_lacks_the_types_is_refused(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: F.relu(self.c(x)), c=M.Conv2d(4, 4, 3))
    converted = _converted(module, x, weight={"bits": 4})
    with pytest.raises(ExportError, match="opset=20 lacks integers of 4 or 16 bits: .* choose 21"):
        qtrace.export(converted, tmp_path / "m.onnx", packed=True, opset=20)
    assert qtrace.export(converted, tmp_path / "m.onnx", packed=True, opset=21).exists()
