"""The benchmark of what files keep of their own: it finds what is lost, and the page shows its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import kept
from benchmarks.kept import KeptRow, compare, main
from scripts.site import measured


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file that says something of itself, and the quantized one."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "/conv", doc_string="the first", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["y"], "/relu"),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])]
    ends += [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, "h", "w"])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    model.producer_name = "torch"
    helper.set_model_props(model, {"classes": "a,b"})
    folder = tmp_path_factory.mktemp("kept")
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx", kept.quantized(folder / "net.onnx", folder / "out.onnx", (2, 3, 8, 8))


def test_a_quantized_file_keeps_what_the_first_one_says(files: tuple[Path, Path]) -> None:
    row = compare(*files, "net")
    # The graph's name, the classes, the node's document, and six of inputs and outputs.
    assert (row.tool, row.said, row.lost) == ("torch", 9, ())
    assert (row.opset, row.nodes) == ((11, 13), (2, 2))
    assert row.cells()[2:5] == ("9 of 9", "11 to 13", "2 of 2")


def test_what_is_lost_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = onnx.load(files[1])
    del model.metadata_props[:]
    next(node for node in model.graph.node if node.name == "/conv").doc_string = ""
    model.graph.output[0].type.tensor_type.shape.dim[3].dim_value = 8
    onnx.save(model, tmp_path / "less.onnx")
    row = compare(files[0], tmp_path / "less.onnx", "net")
    assert row.lost == ("model: classes", "/conv: doc_string", "axes of outputs")
    assert row.cells()[2].startswith("6 of 9; lost: model: classes")


def test_a_batch_that_is_opened_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = onnx.load(files[0])
    for end in (*model.graph.input, *model.graph.output):
        end.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "one.onnx")
    row = compare(tmp_path / "one.onnx", files[1], "net")
    assert row.lost == ()
    assert row.cells()[2] == "9 of 9, batch opened"


def test_the_command_fails_if_something_is_lost(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "quantized", lambda path, out, shape: files[1])
    assert main([f"{files[0]}=2x3x8x8", "--diff"]) == 0
    assert "| `net.onnx` | torch | 9 of 9 |" in (printed := capsys.readouterr().out)
    assert "opset ai.onnx: 11 -> 13" in printed
    lost = KeptRow("net", "torch", 9, ("model: classes",), False, (11, 13), (2, 2), {})
    monkeypatch.setattr(kept, "compare", lambda *_: lost)
    assert main([str(files[0])]) == 1


def test_the_page_shows_twelve_files_that_lose_nothing() -> None:
    rows = measured.kept().splitlines()[2:]
    assert len(rows) == 12
    # scrfd names axes of its outputs that cannot change; these have numbers.
    assert [row for row in rows if "lost" in row and not row.startswith("| `scrfd.onnx`")] == []
