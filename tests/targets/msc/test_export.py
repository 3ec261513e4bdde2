"""MSCGraph: weights beside the document, reading back, look-ups, layouts, free sizes, float graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import DataError, ExportError, GraphError
from qtrace.graph import from_msc
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import images, net

X = images(2, 4, 8, 8)


def _forward(self: Any, x: Any) -> Any:
    y = F.relu(self.conv(x))
    y = self.conv(y) + self.up(self.down(y))
    return self.fc(F.flatten(y, 1)), F.concat([y, self.table + y], axis=1)


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    module = net(
        _forward,
        conv=M.Conv2d(4, 4, 3, padding=1, groups=2),
        down=M.Conv2d(4, 6, 2, 2, groups=2),
        up=M.ConvTranspose2d(6, 4, 2, 2, groups=2),
        fc=M.Linear(256, 3),
        table=mge.Tensor(np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)),
    )
    return qtrace.trace(module, X, check=False)


@pytest.fixture(scope="module")
def converted(traced: TracedModule) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X], progress=False))


@pytest.mark.parametrize("stage", ["traced", "converted"])
def test_reading_back_gives_the_same_document_and_values(
    stage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    module = request.getfixturevalue(stage)
    path = qtrace.export(module, tmp_path / "g.json", format="msc")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.json", "g.npz", "g.prototxt"]
    graph = from_msc(path)
    assert graph.to_json() == path.read_text()
    stored = {t.name for node in graph.nodes for t in node.weights.values()}
    assert stored == set(graph.values)
    shaped = {t.name: t.shape for node in graph.nodes for t in node.weights.values()}
    assert {name: value.shape for name, value in graph.values.items()} == shaped
    assert any("qparams_weight" in node.attrs for node in graph.nodes) == (stage == "converted")
    first = path.with_suffix(".npz").read_bytes()
    qtrace.export(module, path, format="msc")
    assert path.with_suffix(".npz").read_bytes() == first  # equal models give equal files


def test_weights_have_their_values_and_grouped_ones_four_axes(traced: TracedModule, tmp_path: Path) -> None:
    graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
    for path, layout in (("conv", "OIHW"), ("down", "OIHW"), ("up", "IOHW")):
        weight = getattr(traced, path).weight.numpy()
        tensor = graph.find_tensor(f"{path}_weight")
        assert (tensor.layout, len(tensor.shape)) == (layout, 4)
        np.testing.assert_array_equal(graph.values[tensor.name], weight.reshape(-1, *weight.shape[2:]))
        attrs = graph.find_producer(tensor.name).attrs
        assert (attrs["kernel_layout"], attrs["out_layout"], attrs["out_dtype"]) == (
            layout,
            "NCHW",
            "float32",
        )
        assert attrs["groups"] == "2"


def test_nodes_and_tensors_are_found_by_name(traced: TracedModule, tmp_path: Path) -> None:
    graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
    relu = graph.find_node("relu_out")
    assert relu.optype == "nn.relu"
    assert graph.find_tensor("relu_out:0") is graph.find_tensor("relu_out") is relu.outputs[0]
    assert graph.find_producer("relu_out:0") is relu
    assert [n.optype for n in graph.find_consumers("relu_out")] == ["msc.conv2d_bias"] * 2
    assert [n.name for n in graph.find_consumers("conv_weight")] == ["conv_out", "conv_1_out"]
    assert graph.find_producer("conv_weight").name == "conv_out"
    assert graph.find_consumers(graph.outputs[0]) == ()
    for find in (graph.find_tensor, graph.find_producer, graph.find_consumers):
        with pytest.raises(GraphError, match="holds no tensor or weight 'zzz'"):
            find("zzz")
    with pytest.raises(GraphError, match="holds no node 'relu_out:0'"):
        graph.find_node("relu_out:0")


def test_the_prototxt_shows_tensors_with_sizes_type_and_layout(traced: TracedModule, tmp_path: Path) -> None:
    qtrace.export(traced, tmp_path / "g.json", format="msc")
    text = (tmp_path / "g.prototxt").read_text()
    assert '    output_0: "relu_out:0<2,4,8,8|float32|NCHW>"\n' in text
    assert '    param_weight: "conv_weight<4,2,3,3|float32|OIHW>"\n' in text


@pytest.mark.parametrize("stage", ["traced", "converted"])
def test_free_sizes_are_minus_one(stage: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    module = request.getfixturevalue(stage)
    path = qtrace.export(module, tmp_path / "g.json", format="msc", free_batch=True)
    graph = from_msc(path)
    assert graph.find_tensor("x:0").shape == graph.find_tensor("x").shape == (-1, 4, 8, 8)
    assert [graph.find_tensor(name).shape for name in graph.outputs] == [(-1, 3), (-1, 8, 8, 8)]
    assert graph.find_tensor("conv_weight").shape == (4, 2, 3, 3)
    assert "<-1,4,8,8|float32|NCHW>" in path.with_suffix(".prototxt").read_text()
    with pytest.raises(ExportError, match="free_batch of format msc is 3: give true or false"):
        qtrace.export(module, path, format="msc", free_batch=3)


def test_a_weight_may_have_any_name(tmp_path: Path) -> None:
    module = net(lambda self, x: F.relu(x) + self.file, file=mge.Parameter(np.ones((1, 4, 1, 1), np.float32)))
    path = qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "g.json", format="msc")
    assert from_msc(path).values["file"].shape == (1, 4, 1, 1)


def test_the_weights_may_not_have_the_documents_name(traced: TracedModule, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"g\.npz is the name of the file of weights"):
        qtrace.export(traced, tmp_path / "g.npz", format="msc")
    assert not list(tmp_path.iterdir())


def _drop_input(document: Any) -> None:
    del document["nodes"][0]


def _rename_output(document: Any) -> None:
    document["outputs"] = ["zzz:0"]


def _drop_key(document: Any) -> None:
    del document["nodes"][1]["attrs"]


def _change_weight(document: Any) -> None:
    node = next(n for n in document["nodes"] if "weight" in n["weights"])
    node["weights"]["weight"]["shape"] = [1]


DAMAGES = {
    _drop_input: "reads x:0, which no earlier node gives",
    _rename_output: "holds no tensor or weight 'zzz:0'",
    _drop_key: r"is no MSCGraph, or damaged: node 'conv_out' lacks 'attrs'\.",
    _change_weight: r"weight conv_weight of node conv_out has shape \[1\], and its value \[4, 2, 3, 3\]",
}


@each_of("damage", DAMAGES)
def test_a_damaged_document_is_refused(damage: Any, traced: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(traced, tmp_path / "g.json", format="msc")
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=DAMAGES[damage]):
        from_msc(path)


def test_damaged_files_are_refused(traced: TracedModule, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        from_msc(tmp_path / "g.json")
    path = qtrace.export(traced, tmp_path / "g.json", format="msc")
    weights = path.with_suffix(".npz").read_bytes()
    path.with_suffix(".npz").write_bytes(weights[:100])
    with pytest.raises(DataError, match=r"damaged: g\.npz, with the values of its weights, cannot be read"):
        from_msc(path)
    path.with_suffix(".npz").unlink()
    assert from_msc(path).values == {}
    for text in ("[]", "{", "null", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(DataError, match="is no MSCGraph, or damaged"):
            from_msc(path)
