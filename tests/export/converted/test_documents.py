"""MSCGraph and Graphviz documents: what they say is what the graph is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from tests.nets import ResNet, images, net, randomize


def _converted(module: M.Module, *x: np.ndarray, config: Any = None) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, *x, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


@pytest.fixture(scope="module")
def resnet() -> TracedModule:
    return _converted(randomize(ResNet(4, (1, 1, 1, 1))), images(2, 3, 32, 32))


def _msc(converted: TracedModule, folder: Path) -> dict[str, Any]:
    path = qtrace.export(converted, folder / "g.json", format="msc")
    assert sorted(p.name for p in folder.iterdir()) == ["g.json", "g.npz", "g.prototxt"]
    return json.loads(path.read_text())


NODE = {"index", "name", "shared_ref", "optype", "parents", "inputs", "outputs", "attrs", "weights"}
TENSOR = {"name", "alias", "dtype", "layout", "shape", "prims"}


def test_an_msc_graph_is_complete(resnet: TracedModule, tmp_path: Path) -> None:
    document = _msc(resnet, tmp_path)
    assert set(document) == {"name", "inputs", "outputs", "nodes", "prims"}
    earlier: dict[str, Any] = {}
    for index, node in enumerate(document["nodes"]):
        assert set(node) == NODE
        assert node["index"] == index
        assert node["name"] not in earlier
        # As MSC reads it: parents come first, and a tensor is found by its node and its index.
        assert set(node["parents"]) <= set(earlier)
        for name in node["inputs"]:
            producer, _, number = name.rpartition(":")
            assert producer in node["parents"]
            assert earlier[producer]["outputs"][int(number)]["name"] == name
        for tensor in (*node["outputs"], *node["weights"].values()):
            assert set(tensor) == TENSOR
            assert len(tensor["layout"]) in (0, len(tensor["shape"]))
        assert all(isinstance(v, str) for v in node["attrs"].values())
        earlier[node["name"]] = node
    assert document["inputs"] == ["x:0"]
    assert document["outputs"] == ["fc_out:0"]
    kinds = {node["optype"] for node in document["nodes"]}
    assert {"input", "msc.conv2d_bias", "nn.relu", "nn.max_pool2d", "add", "msc.linear_bias"} <= kinds


def test_weights_layouts_and_parameters(resnet: TracedModule, tmp_path: Path) -> None:
    nodes = {n["name"]: n for n in _msc(resnet, tmp_path)["nodes"]}
    conv = nodes["conv1_out"]
    assert conv["outputs"][0]["layout"] == "NCHW"
    assert conv["attrs"]["strides"] == "2,2"
    assert conv["attrs"]["padding"] == "3,3,3,3"
    weight, bias = conv["weights"]["weight"], conv["weights"]["bias"]
    assert (weight["layout"], weight["shape"], weight["dtype"]) == ("OIHW", [4, 3, 7, 7], "float32")
    assert (bias["layout"], bias["shape"]) == ("O", [4])
    qparams = json.loads(conv["attrs"]["qparams_weight"])
    assert qparams["scale"] == resnet.qsites.conv1_weight.qparams().scale.tolist()
    read = json.loads(conv["attrs"]["qparams_input_0"])
    assert read == {
        "site": "x",
        "scheme": "uint8 affine",
        "scale": resnet.qsites.x.qparams().scale.item(),
        "zero_point": resnet.qsites.x.qparams().zero_point.item(),
    }
    # Fused: conv and relu are one kernel, so that only the result is rounded.
    assert "qparams_output_0" not in conv["attrs"]
    assert json.loads(nodes["relu_out"]["attrs"]["qparams_output_0"])["site"] == "relu_out"
    assert nodes["flatten_out"]["outputs"][0]["layout"] == "NC"
    assert nodes["fc_out"]["weights"]["weight"]["layout"] == "OI"


def test_shared_layers_constants_and_transposed_layouts(tmp_path: Path) -> None:
    conv, x = M.Conv2d(4, 4, 3, padding=1, groups=2), images(2, 4, 8, 8)
    module = net(lambda self, x: F.transpose(self.c(F.relu(self.c(x))), (0, 2, 3, 1)) * 0.5, c=conv)
    nodes = {n["name"]: n for n in _msc(_converted(module, x), tmp_path)["nodes"]}
    convs = [n for n in nodes.values() if n["optype"] == "msc.conv2d_bias"]
    assert [n["shared_ref"] for n in convs] == ["", convs[0]["name"]]
    assert convs[0]["weights"]["weight"]["layout"] == "OIHW"
    (transpose,) = (n for n in nodes.values() if n["optype"] == "permute_dims")
    assert transpose["outputs"][0]["layout"] == "NHWC"


def test_the_prototxt_has_the_same_layers(resnet: TracedModule, tmp_path: Path) -> None:
    document = _msc(resnet, tmp_path)
    text = (tmp_path / "g.prototxt").read_text()
    layers = text.split("layer {\n")[1:]
    assert len(layers) == len(document["nodes"])
    for layer, node in zip(layers, document["nodes"], strict=True):
        assert re.findall(r'^  (?:name|top): "(.*)"$', layer, re.M) == [node["name"]] * 2
        assert re.findall(r'^  bottom: "(.*)"$', layer, re.M) == node["parents"]
        assert re.findall(r"^    idx: (.*)$", layer, re.M) == [str(node["index"])]
        assert layer.count("    qparams_") == sum(k.startswith("qparams_") for k in node["attrs"])


def test_the_two_documents_may_not_have_one_name(resnet: TracedModule, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"g\.prototxt is the name of the document for viewers"):
        qtrace.export(resnet, tmp_path / "g.prototxt", format="msc")
    assert list(tmp_path.iterdir()) == []


def test_edges_say_how_tensors_are_quantized(resnet: TracedModule, tmp_path: Path) -> None:
    text = qtrace.export(resnet, tmp_path / "g.dot").read_text()
    edges = dict(re.findall(r'^  ("[^"]+" -> "[^"]+") \[label="([^"]*)"', text, re.M))
    x, relu = (resnet.qsites.x.qparams(), resnet.qsites.relu_out.qparams())
    assert edges['"x" -> "conv1_out"'] == rf"uint8 affine s={x.scale:.4g} z={x.zero_point}\n2x3x32x32"
    assert edges['"conv1_out" -> "relu_out"'] == "2x4x16x16"
    # Carried through a pool, with the same parameters.
    assert edges['"maxpool_out" -> "stages_0_0_conv1_out"'].startswith(f"uint8 affine s={relu.scale:.4g}")
    assert '"fc_out" -> "->0"' in edges
    boxes = dict(re.findall(r'^  "([^"]+)" \[label="([^"]*)"', text, re.M))
    assert boxes["->0"] == "output"
    assert r"\nweight 4x3x7x7 int8 sym per-channel(0) narrow s=" in boxes["conv1_out"]
    assert {end for edge in edges for end in re.findall(r'"([^"]+)"', edge)} <= set(boxes)


def test_graphviz_reads_it(resnet: TracedModule, tmp_path: Path) -> None:
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    path = qtrace.export(resnet, tmp_path / "g.dot")
    subprocess.run(["dot", "-Tsvg", str(path), "-o", str(tmp_path / "g.svg")], check=True)


def test_several_inputs_outputs_and_float_ops(tmp_path: Path) -> None:
    a, b = images(2, 4, 8, 8), images(2, 4, 8, 8, seed=1)
    conv = M.Conv2d(4, 4, 3, padding=1)
    module = net(lambda self, a, b: (self.c(a), F.exp(b), F.split(a, 2, axis=1)[1]), c=conv)
    converted = _converted(module, a, b)
    document = _msc(converted, tmp_path)
    assert document["inputs"] == ["a:0", "b:0"]
    assert len(document["outputs"]) == 3
    assert document["outputs"][2].endswith(":1")
    text = qtrace.export(converted, tmp_path / "g.gv").read_text()
    assert '-> "->2" [label=' in text
    assert 'label="output 1"' in text
