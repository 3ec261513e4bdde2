"""Two ONNX files side by side, node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.errors import ExportError
from qtrace.extras.diff.onnx_files import FileDifference, compare_files
from tests.each import each_of

X = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)


def _weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32) / 3


def _model() -> onnx.ModelProto:
    stored = {
        "conv.w": _weights(4, 3, 3, 3),
        **{f"bn.{part}": np.abs(_weights(4)) + 0.5 for part in ("w", "b", "m", "v")},
        "two": np.float32([2]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "conv.w"], ["c"], "/conv", pads=[1, 1, 1, 1], strides=[1, 1]),
        helper.make_node("BatchNormalization", ["c", "bn.w", "bn.b", "bn.m", "bn.v"], ["n"], "/bn"),
        helper.make_node("Relu", ["n"], ["r"], "/relu"),
        helper.make_node("MaxPool", ["r"], ["y"], "/pool", kernel_shape=[2, 2]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, 7, 7])],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"classes": "a,b"})
    return model


def _compare(folder: Path, second: onnx.ModelProto, first: onnx.ModelProto | None = None) -> FileDifference:
    onnx.save(first or _model(), folder / "a.onnx")
    onnx.save(second, folder / "b.onnx")
    return compare_files(folder / "a.onnx", folder / "b.onnx")


def _lines(difference: FileDifference, section: str) -> list[str]:
    return [f"{c.sign} {c.name}: {c.text}" for c in difference.changes if c.section == section]


def test_equal_files_are_alike(tmp_path: Path) -> None:
    difference = _compare(tmp_path, _model())
    assert difference.empty
    assert difference.table() == "the files are alike"
    assert difference.unchanged["nodes"] == 4


def test_an_export_is_explained_node_by_node(tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "a.onnx")
    prepared = qtrace.prepare(qtrace.from_onnx(tmp_path / "a.onnx"), "onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    qtrace.export(converted, tmp_path / "b.onnx", weights="int8")
    difference = compare_files(tmp_path / "a.onnx", tmp_path / "b.onnx")
    conv, norm, *_ = _lines(difference, "nodes")
    assert conv.startswith("~ Conv /conv: runs on uint8 x int8 -> float; reads ")
    assert conv.endswith(", too; computes n instead of c")
    assert norm == "- BatchNormalization /bn: n is computed by Conv /conv"
    assert [c.sign for c in difference.changes if c.section == "metadata"] == ["+"] * 5
    assert {c.name for c in difference.changes if c.section == "rounded tensors"} >= {"x", "r"}
    weight = next(c for c in difference.changes if c.name == "conv.w")
    assert weight.text.startswith("float32 -> int8, 4 scales along axis 0, values differ by ")
    assert [c.name for c in difference.changes if c.section == "file"] == ["producer"]
    assert len(difference.table(max_width=60).splitlines()) < 60
    assert all(len(line) <= 60 for line in difference.table(max_width=60).splitlines())


def _rename_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = model.graph.node[3].output[0] = "z"


def _swap_pads(model: onnx.ModelProto) -> None:
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.append(helper.make_attribute("pads", [0, 0, 2, 2]))


def _retype(model: onnx.ModelProto) -> None:
    model.graph.node[2].op_type = "Sigmoid"


def _rewire(model: onnx.ModelProto) -> None:
    model.graph.node[3].input[0] = "n"


def _insert(model: onnx.ModelProto) -> None:
    model.graph.node.insert(3, helper.make_node("Mul", ["r", "two"], ["m"], "/mul"))
    model.graph.node[4].input[0] = "m"


def _change_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(_weights(4, 3, 3, 3) * np.float32(1.1), "conv.w")
    )


def _retype_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def _forget(model: onnx.ModelProto) -> None:
    del model.metadata_props[:]


def _raise_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 18


@each_of(
    ("edit", "section", "line"),
    [
        (_rename_output, "inputs and outputs", "- output y: float32 [n, 4, 7, 7]"),
        (_rename_output, "nodes", "~ MaxPool /pool: computes z instead of y"),
        (_swap_pads, "nodes", "~ Conv /conv: pads is [0, 0, 2, 2], not [1, 1, 1, 1]"),
        (_retype, "nodes", "~ Relu /relu: is Sigmoid"),
        (_rewire, "nodes", "~ MaxPool /pool: reads n instead of r"),
        (_insert, "nodes", "+ Mul /mul: computes m"),
        (_change_weight, "stored tensors", "~ conv.w: values differ by 20.0 dB"),
        (_retype_input, "inputs and outputs", "~ input x: float32 [n, 3, 8, 8] -> float16 [n, 3, 8, 8]"),
        (_forget, "metadata", "- classes: 'a,b'"),
        (_raise_opset, "file", "~ opset ai.onnx: 17 -> 18"),
    ],
)
def test_each_kind_of_change_is_a_line(edit: Any, section: str, line: str, tmp_path: Path) -> None:
    second = _model()
    edit(second)
    assert line in _lines(_compare(tmp_path, second), section)


def _annotate(model: onnx.ModelProto) -> None:
    part: Any
    for part in (model.graph.node[0], model.graph.output[0]):
        part.metadata_props.add(key="layer", value="stem")


@each_of(
    ("first", "second", "sign"),
    [(False, True, "layer is 'stem'"), (True, False, "has no layer any more"), (True, True, None)],
)
def test_metadata_of_nodes_and_ends_are_compared(
    tmp_path: Path, first: bool, second: bool, sign: str | None
) -> None:
    models = [_model(), _model()]
    for model, noted in zip(models, (first, second), strict=True):
        if noted:
            _annotate(model)
    difference = _compare(tmp_path, models[1], models[0])
    assert _lines(difference, "nodes") == ([f"~ Conv /conv: {sign}"] if sign else [])
    ends = _lines(difference, "inputs and outputs")
    assert len(ends) == (1 if sign else 0)
    assert all("[layer: 'stem']" in line for line in ends)


def test_a_changed_document_string_of_a_node_is_a_line(tmp_path: Path) -> None:
    models = [_model(), _model()]
    models[0].graph.node[2].doc_string = "as trained"
    models[1].graph.node[2].doc_string = "pruned"
    (line,) = _lines(_compare(tmp_path, models[1], models[0]), "nodes")
    assert line == "~ Relu /relu: doc_string is 'pruned', not 'as trained'"


def test_diff_ignores_names_of_stored_tensors(tmp_path: Path) -> None:
    second = _model()
    second.graph.initializer[0].name = second.graph.node[0].input[1] = "other"
    assert _lines(_compare(tmp_path, second), "nodes") == []


def test_constants_are_stored_tensors(tmp_path: Path) -> None:
    second = _model()
    weight = second.graph.initializer[0]
    second.graph.node.insert(0, helper.make_node("Constant", [], ["conv.w"], value=weight))
    del second.graph.initializer[0]
    difference = _compare(tmp_path, second)
    assert difference.empty, difference.table()


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"no model")
    with pytest.raises(ExportError, match=r"b\.onnx"):
        compare_files(tmp_path / "a.onnx", tmp_path / "b.onnx")
