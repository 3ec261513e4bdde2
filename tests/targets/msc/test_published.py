"""The example that MSC's documentation lists, a 1x1 convolution and a ReLU, from a graph of ours."""

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
from qtrace.graph import GraphBuilder, MSCGraph, from_msc, to_traced
from tests.nets import net

_ATTRS = {
    "out_layout": "NCHW",
    "data_layout": "NCHW",
    "padding": "0,0,0,0",
    "groups": "1",
    "kernel_layout": "OIHW",
    "strides": "1,1",
    "dilation": "1,1",
    "out_dtype": "float32",
}


def _tensor(name: str, alias: str, *shape: int, layout: str = "NCHW") -> dict[str, Any]:
    return {
        "name": name,
        "alias": alias,
        "dtype": "float32",
        "layout": layout,
        "shape": list(shape),
        "prims": [],
    }


def _node(
    index: int, name: str, optype: str, parent: str, output: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "name": name,
        "shared_ref": "",
        "optype": optype,
        "parents": [parent] if parent else [],
        "inputs": [f"{parent}:0"] if parent else [],
        "outputs": [output],
        "attrs": {},
        "weights": {},
        **more,
    }


WEIGHT = _tensor("const", "", 6, 3, 1, 1, layout="OIHW")
DOCUMENT = {
    "name": "main",
    "inputs": ["inp_0:0"],
    "outputs": ["relu:0"],
    "nodes": [
        _node(0, "inp_0", "input", "", _tensor("inp_0:0", "inp_0", 1, 3, 4, 4)),
        _node(
            1,
            "conv2d",
            "nn.conv2d",
            "inp_0",
            _tensor("conv2d:0", "", 1, 6, 4, 4),
            attrs=_ATTRS,
            weights={"weight": WEIGHT},
        ),
        _node(2, "relu", "nn.relu", "conv2d", _tensor("relu:0", "relu", 1, 6, 4, 4)),
    ],
    "prims": [],
}
_INPUT, _RELU = "inp_0:0(inp_0)<1,3,4,4|float32|NCHW>", "relu:0(relu)<1,6,4,4|float32|NCHW>"
_CONV = "conv2d:0<1,6,4,4|float32|NCHW>"
CONV_LISTING = f"""\
N_1 conv2d <PARENTS: inp_0| CHILDERN: relu>
  IN: {_INPUT}
  OUT: {_CONV}
  OPTYPE: nn.conv2d
  SCOPE: block
  ATTRS: out_dtype=float32 strides=1,1 kernel_layout=OIHW groups=1 padding=0,0,0,0 data_layout=NCHW \
dilation=1,1 out_layout=NCHW\x20
  WEIGHTS:\x20
    weight: const<6,3,1,1|float32|OIHW>
"""
LISTING = f"""\
main <INPUTS: inp_0:0| OUTPUTS: relu:0>
N_0 inp_0 <PARENTS: | CHILDERN: conv2d>
  OUT: {_INPUT}
  OPTYPE: input

{CONV_LISTING}
N_2 relu <PARENTS: conv2d| CHILDERN: >
  IN: {_CONV}
  OUT: {_RELU}
  OPTYPE: nn.relu
  SCOPE: block

"""
X = np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = GraphBuilder("main")
    x = builder.input("inp_0", (1, 3, 4, 4))
    weight = builder.parameter("const", np.random.default_rng(1).standard_normal((6, 3, 1, 1)).astype("f"))
    y = builder.call_function(F.conv2d, x, weight, name="conv2d")
    traced = builder.finish(builder.call_function(F.relu, y, name="relu"))
    return qtrace.export(traced, tmp_path_factory.mktemp("msc") / "main.json", format="msc")


def test_our_document_of_the_example_is_the_published_one(path: Path) -> None:
    assert json.loads(path.read_text()) == DOCUMENT
    assert str(from_msc(path)) == LISTING


