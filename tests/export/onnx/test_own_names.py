"""What an imported file says of itself, its names and its versions come back in the exported ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.errors import GraphError
from qtrace.export.onnx import exporter
from qtrace.extras.split import split
from qtrace.graph.flatten import flatten
from qtrace.graph.origin import FileOrigin, FileRemark, FileResult
from qtrace.graph.types import TracedModule
from tests.each import each_of

X = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
ONNX_FORMS = ("float", "onnx", "onnx_float")


def _node(op: str, name: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=name, **attributes)


def _weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32) / 3


def _model(opset: int = 17, ir_version: int = 8, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A network with names as exporters write them: slashes, colons, dots, ``::``."""
    stored = {
        "backbone/conv1/kernel:0": _weights(4, 3, 3, 3),
        "bn.weight": np.abs(_weights(4)) + 1,
        "bn.bias": _weights(4),
        "bn.mean": _weights(4),
        "bn.var": np.abs(_weights(4)) + 1,
        "onnx::Gemm_7": _weights(64, 5),
        "head.bias": _weights(5),
        "shape": np.array([-1, 64], np.int64),
    }
    nodes = [
        _node("Conv", "/b/Conv", ["input:0", "backbone/conv1/kernel:0"], ["b/conv:0"], pads=[1] * 4),
        _node(
            "BatchNormalization",
            "/b/BN",
            ["b/conv:0", *(f"bn.{part}" for part in ("weight", "bias", "mean", "var"))],
            ["b/bn:0"],
        ),
        _node("Relu", "/b/Relu", ["b/bn:0"], ["b/relu:0"]),
        _node("MaxPool", "", ["b/relu:0"], ["pool out"], kernel_shape=[2, 2], strides=[2, 2]),
        _node("Reshape", "/flat", ["pool out", "shape"], ["x.1"]),
        _node("Gemm", "/head/Gemm", ["x.1", "onnx::Gemm_7", "head.bias"], ["raw::scores"]),
        _node("Softmax", "/head/Softmax", ["raw::scores"], ["Identity:0"], axis=1),
    ]
    initializers = [numpy_helper.from_array(v.astype(_dtype(kind, v)), n) for n, v in stored.items()]
    graph = helper.make_graph(
        nodes,
        "main graph",
        [helper.make_tensor_value_info("input:0", kind, ["batch", 3, 8, 8], doc_string="RGB, 0 to 1")],
        [helper.make_tensor_value_info("Identity:0", kind, ["batch", 5])],
        initializers,
        doc_string="the graph",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    model.producer_name, model.producer_version, model.domain = "paddle", "2.6", "org.example"
    model.doc_string, model.model_version = "a network for\ntests, ü", 7
    helper.set_model_props(model, {"character": "a\nb", "stride": "32"})
    return model


def _dtype(kind: int, value: np.ndarray) -> Any:
    return value.dtype if value.dtype.kind != "f" else helper.tensor_dtype_to_np_dtype(kind)


def _exported(form: str, model: onnx.ModelProto, folder: Path, **options: Any) -> tuple[TracedModule, Path]:
    """The module that was exported after all stages, saved and loaded between them, and the file."""
    onnx.save(model, folder / "net.onnx")
    traced = _reloaded(qtrace.from_onnx(folder / "net.onnx"), folder)
    if form == "float":
        return traced, qtrace.export(traced, folder / "out.onnx", **options)
    prepared = _reloaded(qtrace.prepare(flatten(traced)), folder)
    calibrated = _reloaded(qtrace.calibrate(prepared, [X], progress=False), folder)
    converted = _reloaded(qtrace.convert(calibrated), folder)
    return converted, qtrace.export(converted, folder / "out.onnx", format=form, **options)


def _reloaded(module: TracedModule, folder: Path) -> TracedModule:
    qtrace.save(module, folder / "m.mge")
    return qtrace.load(folder / "m.mge")


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ONNX_FORMS)
def test_a_file_says_of_itself_what_the_imported_one_said(form: str, tmp_path: Path) -> None:
    written = onnx.load(_exported(form, _model(), tmp_path)[1])
    assert (written.doc_string, written.graph.doc_string) == ("a network for\ntests, ü", "the graph")
    assert (written.graph.name, written.domain, written.model_version) == ("main graph", "org.example", 7)
    assert (written.graph.input[0].name, written.graph.input[0].doc_string) == ("input:0", "RGB, 0 to 1")
    assert written.graph.output[0].name == "Identity:0"
    facts = {entry.key: entry.value for entry in written.metadata_props}
    assert (facts["character"], facts["stride"]) == ("a\nb", "32")
    assert (written.producer_name, facts["qtrace.producer"]) == ("qtrace", "paddle 2.6")


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ONNX_FORMS)
def test_nodes_graph_and_ends_have_their_own_documents_and_metadata(form: str, tmp_path: Path) -> None:
    source = _model(21, 10)
    helper.set_model_props(source.graph, {"signature": "x -> y"})
    helper.set_model_props(source.graph.input[0], {"kind": "USER_INPUT"})
    helper.set_model_props(source.graph.output[0], {"unit": "%"})
    for node in source.graph.node:
        node.doc_string = f"about {node.name}"
        helper.set_model_props(node, {"scope": node.name, "trace": "net.py:3\nü"})
    graph = onnx.load(_exported(form, source, tmp_path)[1]).graph
    facts = [[(f.key, f.value) for f in part.metadata_props] for part in (graph, *graph.input, *graph.output)]
    assert facts == [[("signature", "x -> y")], [("kind", "USER_INPUT")], [("unit", "%")]]
    nodes = {node.name: node for node in graph.node}
    for name in ("/b/Conv", "/b/Relu", "/flat", "/head/Gemm", "/head/Softmax"):
        assert nodes[name].doc_string == f"about {name}"
        found = [(f.key, f.value) for f in nodes[name].metadata_props]
        assert found == [("scope", name), ("trace", "net.py:3\nü")]
    others = {n.doc_string for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")}
    assert others <= {""}


@each_of("form", ONNX_FORMS)
def test_axes_of_outputs_have_their_own_names(form: str, tmp_path: Path) -> None:
    nodes = [
        _node("Conv", "conv", ["x", "w"], ["c"], strides=[2, 2], pads=[1] * 4),
        _node("Relu", "relu", ["c"], ["y"]),
        _node("GlobalAveragePool", "pool", ["c"], ["z"]),
    ]
    ends = {"x": ["n", 3, "h", "w"], "y": ["n", 4, "h/2", "w"], "z": ["rows", 4, 1, 1]}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ends[name]) for name in ends}
    weight = numpy_helper.from_array(_weights(4, 3, 3, 3), "w")
    graph = helper.make_graph(nodes, "g", [infos["x"]], [infos["y"], infos["z"]], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    traced = qtrace.from_onnx(tmp_path / "net.onnx", {"x": X.shape})
    if form != "float":
        traced = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X], progress=False))
    options = {} if form == "float" else {"format": form}
    written = onnx.load(qtrace.export(traced, tmp_path / "out.onnx", **options)).graph
    axes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*written.input, *written.output)
    }
    # The file calls half the width "w" as well: a runtime that believes it would take both for equal.
    assert axes == ends | {"y": ["n", 4, "h/2", "y_3"]}


