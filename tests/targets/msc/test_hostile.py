"""Documents from anywhere: what is wrong is one sentence that names the node, and nothing is run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import DataError, GraphError
from qtrace.graph import MSCGraph, from_msc, to_traced
from tests.each import each_of
from tests.nets import images, net

X = images(2, 4, 8, 8)
Edit = Callable[[Any], Any]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> MSCGraph:
    module = net(
        lambda self, x: F.softmax(self.bn(F.relu(self.conv(x))[:, 1:]), -3) + x.shape[1],
        conv=M.Conv2d(4, 4, 3),
        bn=M.BatchNorm2d(3),
    )
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False))
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    folder = tmp_path_factory.mktemp("msc")
    return from_msc(qtrace.export(converted, folder / "g.json", format="msc"))


def _node(document: Any, optype: str) -> Any:
    return next(n for n in document["nodes"] if n["optype"] == optype)


def _edited(document: Any, optype: str, key: str, edit: Edit) -> None:
    """Edits an attribute of a node that is a JSON text."""
    attrs = _node(document, optype)["attrs"]
    value = json.loads(attrs[key])
    attrs[key] = json.dumps(edit(value))


def _call(optype: str, **changes: Any) -> Edit:
    return lambda document: _edited(document, optype, "call", lambda call: {**call, **changes})


def _set(*path: Any, to: Any) -> Edit:
    def edit(document: Any) -> None:
        *parents, last = path
        for part in parents:
            document = document[part]
        document[last] = to

    return edit


def _swap(document: Any) -> None:
    nodes = document["nodes"]
    nodes[1], nodes[2] = nodes[2], nodes[1]


def _cycle(document: Any) -> None:
    first, second = document["nodes"][1:3]
    first["parents"].append(second["name"])
    first["inputs"].append(second["outputs"][0]["name"])


UNREADABLE: dict[str, tuple[Edit, str]] = {
    "no name": (lambda d: d.pop("name"), "the graph lacks 'name'"),
    "nodes of text": (_set("nodes", to="abc"), "the graph has the nodes 'abc': it must be a list"),
    "a node of numbers": (_set("nodes", 1, to=[1]), r"node 1 is \[1\], not an object"),
    "no outputs": (lambda d: d["nodes"][1].pop("outputs"), "node 'conv_out' lacks 'outputs'"),
    "a number for a name": (_set("nodes", 1, "name", to=3), "node 1 has the name 3: it must be text"),
    "a float for an index": (_set("nodes", 1, "index", to=0.5), "has the index 0.5: it must be an integer"),
    "a size of text": (
        _set("nodes", 0, "outputs", 0, "shape", 0, to="2"),
        "'2' in its shape: it must be an inte",
    ),
    "a negative size": (_set("nodes", 0, "outputs", 0, "shape", 0, to=-2), "a size is -1, 0 or more"),
    "a true size": (
        _set("nodes", 0, "outputs", 0, "shape", 0, to=True),
        "True in its shape: it must be an inte",
    ),
    "attrs of numbers": (_set("nodes", 1, "attrs", "groups", to=1), "has 1 in its attrs: it must be text"),
    "weights in a list": (_set("nodes", 1, "weights", to=[]), r"has the weights \[\]: it must be an object"),
    "two of a name": (_set("nodes", 2, "name", to="conv_out"), "two nodes have the name conv_out"),
    "a tensor twice": (_set("nodes", 2, "outputs", 0, "name", to="conv_out:0"), "conv_out:0 is given twice"),
    "a swap": (_swap, "reads conv_out:0, which no earlier node gives"),
    "a cycle": (_cycle, "node conv_out reads relu_out:0, which no earlier node gives"),
    "a stranger": (_set("nodes", 1, "parents", to=["zzz"]), "reads x:0, and x is not among its parents"),
    "an unknown output": (_set("outputs", to=["zzz:0"]), "holds no tensor or weight 'zzz:0'"),
    "too few prims": (_set("nodes", 0, "outputs", 0, "prims", to=["N"]), "has 1 prims for 4 axes"),
    "unknown prims": (
        _set("nodes", 0, "outputs", 0, "prims", to=["N"] * 4),
        "names the prim N, which is not the",
    ),
}


@each_of("case", UNREADABLE)
def test_a_document_of_the_wrong_form_is_refused(case: str, graph: MSCGraph) -> None:
    edit, message = UNREADABLE[case]
    document = json.loads(graph.to_json())
    edit(document)
    with pytest.raises(DataError, match=message) as caught:
        MSCGraph.from_json(json.dumps(document))
    assert str(caught.value).count("\n") == 0


@each_of("text", ["", "[]", "null", "3", '"x"', "{", "[" * 100_000, '{"name": ' * 5000])
def test_texts_that_are_no_documents_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="the text is no MSCGraph, or damaged: it is"):
        MSCGraph.from_json(text)
    with pytest.raises(DataError, match="from_json takes the text of a document, not a dict"):
        MSCGraph.from_json({})  # type: ignore[arg-type]


SOFTMAX, BN, GETITEM = "nn.softmax", "nn.batch_norm", "strided_slice"
NO_GRAPH: dict[str, tuple[Edit, str]] = {
    "a function of Python's": (
        _call(SOFTMAX, function="os:system", args=["echo"]),
        "would call the function os:system, which is not on the allow-list",
    ),
    "a function of ours": (
        _call(SOFTMAX, function="qtrace:save"),
        "call the function qtrace:save, which is not on",
    ),
    "no name": (_call(SOFTMAX, function="softmax"), "softmax is no name of the form pkg.mod:Name"),
    "a name of numbers": (_call(SOFTMAX, function=[1]), "is no name of the form"),
    "a method": (_call(GETITEM, method="numpy"), "calls the method numpy, which is not on the allow-list"),
    "a method of none": (_call(GETITEM, args=[1, 2]), "calls the method __getitem__ of no tensor"),
    "a module class": (
        _call(BN, module="os:PathLike"),
        "names the module class os:PathLike, which is not on",
    ),
    "a module's method": (
        _call(BN, attributes={"forward": 1}),
        "its module has the attribute forward, which no file may set",
    ),
    "an attribute of text": (
        lambda d: _edited(d, BN, "call", lambda c: {**c, "attributes": {**c["attributes"], "eps": "a"}}),
        "has the eps 'a'|has the eps a: it must be",
    ),
    "a module without attributes": (_call(BN, attributes=None), "its module lacks attributes or tensors"),
    "a path": (_call(BN, path="a..b"), r"its module has the path a\.\.b, which is none"),
    "no callee": (
        lambda d: _edited(d, SOFTMAX, "call", lambda c: {}),
        "it calls no function, method, kernel or",
    ),
    "a list for a call": (lambda d: _edited(d, SOFTMAX, "call", lambda c: []), "its call is no object"),
    "no JSON": (lambda d: _node(d, SOFTMAX)["attrs"].update(call="{"), r"its call is no JSON"),
    "deep JSON": (
        lambda d: _node(d, SOFTMAX)["attrs"].update(call='{"function": ' * 9999),
        r"its call is no JSON \(RecursionError\)",
    ),
    "a deep argument": (
        _call(GETITEM, args=[{"ref": "input_0"}, json.loads("[" * 300 + "]" * 300)]),
        "cannot be rebuilt",
    ),
    "an unknown argument": (_call(SOFTMAX, args=[{"eval": "1"}]), "'eval' of str is no argument"),
    "an unknown input": (
        _call(SOFTMAX, args=[{"ref": "input_7"}]),
        "reads input_7, which is none of its inputs",
    ),
    "a reference of numbers": (
        _call(SOFTMAX, args=[{"ref": [1]}]),
        "which is none of its inputs and weights",
    ),
    "arguments by text": (_call(SOFTMAX, args="x"), "its arguments are no list"),
    "too few arguments": (_call(SOFTMAX, args=[]), "cannot be rebuilt"),
    "an impossible axis": (_call(SOFTMAX, args=[{"ref": "input_0"}, 77]), "softmax fails on"),
    "an unknown kind": (
        lambda d: (_node(d, SOFTMAX)["attrs"].pop("call"), _node(d, SOFTMAX).update(optype="zzz")),
        r"\(zzz\) cannot be rebuilt: the document does not say how it is called",
    ),
    "other strides": (
        lambda d: _node(d, "msc.conv2d_bias")["attrs"].update(strides="2,2"),
        r"it gives \[2, 4, 3, 3\] float32, and the document says \[2, 4, 6, 6\] float32",
    ),
    "strides of text": (
        lambda d: _node(d, "msc.conv2d_bias")["attrs"].update(strides="a"),
        "its strides is 'a': give 2 integers",
    ),
    "a scheme": (
        lambda d: _edited(d, "msc.conv2d_bias", "qparams_weight", lambda q: {**q, "scheme": "int99 sym"}),
        "bits is 99|describes no scheme",
    ),
    "a negative scale": (
        lambda d: _edited(d, "msc.conv2d_bias", "qparams_weight", lambda q: {**q, "scale": [-1.0] * 4}),
        "lacks a scale of positive numbers",
    ),
    "other scales": (
        lambda d: _edited(d, "msc.conv2d_bias", "qparams_weight", lambda q: {**q, "scale": [1.0]}),
        "QParams: scale has shape|takes 4 scales, not 1",
    ),
    "roundings of text": (
        lambda d: _node(d, "msc.conv2d_bias")["attrs"].update(roundings='{"weight": "a"}'),
        "its attribute 'roundings' is damaged",
    ),
    "an unknown site": (
        lambda d: _node(d, "msc.conv2d_bias")["attrs"].update(roundings='{"weight": [["zzz", []]]}'),
        "rounded at site 'zzz', whose scale is nowhere in the document",
    ),
    "a place of text": (
        lambda d: _node(d, "msc.conv2d_bias")["attrs"].update(
            stored='{"weight": ["__class__", "parameter"]}'
        ),
        "its weight is stored at __class__, which is no path",
    ),
    "a dtype": (_set("nodes", 0, "outputs", 0, "dtype", to="object"), "input x:0: 'object' is no dtype"),
    "a free input": (
        _set("nodes", 0, "outputs", 0, "shape", 0, to=-1),
        "is open, and traced_shape is",
    ),
    "no input": (_set("inputs", to=[]), "node x is an input, and the graph does not list it"),
    "an input of an op": (_set("inputs", to=["x:0", "relu_out:0"]), "relu_out, which is no input of its own"),
}


@each_of("case", NO_GRAPH)
def test_a_graph_that_cannot_be_built_is_refused(case: str, graph: MSCGraph) -> None:
    edit, message = NO_GRAPH[case]
    document = copy.deepcopy(json.loads(graph.to_json()))
    edit(document)
    edited = MSCGraph.from_json(json.dumps(document), graph.values)
    with pytest.raises(GraphError, match=message) as caught:
        to_traced(edited)
    assert str(caught.value).count("\n") == 0


def test_kernels_are_held_to_their_state(graph: MSCGraph) -> None:
    document = json.loads(graph.to_json())
    (node,) = (n for n in document["nodes"] if '"kernel"' in n["attrs"].get("call", ""))
    for change, message in (
        ({"kernel": "Zzz"}, "applies the kernel Zzz, which is not on the allow-list"),
        ({"kernel": ["a"]}, "which is not on the allow-list"),
        (
            {"state": {"dict": [["axis", "a"]]}},
            "gives the op GetVarShape the axis a, which that does not take",
        ),
        ({"state": None}, "its kernel lacks a state"),
        ({"args": [1]}, "it applies a kernel to what is no tensor"),
    ):
        call = {**json.loads(node["attrs"]["call"]), **change}
        edited = copy.deepcopy(document)
        edited["nodes"][node["index"]]["attrs"]["call"] = json.dumps(call)
        with pytest.raises(GraphError, match=message):
            to_traced(MSCGraph.from_json(json.dumps(edited), graph.values))


def test_values_of_other_types_are_refused(graph: MSCGraph, tmp_path: Path) -> None:
    values = {**graph.values, "conv_weight": graph.values["conv_weight"].astype(np.complex64)}
    with pytest.raises(GraphError, match="'complex64' is no dtype of plain tensors"):
        to_traced(MSCGraph.from_json(graph.to_json(), values))
    values["conv_weight"] = np.zeros((1, 2), np.float32)
    with pytest.raises(
        DataError, match=r"conv_weight of node conv_out has shape \[4, 4, 3, 3\], and its value"
    ):
        MSCGraph.from_json(graph.to_json(), values)