def test_a_network_of_layers_has_the_same_attributes_and_scopes(tmp_path: Path) -> None:
    module = net(
        lambda self, data: self.relu(self.conv(data)), conv=M.Conv2d(3, 6, 1, bias=False), relu=M.ReLU()
    )
    graph = from_msc(qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "g.json", format="msc"))
    assert [node.optype for node in graph.get_nodes()] == ["input", "nn.conv2d", "nn.relu"]
    assert [node.get_attrs() for node in graph.get_nodes()] == [{}, _ATTRS, {}]
    assert [node.scope for node in graph.get_nodes()] == [(), ("block",), ("block",)]
    assert [t.alias for t in graph.get_tensors()] == ["data", "", "", "relu_out"]


def test_the_published_document_is_read_and_listed() -> None:
    graph = MSCGraph.from_json(json.dumps(DOCUMENT))
    assert json.loads(graph.to_json()) == DOCUMENT
    assert str(graph) == LISTING
    old = json.loads(json.dumps(DOCUMENT))  # MSC's first documents have no prims
    del old["prims"], old["nodes"][1]["outputs"][0]["prims"]
    assert str(MSCGraph.from_json(json.dumps(old))) == LISTING


def test_nodes_and_tensors_are_objects() -> None:
    graph = MSCGraph.from_json(json.dumps(DOCUMENT))
    data, conv, relu = graph.get_nodes()
    assert str(conv) == CONV_LISTING
    assert (conv.parents, conv.children) == ((data,), (relu,))
    assert [str(t) for t in graph.get_inputs()] == [_INPUT]
    assert graph.input_at(0) is conv.input_at(0) is data.output_at(0) is graph.find_tensor("inp_0")
    assert graph.output_at(-1) is relu.output_at(0) is graph.get_outputs()[0]
    assert str(relu.output_at(0)) == _RELU
    assert conv.get_inputs() == data.get_outputs()
    assert conv.weight_at("weight") is graph.find_tensor("const") is graph.get_weights()[0]
    assert conv.weight_type("const") == "weight"
    assert graph.find_node("conv2d") is graph.find_producer(conv.output_at(0)) is conv
    assert graph.find_consumers(conv.output_at(0)) == (relu,)
    assert (conv.has_attr("groups"), conv.get_attr("groups"), conv.get_attr("zzz")) == (True, "1", None)
    weight = conv.weight_at("weight")
    assert (weight.ndim, weight.dim_at("I"), weight.layout_of("W"), weight.get_size()) == (4, 3, 3, 18)


def test_the_prototxt_is_the_published_one(tmp_path: Path) -> None:
    graph = MSCGraph.from_json(json.dumps(DOCUMENT))
    text = graph.visualize(tmp_path / "main.prototxt")
    assert text == (tmp_path / "main.prototxt").read_text()
    layers = text.split("layer {\n")
    assert layers[0].endswith('name: "main"\n')
    head = '  name: "conv2d"\n  type: "nn_conv2d"\n  top: "conv2d"\n  bottom: "inp_0"\n  layer_param {\n'
    assert layers[2].startswith(head)
    rows = {line.strip() for line in layers[2][len(head) :].splitlines()}
    expected = {"idx": 1, "input_0": _INPUT, "output_0": _CONV, "param_weight": "const<6,3,1,1|float32|OIHW>"}
    assert rows == {f"{key}: {json.dumps(v)}" for key, v in {**_ATTRS, **expected}.items()} | {"}"}


def test_the_published_document_runs() -> None:
    weight = np.random.default_rng(2).standard_normal((6, 3, 1, 1)).astype(np.float32)
    traced = to_traced(MSCGraph.from_json(json.dumps(DOCUMENT), {"const": weight}))
    expected = np.maximum(np.einsum("nchw,oc->nohw", X, weight[:, :, 0, 0]), 0)
    np.testing.assert_allclose(traced(mge.Tensor(X)).numpy(), expected, rtol=1e-5, atol=1e-6)