def _picking(stored: dict[str, np.ndarray], passed: bool = False) -> onnx.ModelProto:
    """Rows of scores of which the values decide how many there are, if ``passed`` beside the input itself."""
    nodes = [
        _node("Conv", "conv", ["x", "w"], ["c"]),
        _node("Reshape", "rows", ["c", "shape"], ["r"]),
        _node("Gather", "scores", ["r", "first"], ["s"], axis=1),
        _node("Greater", "hits", ["s", "zero"], ["h"]),
        _node("Compress", "pick", ["r", "h"], ["y"], axis=0),
    ]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])]
    infos.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["k", 4]))
    weights = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    ends = [infos[1], infos[0]] if passed else infos[1:]
    graph = helper.make_graph(nodes, "g", infos[:1], ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


_PICKED = {
    "w": _weights(4, 3, 1, 1),
    "shape": np.array([64, 4], np.int64),
    "first": np.array(0, np.int64),
    "zero": np.array(0, np.float32),
}


@each_of("form", ONNX_FORMS)
def test_sizes_that_a_file_fixes_beside_rows_that_values_decide(form: str, tmp_path: Path) -> None:
    onnx.save(_picking(_PICKED), tmp_path / "net.onnx")
    traced = qtrace.from_onnx(tmp_path / "net.onnx")
    if form != "float":
        traced = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X[:1]], progress=False))
    options = {} if form == "float" else {"format": form}
    (info,) = onnx.load(qtrace.export(traced, tmp_path / "out.onnx", **options)).graph.output
    assert [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim] == ["k", 4]


