"""`from_onnx(outputs=...)`: a file cut at named tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megengine import Tensor
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import ImportingError
from qtrace.graph.interface import read_interface
from qtrace.graph.opaque import opaque_calls
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


def test_what_stands_behind_the_outputs_is_left_out(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
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
