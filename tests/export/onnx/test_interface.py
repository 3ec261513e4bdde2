"""Names and types of an imported file's inputs and outputs in every ONNX file, and their verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

import qtrace
from qtrace.errors import CalibrationError, GraphError
from qtrace.graph.interface import Interface, TensorInfo, write_interface
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from tests.each import each_of
from tests.nets import net

FORMATS = ("float", "onnx", "onnx_float")
INTERFACE = Interface(
    (TensorInfo("ids:0", "int64"), TensorInfo("x/in", "float16")),
    (TensorInfo("logits", "float32"), TensorInfo("label", "int64")),
)
IDS = np.array([[0, 3], [4, 1]], np.int64)
X = np.random.default_rng(0).normal(size=(2, 2, 4)).astype(np.float16).astype(np.float32)


def _forward(self: Any, ids: Any, x: Any) -> Any:
    y = self.head(F.relu(self.embedding(ids) + x))
    return y, F.argmax(y, axis=2)


def _traced(interface: Interface | None) -> TracedModule:
    module = net(_forward, embedding=M.Embedding(5, 4), head=M.Linear(4, 3))
    traced = qtrace.trace(module, mge.Tensor(IDS.astype(np.int32)), X, check=False)
    if interface is not None:
        write_interface(traced, interface)
    return traced


def _exported(form: str, interface: Interface | None, folder: Path) -> tuple[TracedModule, Path]:
    """The module that was exported, and the file."""
    traced = _traced(interface)
    if form == "float":
        return traced, qtrace.export(traced, folder / "m.onnx")
    prepared = qtrace.prepare(traced)
    converted = qtrace.convert(qtrace.calibrate(prepared, [(IDS, X)], progress=False))
    return converted, qtrace.export(converted, folder / "m.onnx", format=form)


def _ends(path: Path) -> list[tuple[str, int]]:
    graph = onnx.load(path).graph
    return [(info.name, info.type.tensor_type.elem_type) for info in (*graph.input, *graph.output)]


def _equal(path: Path, model: TracedModule, names: tuple[str, str], atol: float = 1e-5) -> None:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    half = session.get_inputs()[1].type == "tensor(float16)"
    feeds = dict(zip(names, (IDS, X.astype(np.float16) if half else X), strict=True))
    logits, label = session.run(None, feeds)
    expected = model(mge.Tensor(IDS.astype(np.int32)), mge.Tensor(X))
    assert label.dtype == np.int64
    np.testing.assert_array_equal(label, expected[1].numpy())
    np.testing.assert_allclose(logits, expected[0].numpy(), atol=atol)


@pytest.mark.parametrize("form", FORMATS)
def test_names_order_and_types_come_back(form: str, tmp_path: Path) -> None:
    model, path = _exported(form, INTERFACE, tmp_path)
    assert _ends(path) == [
        ("ids:0", TensorProto.INT64),
        ("x/in", TensorProto.FLOAT16),
        ("logits", TensorProto.FLOAT),
        ("label", TensorProto.INT64),
    ]
    # onnx_float has the trained weights, the converted module the rounded ones.
    _equal(path, model, ("ids:0", "x/in"), 0.1 if form == "onnx_float" else 1e-5)


@each_of("form", FORMATS)
def test_without_an_interface_the_types_are_those_of_the_graph(form: str, tmp_path: Path) -> None:
    _, path = _exported(form, None, tmp_path)
    assert _ends(path)[0] == ("ids", TensorProto.INT32)
    assert _ends(path)[3][1] == TensorProto.INT32


@pytest.mark.parametrize("form", FORMATS)
def test_names_of_tensors_inside_give_way(form: str, tmp_path: Path) -> None:
    """Inputs and outputs that are called as other tensors of the graph, each other included."""
    names = ("add_out", "head.weight", "x", "ids")
    inputs = (TensorInfo(names[0], "int64"), TensorInfo(names[1], "float32"))
    outputs = (TensorInfo(names[2], "float32"), TensorInfo(names[3], "int64"))
    model, path = _exported(form, Interface(inputs, outputs), tmp_path)
    assert tuple(name for name, _ in _ends(path)) == names
    onnx.checker.check_model(onnx.load(path), full_check=True)
    _equal(path, model, names[:2], 0.1 if form == "onnx_float" else 1e-5)


def test_outputs_that_are_inputs_or_parameters(tmp_path: Path) -> None:
    module = net(lambda self, ids, x: (ids, self.fc.weight, self.fc(x), ids), fc=M.Linear(4, 3))
    traced = qtrace.trace(module, mge.Tensor(IDS.astype(np.int32)), X, check=False)
    names, types = ("a", "fc.weight", "x", "b"), ("int64", "float32", "float32", "int32")
    outputs = tuple(TensorInfo(n, t) for n, t in zip(names, types, strict=True))
    write_interface(traced, Interface((TensorInfo("fc_out", "int64"), TensorInfo("in", "float32")), outputs))
    path = qtrace.export(traced, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert tuple(o.name for o in session.get_outputs()) == names
    a, weight, y, b = session.run(None, {"fc_out": IDS, "in": X})
    assert (a.dtype, b.dtype) == (np.int64, np.int32)
    np.testing.assert_array_equal(a, IDS)
    np.testing.assert_array_equal(b, IDS)
    np.testing.assert_array_equal(weight, traced.fc.weight.numpy())
    np.testing.assert_allclose(y, traced.fc(mge.Tensor(X)).numpy(), atol=1e-5)


def test_bfloat16_of_which_python_has_no_arrays_is_float32_and_the_file_says_so(tmp_path: Path) -> None:
    inputs = (INTERFACE.inputs[0], TensorInfo("x", "bfloat16"))
    _, path = _exported("float", Interface(inputs, INTERFACE.outputs), tmp_path)
    info = onnx.load(path).graph.input[1]
    assert info.type.tensor_type.elem_type == TensorProto.FLOAT
    assert info.doc_string == "bfloat16 in the file that the model was imported from"


def test_an_output_that_has_the_name_of_an_input_gets_another(tmp_path: Path) -> None:
    swapped = Interface(INTERFACE.inputs, (TensorInfo("x/in", "float32"), TensorInfo("label", "int64")))
    model, path = _exported("float", swapped, tmp_path)
    assert [name for name, _ in _ends(path)] == ["ids:0", "x/in", "x/in_output", "label"]
    _equal(path, model, ("ids:0", "x/in"))


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("form", ["float", "onnx"])
def test_verify_feeds_int64(form: str, runtime: str, tmp_path: Path) -> None:
    model, path = _exported(form, INTERFACE, tmp_path)
    report = qtrace.verify(path, model, [(IDS, X), (IDS[::-1].copy(), X)], runtime=runtime)
    assert report.passed, report.summary()


def test_parameter_files_name_the_tensors_of_the_float_model(tmp_path: Path) -> None:
    taken = Interface(INTERFACE.inputs, (TensorInfo("relu_out", "float32"), TensorInfo("label", "int64")))
    prepared = qtrace.prepare(_traced(taken))
    converted = qtrace.convert(qtrace.calibrate(prepared, [(IDS, X)], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx", format="onnx_float", params="aimet-0.6.1")
    graph = onnx.load(path).graph
    tensors = {i.name for i in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
    (encodings,) = (p for p in tmp_path.iterdir() if p != path)
    text = encodings.read_text(encoding="utf-8")
    assert '"relu_out_inner"' in text
    assert "relu_out_inner" in tensors


def test_a_damaged_interface_is_refused(tmp_path: Path) -> None:
    traced = _traced(None)
    traced.onnx_interface = "{}"
    with pytest.raises(GraphError, match="the interface that the model carries is damaged"):
        qtrace.export(traced, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [2**40, -(2**31) - 1])
def test_an_integer_beyond_32_bits_is_refused_when_it_is_fed(value: int, tmp_path: Path) -> None:
    model, path = _exported("float", INTERFACE, tmp_path)
    ids = IDS.copy()
    ids[0, 0] = value
    with pytest.raises(CalibrationError, match=rf"batch 1 holds the integer {value}, and MegEngine computes"):
        qtrace.verify(path, model, [(IDS, X), (ids, X)])


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_calibration_feeds_the_types_of_the_graph(engine: str) -> None:
    traced = _traced(None)
    reference = qtrace.prepare(traced)
    qtrace.calibrate(reference, [(IDS, X)], engine="megengine", progress=False)
    write_interface(traced, INTERFACE)
    calibrated = qtrace.calibrate(qtrace.prepare(traced), [(IDS, X)], engine=engine, progress=False)
    for actual, expected in zip(fake_quants(calibrated), fake_quants(reference), strict=True):
        np.testing.assert_allclose(actual.qparams().scale, expected.qparams().scale, rtol=1e-6)