@each_of("form", ONNX_FORMS)
def test_an_output_that_is_an_input_keeps_its_name(form: str, tmp_path: Path) -> None:
    onnx.save(_picking(_PICKED, passed=True), tmp_path / "net.onnx")
    traced = qtrace.from_onnx(tmp_path / "net.onnx")
    if form != "float":
        traced = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X[:1]], progress=False))
    options = {} if form == "float" else {"format": form}
    path = qtrace.export(traced, tmp_path / "out.onnx", **options)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["y", "x"]
    assert np.array_equal(session.run(["x"], {"x": X[:1]})[0], X[:1])
    assert not any(node.op_type == "Identity" for node in onnx.load(path).graph.node)


def test_the_producer_of_the_first_file_survives_two_round_trips(tmp_path: Path) -> None:
    again = onnx.load(_exported("float", _model(), tmp_path)[1])
    _, path = _exported("onnx", again, tmp_path)
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert facts["qtrace.producer"] == "paddle 2.6"


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ONNX_FORMS)
def test_nodes_and_tensors_that_are_still_there_have_their_names(form: str, tmp_path: Path) -> None:
    graph = onnx.load(_exported(form, _model(), tmp_path)[1]).graph
    nodes = {node.name: node for node in graph.node}
    tensors = {name for node in graph.node for name in node.output}
    assert {"/b/Conv", "/b/Relu", "/flat", "/head/Gemm", "/head/Softmax"} <= set(nodes)
    assert nodes["/head/Gemm"].output[0] == "raw::scores"
    assert nodes["/b/Relu"].output[0] == "b/relu:0"
    assert {"pool out", "x.1"} <= tensors
    # The norm is folded in quantized graphs, so that the convolution gives the tensor of the norm.
    assert nodes["/b/Conv"].output[0] == ("b/conv:0" if form == "float" else "b/bn:0")
    weights = tensors if form == "onnx" else {tensor.name for tensor in graph.initializer}
    assert ("backbone/conv1/kernel:0" in weights) == (form != "onnx_float")


def _tensor_values(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    model = onnx.load(path)
    own = {info.name for info in model.graph.output}
    extra = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names if n not in own]
    model.graph.output.extend(extra)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, {"input:0": X}), strict=True))


@pytest.mark.parametrize(("form", "tolerance"), [("float", 1e-5), ("onnx", 0.1)])
def test_a_tensor_with_a_name_of_the_file_has_the_values_that_it_had_there(
    form: str, tolerance: float, tmp_path: Path
) -> None:
    source = _model()
    _, path = _exported(form, source, tmp_path)
    there = {name for node in source.graph.node for name in node.output}
    names = sorted(there & {name for node in onnx.load(path).graph.node for name in node.output})
    assert len(names) >= 6
    expected, values = (_tensor_values(p, names) for p in (tmp_path / "net.onnx", path))
    for name in names:
        limit = tolerance * float(np.abs(expected[name]).max())
        np.testing.assert_allclose(values[name], expected[name], atol=limit, err_msg=name)


@pytest.mark.quick(1)
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_file_with_its_own_names_is_verified_and_imported_again(runtime: str, tmp_path: Path) -> None:
    converted, path = _exported("onnx", _model(), tmp_path)
    report = qtrace.verify(path, converted, [X], runtime=runtime)
    assert report.passed, report.summary()
    again = qtrace.from_onnx(path)
    assert dict(again.named_modules()).keys() >= {"backbone.conv1", "head"}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("opset", "ir_version", "written"),
    [
        (9, 3, (13, 7)),
        (13, 7, (13, 7)),
        (16, 8, (16, 8)),
        (18, 8, (18, 8)),
        (20, 10, (20, 9)),
        (21, 10, (21, 10)),
    ],
)
def test_opset_and_ir_version_are_those_of_the_file_where_they_can_be(
    opset: int, ir_version: int, written: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = _model(opset, ir_version)
    if ir_version == 3:  # every stored tensor is an input there
        for tensor in source.graph.initializer:
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            source.graph.input.append(info)
    with caplog.at_level(logging.INFO, "qtrace"):
        model = onnx.load(_exported("onnx", source, tmp_path)[1])
    assert (model.opset_import[0].version, model.ir_version) == written
    assert [info.name for info in model.graph.input] == ["input:0"]
    messages = [m for m in caplog.messages if "opset" in m]
    expected = ["the file has opset 13, not 9 as the imported one: qtrace writes 13 to 21."]
    assert messages == (expected if opset == 9 else [])


def test_an_op_that_needs_a_higher_opset_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "qtrace"):
        onnx.save(_model(13, 7), tmp_path / "net.onnx")
        recipe = {"backend": "onnxruntime", "weight": {"bits": 4}}
        prepared = qtrace.prepare(qtrace.from_onnx(tmp_path / "net.onnx"), recipe)
        converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
        model = onnx.load(qtrace.export(converted, tmp_path / "out.onnx", packed=True))
    assert model.opset_import[0].version == 21
    assert (
        "the file has opset 21, not 13 as the imported one: it has integers of 4 or 16 bits."
        in caplog.messages
    )


