"""Parameters that several places of torch's module read: what a pass changed at one of them is refused."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.errors import ImportingError
from qtrace.extras.torch.state import note_state, state_arrays
from qtrace.graph.origin import FileOrigin, read_origin
from qtrace.importing.onnx import read_onnx
from tests.extras.torch.test_without_torch import _Tensor
from tests.importing.onnx.networks import model, node, save, weights

X = weights(2, 4, 6, 6)
FOLD, MERGE = {"ptq": ["fuse_bn"]}, {"ptq": ["fuse_bn", "reparameterize"]}
NORM = ("weight", "bias", "running_mean", "running_var")


def _stored() -> dict[str, np.ndarray]:
    stored = {}
    for number, name in enumerate("ab"):
        stored[f"{name}.weight"] = weights(4, 4, 3, 3, seed=number)
        stored[f"{name}.bias"] = weights(4, seed=number + 10)
    for number, name in enumerate(("bn", "bm")):
        stored |= {f"{name}.{key}": weights(4, seed=4 * number + i + 20) for i, key in enumerate(NORM)}
        stored[f"{name}.running_var"] = np.abs(stored[f"{name}.running_var"]) + np.float32(0.5)
    # Channels of different size, which equalization changes.
    stored["a.weight"] *= np.float32([0.01, 0.1, 1, 10]).reshape(4, 1, 1, 1)
    stored["shape"] = np.int64([1, 4, 1, 1])
    return stored


def _conv(source: str, name: str, result: str) -> onnx.NodeProto:
    inputs = f"{source} {name}.weight {name}.bias"
    return node("Conv", inputs, result, kernel_shape=[3, 3], pads=[1] * 4)


def _norm(source: str, name: str, result: str, **tensors: str) -> onnx.NodeProto:
    own = " ".join(tensors.get(key, f"{name}.{key}") for key in NORM)
    return node("BatchNormalization", f"{source} {own}", result)


def _normed(name: str = "bn") -> list[onnx.NodeProto]:
    return [_conv("x", "a", "c"), _norm("c", name, "n"), node("Relu", "n", "r")]


def _beside(tensor: str, op: str = "Abs") -> list[onnx.NodeProto]:
    """Multiplies by numbers that are computed from a tensor, or by the tensor itself."""
    if op == "Reshape":
        return [*_normed(), node("Reshape", f"{tensor} shape", "k"), node("Mul", "r k", "y")]
    return [
        *_normed(),
        node(op, tensor, "m"),
        node("ReduceMean", "m", "k", keepdims=0),
        node("Mul", "r k", "y"),
    ]


def _imported(nodes: list[onnx.NodeProto], folder: Path) -> tuple[object, dict[str, np.ndarray]]:
    read = {name for each in nodes for name in each.input}
    stored = {name: array for name, array in _stored().items() if name in read}
    proto = model(nodes, {"x": X.shape}, ["y"], stored, opset=13)
    traced = read_onnx(save(proto, folder), source="Net")
    state = {name: array for name, array in stored.items() if name != "shape"}
    note_state(traced, {name: _Tensor(array) for name, array in state.items()})
    return traced, state


SHARED = {
    "a norm behind two layers": (
        [*_normed(), _conv("r", "b", "d"), _norm("d", "bn", "e"), node("Relu", "e", "y")],
        "bn.bias is read in several places",
    ),
    "a norm behind a layer and behind none": (
        [*_normed(), _norm("x", "bn", "e"), node("Add", "r e", "y")],
        "bn.weight is read in several places",
    ),
    "one shift of two norms": (
        [*_normed(), _conv("r", "b", "d"), _norm("d", "bm", "e", bias="bn.bias"), node("Relu", "e", "y")],
        "bn.bias is read in several places",
    ),
    "a shift that is a bias": (
        [
            *_normed(),
            node("Conv", "r b.weight bn.bias", "d", kernel_shape=[3, 3], pads=[1] * 4),
            node("Relu", "d", "y"),
        ],
        "bn.bias is read in several places",
    ),
    "a gain beside its norm": (_beside("bn.weight", "Reshape"), "bn.weight is read in several places"),
    "a variance beside its norm": (_beside("bn.running_var", "Reshape"), "bn.running_var is read in several"),
    "numbers of a weight": (
        _beside("a.weight"),
        r"a\.weight changed, but numbers that .* did not",
    ),
    "numbers of a bias": (
        _beside("a.bias"),
        r"a\.bias changed, but numbers that .* did not",
    ),
    "numbers of a shift": (
        _beside("bn.bias"),
        r"bn\.bias changed, but numbers that .* did not",
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_tensor_that_is_folded_at_one_of_its_places_is_refused_by_name(case: str, tmp_path: Path) -> None:
    nodes, refusal = SHARED[case]
    traced, state = _imported(nodes, tmp_path)
    before = state_arrays(traced)
    assert all(np.array_equal(before[name], array) for name, array in state.items())
    prepared = qtrace.prepare(traced, FOLD)
    expected = traced(mge.Tensor(X)).numpy()
    np.testing.assert_allclose(prepared(mge.Tensor(X)).numpy(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ImportingError, match=refusal):
        state_arrays(prepared)
    kept = state_arrays(qtrace.prepare(traced, {"ptq": []}))  # nothing is folded
    assert all(np.array_equal(kept[name], array) for name, array in state.items())


def test_a_weight_that_learned_and_is_read_by_computations_is_refused(tmp_path: Path) -> None:
    traced, _ = _imported(_beside("a.weight"), tmp_path)
    weight = dict(traced.named_parameters())["a.weight"]
    weight[...] = weight * 2
    with pytest.raises(ImportingError, match=r"a\.weight changed"):
        state_arrays(traced)


@pytest.mark.parametrize("tensor", ["a.weight", "a.bias", "b.weight"])
def test_scales_that_moved_between_layers_are_refused_where_they_are_read_elsewhere(
    tensor: str, tmp_path: Path
) -> None:
    layers = [_conv("x", "a", "c"), node("Relu", "c", "r"), _conv("r", "b", "d")]
    plain, _ = _imported([*layers, node("Relu", "d", "y")], tmp_path)
    state_arrays(qtrace.prepare(plain, {"ptq": ["equalize"]}))
    nodes = [*layers, node("Abs", tensor, "m"), node("ReduceMean", "m", "k", keepdims=0)]
    traced, _ = _imported([*nodes, node("Mul", "d k", "y")], tmp_path)
    with pytest.raises(ImportingError, match=f"{tensor} changed"):
        state_arrays(qtrace.prepare(traced, {"ptq": ["equalize"]}))


def test_a_norm_of_merged_branches_that_another_layer_has_is_refused(tmp_path: Path) -> None:
    nodes = [
        _conv("x", "a", "c"),
        _norm("x", "bn", "n"),
        node("Add", "c n", "s"),
        node("Relu", "s", "r"),
        _conv("r", "b", "d"),
        _norm("d", "bn", "e"),
        node("Relu", "e", "y"),
    ]
    traced, _ = _imported(nodes, tmp_path)
    with pytest.raises(ImportingError, match=r"bn\.weight is read in several places"):
        state_arrays(qtrace.prepare(traced, MERGE))


def test_one_gain_of_two_folded_norms_comes_back(tmp_path: Path) -> None:
    shared = {"weight": "bn.weight", "running_var": "bn.running_var"}
    nodes = [*_normed(), _conv("r", "b", "d"), _norm("d", "bm", "e", **shared), node("Relu", "e", "y")]
    traced, _ = _imported(nodes, tmp_path)
    prepared = qtrace.prepare(traced, FOLD)
    stored = _stored() | state_arrays(prepared)
    read = {name for each in nodes for name in each.input}
    again = model(nodes, {"x": X.shape}, ["y"], {n: a for n, a in stored.items() if n in read}, opset=13)
    result = qtrace.from_onnx(save(again, tmp_path))(mge.Tensor(X)).numpy()
    np.testing.assert_allclose(result, prepared(mge.Tensor(X)).numpy(), rtol=1e-4, atol=1e-4)


def test_a_tensor_whose_shape_alone_is_read_may_change(tmp_path: Path) -> None:
    nodes = [
        *_normed(),
        node("Shape", "a.weight", "sizes"),
        node("CastLike", "sizes a.bias", "f"),
        node("ReduceMax", "f", "k", keepdims=0),
        node("Mul", "r k", "y"),
    ]
    read = {name for each in nodes for name in each.input}
    stored = {name: array for name, array in _stored().items() if name in read}
    proto = model(nodes, {"x": X.shape}, ["y"], stored, opset=15)
    traced = read_onnx(save(proto, tmp_path), source="Net")
    note_state(traced, {name: _Tensor(array) for name, array in stored.items()})
    assert not read_origin(traced).frozen
    state_arrays(qtrace.prepare(traced, FOLD))


def test_a_file_of_no_module_records_none(tmp_path: Path) -> None:
    proto = model(_beside("a.weight"), {"x": X.shape}, ["y"], _stored(), opset=13)
    assert not read_origin(qtrace.from_onnx(save(proto, tmp_path))).frozen
    origin = FileOrigin(frozen={"a": "hash"})
    assert FileOrigin.from_json(origin.to_json()) == origin
