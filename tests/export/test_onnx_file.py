"""The file: types, names, opset, a free batch, integer kernels; refusals before anything is written."""

from __future__ import annotations

from pathlib import Path

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
from qtrace.passes.record import fake_quants
from tests.nets import ResNet, images, net, randomize


def _converted(module: M.Module, x: np.ndarray, **config: object) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), QConfig(**config))
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def test_types_names_and_versions(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    converted = _converted(randomize(ResNet(8)), x)
    path = qtrace.export(converted, tmp_path / "m.onnx")
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
    path = qtrace.export(_converted(randomize(ResNet(8)), x), tmp_path / "m.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 20
    assert kinds.count("QLinearAdd") == 8
    assert "Conv" not in kinds
    assert "Relu" not in kinds


def test_the_batch_is_free(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    path = qtrace.export(_converted(randomize(ResNet(4)), x), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for count in (1, 7):
        (y,) = session.run(None, {name: images(count, 3, 32, 32)})
        assert y.shape == (count, 10)


def test_four_bit_weights_are_written_as_int8(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    converted = _converted(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), x, weight={"bits": 4})
    path = qtrace.export(converted, tmp_path / "m.onnx")
    values = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    assert values["c_weight_int"].dtype == np.int8
    assert np.abs(values["c_weight_int"]).max() == 7
    assert qtrace.verify(path, converted, [x]).passed


@pytest.mark.parametrize("bits", [4, 16])
def test_activations_without_a_type_are_refused_by_name_and_nothing_is_written(
    bits: int, tmp_path: Path
) -> None:
    x = images(2, 4, 8, 8)
    converted = _converted(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), x, activation={"bits": bits})
    with pytest.raises(ExportError, match=r"site x: .*opset 13"):
        qtrace.export(converted, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_op_without_an_onnx_form_is_named(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: F.cumsum(self.c(x), 1), c=M.Conv2d(4, 4, 3))
    with pytest.raises(ExportError, match=r"cumsum_out.*F\.cumsum"):
        qtrace.export(_converted(module, x), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3))
    converted = _converted(module, x)
    with pytest.raises(ExportError, match=r"'\.tflite'.*onnx"):
        qtrace.export(converted, tmp_path / "m.tflite")
    with pytest.raises(ExportError, match=r"unknown format 'tflit'.*onnx"):
        qtrace.export(converted, tmp_path / "m.bin", format="tflit")
    with pytest.raises(ExportError, match="not a folder"):
        qtrace.export(converted, tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(GraphError, match="not a converted"):
        qtrace.export(qtrace.trace(module, x), tmp_path / "m.onnx")
    assert qtrace.export(converted, tmp_path / "m.bin", format="onnx").exists()


def test_an_old_file_is_replaced_whole(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    converted = _converted(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), x)
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    qtrace.export(converted, path)
    onnx.checker.check_model(onnx.load(path))
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert all(fq.phase == "quantize" for fq in fake_quants(converted))