def test_an_opset_that_the_user_asks_for_wins(tmp_path: Path) -> None:
    assert onnx.load(_exported("float", _model(17), tmp_path, opset=13)[1]).opset_import[0].version == 13


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "name"), [(TensorProto.FLOAT16, "float16"), (TensorProto.DOUBLE, "double")])
@pytest.mark.parametrize("form", ["float", "onnx"])
def test_ends_have_the_float_type_of_the_file(form: str, kind: int, name: str, tmp_path: Path) -> None:
    converted, path = _exported(form, _model(kind=kind), tmp_path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    types = [end.type for end in (*session.get_inputs(), *session.get_outputs())]
    assert types == [f"tensor({name})"] * 2
    report = qtrace.verify(path, converted, [X, X * 3])
    assert report.passed, report.summary()
    (scores,) = session.run(None, {"input:0": X.astype(helper.tensor_dtype_to_np_dtype(kind))})
    onnx.save(_model(), tmp_path / "float32.onnx")  # onnxruntime has no convolution of doubles
    expected = _tensor_values(tmp_path / "float32.onnx", ["Identity:0"])["Identity:0"]
    np.testing.assert_allclose(scores, expected, atol=0.05 if form == "onnx" else 2e-3)


def test_verify_rounds_both_sides_to_float16(tmp_path: Path) -> None:
    """Values between two steps of float16, so that an input that only one side rounds moves integers."""
    converted, path = _exported("onnx", _model(kind=TensorProto.FLOAT16), tmp_path)
    report = qtrace.verify(path, converted, [X * (1 + 2.0**-13)], max_lsb=0, min_equal=1.0)
    assert report.passed, report.summary()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"opset": 17', '"opset": "17"'),
        lambda text: text.replace('"opset": 17', '"opset": -1'),
        lambda text: text.replace("/b/Relu", "\\ud800"),
        lambda text: text.replace('"graph": "main graph"', '"graph": 3'),
        lambda text: text[:-1] + ', "more": 1}',
    ],
)
def test_a_damaged_origin_is_refused(damage: Callable[[str], str], tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "net.onnx")
    traced = qtrace.from_onnx(tmp_path / "net.onnx")
    traced.onnx_origin = damage(traced.onnx_origin)
    with pytest.raises(GraphError, match="imported"):
        qtrace.export(traced, tmp_path / "out.onnx")


def test_an_origin_comes_back_from_its_text() -> None:
    results = {"r0": FileResult("r:0", "", "Conv")}
    facts = (("key", "value"), ("other", ""))
    origin = FileOrigin(
        graph="g",
        opset=17,
        end_docs={"x": "pixels"},
        graph_facts=facts,
        end_facts={"x": facts},
        output_axes={"y": ("n", "", "2*h")},
        node_remarks={"n": FileRemark("text", facts)},
        results=results,
    )
    assert FileOrigin.from_json(origin.to_json()) == origin
    assert "node_remarks" not in replace(origin, node_remarks={}).to_json()


def test_a_part_of_a_network_keeps_what_the_file_says(tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "net.onnx")
    parts = split(qtrace.from_onnx(tmp_path / "net.onnx"), ["x_1"])
    written = onnx.load(qtrace.export(parts[-1].module, tmp_path / "head.onnx"))
    assert {node.name for node in written.graph.node} == {"/head/Gemm", "/head/Softmax"}
    assert "character" in {entry.key for entry in written.metadata_props}


def test_an_export_reads_the_record_of_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(_model(), tmp_path / "net.onnx")
    traced = qtrace.from_onnx(tmp_path / "net.onnx", {"input:0": X.shape})
    reads: list[TracedModule] = []
    read = exporter.read_origin
    monkeypatch.setattr(exporter, "read_origin", lambda module: reads.append(module) or read(module))
    qtrace.export(traced, tmp_path / "float.onnx")
    assert len(reads) == 1
