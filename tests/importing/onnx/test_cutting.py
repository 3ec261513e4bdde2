"""`from_onnx(outputs=...)`: a file cut at named tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from megengine import Tensor
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import ImportingError
from qtrace.graph.interface import read_interface
from qtrace.graph.opaque import opaque_calls
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights

X, Z = weights(2, 3, 8, 8), weights(2, 4, seed=1)


def _two_heads(tail: str = "NonZero") -> Path | object:
    """A backbone, a head that reads a second input, and behind it an op without an equal."""
    nodes = [
        node("Conv", "x backbone.weight", "features"),
        node("GlobalAveragePool", "features", "pooled"),
        node("Flatten", "pooled", "flat"),
        node("Add", "flat z", "scores"),
        node(tail, "scores", "places"),
    ]
    stored = {"backbone.weight": weights(4, 3, 1, 1)}
    dtypes = {"places": np.int64}
    return model(nodes, {"x": ["N", 3, 8, 8], "z": ["N", 4]}, ["places"], stored, dtypes=dtypes)


def test_import_drops_nodes_after_the_chosen_outputs(tmp_path: Path) -> None:
    path = save(_two_heads(), tmp_path)
    assert opaque_calls(qtrace.from_onnx(path))
    traced = qtrace.from_onnx(path, outputs=["scores", "features"])
    interface = read_interface(traced)
    assert interface is not None
    assert [value.name for value in interface.outputs] == ["scores", "features"]
    wanted = ReferenceEvaluator(str(save(_shown(), tmp_path, "shown.onnx"))).run(None, {"x": X, "z": Z})
    for result, expected in zip(traced(Tensor(X), Tensor(Z)), wanted, strict=True):
        np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)


def _shown() -> object:
    proto = _two_heads("Relu")
    del proto.graph.output[:]
    for name in ("scores", "features"):
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto


def test_inputs_that_nothing_needs_are_left_out(tmp_path: Path) -> None:
    traced = qtrace.from_onnx(save(_two_heads(), tmp_path), outputs=["flat"])
    assert [n.name for n in traced.graph.inputs[1:]] == ["x"]
    for batch in (X, np.concatenate([X, X])):  # the batch stays open
        assert traced(Tensor(batch)).shape[0] == len(batch)


@each_of(
    ("outputs", "words"),
    [
        (["score"], "no tensor 'score'; names like it are 'scores'"),
        ([], "no list of tensors"),
        ("scores", "no list of tensors"),
        (["scores", "scores"], "names a tensor twice"),
    ],
)
def test_names_that_cannot_be_cut_at(outputs: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ImportingError, match=words):
        qtrace.from_onnx(save(_two_heads(), tmp_path), outputs=outputs)


def _classifier(zipped: bool = False) -> onnx.ModelProto:
    """A classifier whose labels are names, as scikit-learn's exports have them."""
    nodes = [
        node("MatMul", "x w", "scores"),
        node("Softmax", "scores", "chances", axis=-1),
        node("ArgMax", "chances", "place", axis=-1, keepdims=0),
        node("Gather", "classes place", "name"),
        node("Identity", "name", "label"),
    ]
    proto = model(nodes, {"x": ["N", 3]}, ["label", "chances"], {"w": weights(3, 4)})
    proto.graph.initializer.append(helper.make_tensor("classes", TensorProto.STRING, [4], list("abcd")))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.STRING
    if zipped:
        proto.graph.node.append(
            helper.make_node(
                "ZipMap", ["chances"], ["map"], domain="ai.onnx.ml", classlabels_strings=[*"abcd"]
            )
        )
        proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
        element = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
        kind = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, element))
        proto.graph.output[1].CopyFrom(helper.make_value_info("map", kind))
    return proto


@pytest.mark.parametrize("zipped", [False, True])
def test_names_of_classes_are_refused_with_what_is_read_instead(zipped: bool, tmp_path: Path) -> None:
    path = save(_classifier(zipped), tmp_path)
    with pytest.raises(ImportingError) as caught:
        qtrace.from_onnx(path)
    assert str(caught.value) == (
        f"{path}: 'classes' holds strings, which MegEngine lacks, and output 'label' is made of them: read "
        "the file by from_onnx(outputs=['chances', 'place']) (--outputs), and make the strings of what that "
        "gives."
    )
    x = weights(2, 3)
    chances, place = qtrace.from_onnx(path, outputs=["chances", "place"])(Tensor(x))
    np.testing.assert_array_equal(place.numpy(), chances.numpy().argmax(-1))
    with pytest.raises(ImportingError, match=r"outputs=\['place'\]\)"):
        qtrace.from_onnx(path, outputs=["label"])


def test_strings_alone_are_left_out_of_the_file(tmp_path: Path) -> None:
    proto = _classifier()
    del proto.graph.node[3:]
    proto.graph.output[0].name = "classes"
    with pytest.raises(ImportingError, match=r"'classes' holds strings.*outputs=\['chances'\]\)"):
        qtrace.from_onnx(save(proto, tmp_path))
    del proto.graph.output[0]
    dead = node("Gather", "classes place", "name")  # which no output needs
    for more in ([], [dead]):
        proto.graph.node.extend(more)
        path = save(proto, tmp_path, f"unread{len(more)}.onnx")
        assert qtrace.from_onnx(path)(Tensor(weights(2, 3))).shape == (2, 4)
