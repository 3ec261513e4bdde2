"""Every format that qtrace writes carries its mark; files of other tools are told apart by it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import megengine.module as M
import pytest

import qtrace
from qtrace.errors import DataError, ExportError
from qtrace.export import formats
from qtrace.storage.outputs import foreign, foreign_output
from tests.each import each_of
from tests.nets import images

_BACKENDS = {"tflite": "tflite", "ncnn": "ncnn", "megengine": "megengine"}


@pytest.fixture(scope="module")
def traced():
    return qtrace.trace(M.Sequential(M.Conv2d(3, 4, 3, padding=1), M.ReLU()), images(4, 3, 8, 8), check=False)


@pytest.fixture(scope="module")
def converted(traced):
    graphs = {}
    for backend in ("onnxruntime", *_BACKENDS.values()):
        prepared = qtrace.prepare(traced, f"backend/{backend}")
        qtrace.calibrate(prepared, [images(4, 3, 8, 8)])
        graphs[backend] = qtrace.convert(prepared)
    return graphs


@each_of("name", formats())
def test_an_export_is_replaced_by_the_next_one(converted, tmp_path, name):
    graph = converted[_BACKENDS.get(name, "onnxruntime")]
    path = tmp_path / ("net.json" if name == "msc" else "net.out")
    for _ in range(2):
        qtrace.export(graph, path, format=name)
    assert foreign(path) == ""


@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".param", ".prototxt"])
def test_a_float_export_is_replaced_by_the_next_one(traced, tmp_path, suffix):
    for _ in range(2):
        qtrace.export(traced, tmp_path / f"net{suffix}")


def test_a_saved_model_is_replaced_by_the_next_one(traced, tmp_path):
    for _ in range(2):
        qtrace.save(traced, tmp_path / "net.mge")


_OTHERS = {
    "pickle": pickle.dumps({"qtrace": 1}),
    "ncnn": b"7767517\n1 1\nInput in0 0 1 in0\n",
    "tflite": bytes.fromhex("1c000000") + b"TFL3" + bytes(40),
    "caffe": b'name: "qtrace"\nlayer {\n}\n',
    "json": json.dumps({"name": "qtrace"}).encode(),
    "a recipe by hand": b"schema: qtrace/1\nrules: []\n",
    "page": b"<!doctype html><title>qtrace</title>",
    "dot": b'digraph "qtrace" {}',
    "cut": b"\x08\x08\x12\x06qtr",
    "weights": bytes(range(256)),
}


@each_of("contents", _OTHERS.values(), ids=_OTHERS)
def test_files_of_other_tools_stay(traced, tmp_path, contents):
    path = tmp_path / "net.out"
    path.write_bytes(contents)
    assert "nothing in it says that qtrace wrote it" in foreign(path)
    with pytest.raises(DataError, match="replace it with force=True"):
        qtrace.save(traced, path)
    with pytest.raises(ExportError, match="replace it with force=True"):
        qtrace.export(traced, path, format="onnx")
    assert path.read_bytes() == contents
    qtrace.save(traced, path, force=True)
    qtrace.load(path)
    path.write_bytes(contents)
    qtrace.export(traced, path, format="onnx", force=True)
    assert foreign(path) == ""


def test_an_onnx_file_belongs_to_its_producer(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    model = helper.make_model(helper.make_graph([node], "qtrace", values[:1], values[1:]))
    model.producer_name = "pytorch"
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    assert foreign(path)
    helper.set_model_props(model, {"note": "qtrace.fixed_for"})
    onnx.save(model, path)
    assert foreign(path)
    helper.set_model_props(model, {"note": "x", "qtrace.fixed_for": "tensorrt"})
    onnx.save(model, path)
    assert foreign(path) == ""


def test_an_empty_file_may_be_replaced(tmp_path):
    path = tmp_path / "net.onnx"
    assert foreign(path) == ""
    path.touch()
    assert foreign(path) == ""


def test_weights_beside_a_file_belong_to_whom_the_file_does(traced, tmp_path):
    weights = tmp_path / "net.bin"
    weights.write_bytes(b"of another tool")
    assert "net.bin exists" in foreign_output(tmp_path / "net.param", [weights])
    with pytest.raises(ExportError, match=r"net\.bin exists"):
        qtrace.export(traced, tmp_path / "net.param")
    assert not Path(tmp_path / "net.param").exists()
    for force in (True, False):
        qtrace.export(traced, tmp_path / "net.param", force=force)


def test_a_file_that_ends_within_its_producer_is_no_onnx_file_of_qtrace(tmp_path):
    """Field 2 of an ONNX model, whose length of 100 bytes is more than the file has."""
    (tmp_path / "net.onnx").write_bytes(b"\x12\x64qtrace")
    assert foreign(tmp_path / "net.onnx")
