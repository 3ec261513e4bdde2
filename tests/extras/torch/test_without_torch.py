"""What of networks from torch needs no torch: the record, the state as arrays, the sentence without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError, ImportingError
from qtrace.extras.torch import importing
from qtrace.extras.torch.state import note_state, state_arrays
from qtrace.graph.origin import (
    FileNorm,
    FileOrigin,
    FileParameter,
    part_of,
    places_of,
    read_origin,
    reshaped_to,
    taken_at,
    transposed_by,
)
from tests.each import each_of
from tests.importing.onnx.networks import conv_bn, model, node, save, weights


class _Tensor:
    """A tensor of torch, as far as the record reads it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape
        self.dtype = SimpleNamespace(is_floating_point=array.dtype.kind == "f")

    def detach(self) -> _Tensor:
        return self

    cpu = float = detach

    def numel(self) -> int:
        return self.array.size

    def numpy(self) -> np.ndarray:
        return self.array


def _imported(proto: object, folder: Path) -> tuple[object, dict[str, np.ndarray]]:
    import onnx

    state = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    traced = qtrace.from_onnx(save(proto, folder))
    note_state(traced, {name: _Tensor(array) for name, array in state.items()})
    return traced, state


def test_moves_say_where_each_number_stands() -> None:
    stored = weights(6, 4)
    moves = (part_of(0, 2, 4), transposed_by((1, 0)), reshaped_to((2, 4)))
    np.testing.assert_array_equal(stored.reshape(-1)[places_of((6, 4), moves)], stored[2:4].T.reshape(2, 4))
    taken = (taken_at(-1, [3, 0, 3]),)
    np.testing.assert_array_equal(stored.reshape(-1)[places_of((6, 4), taken)], stored[:, [3, 0, 3]])
    with pytest.raises(ValueError, match="no such places on axis 1"):
        places_of((6, 4), (taken_at(1, [4]),))


def test_a_transposed_and_divided_weight_comes_back_whole(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "qkv.weight", "turned", perm=[1, 0]),
        node("Split", "turned", "q k", axis=1, num_outputs=2),
        node("Split", "qkv.bias", "qb kb", axis=0, num_outputs=2),
        node("MatMul", "x q", "m"),
        node("Add", "m qb", "left"),
        node("MatMul", "x k", "n"),
        node("Add", "n kb", "right"),
        node("Mul", "left right", "y"),
    ]
    stored = {"qkv.weight": weights(8, 4), "qkv.bias": np.zeros(8, np.float32)}
    traced, state = _imported(model(nodes, {"x": (2, 4)}, ["y"], stored, opset=18), tmp_path)
    arrays = state_arrays(traced)
    assert arrays.keys() == state.keys()
    assert all(np.array_equal(arrays[name], state[name]) for name in state)


@each_of(
    ("op", "left", "right", "number"),
    [
        ("Mul", "alpha", "const_1", 1.0),
        ("Mul", "const_1", "alpha", 1.0),
        ("Div", "alpha", "const_1", 1.0),
        ("Add", "const_1", "alpha", 0.0),
        ("Sub", "alpha", "const_1", 0.0),
    ],
)
def test_a_tensor_times_one_keeps_its_name(
    op: str, left: str, right: str, number: float, tmp_path: Path
) -> None:
    """torch's exporter writes `addcmul(beta, alpha, x)` as beta + (alpha * 1) * x."""
    nodes = [node(op, f"{left} {right}", "gain"), node("Mul", "gain x", "y")]
    stored = {"alpha": weights(1, 4), "const_1": np.float32(number)}
    traced, state = _imported(model(nodes, {"x": (2, 4)}, ["y"], stored), tmp_path)
    np.testing.assert_array_equal(state_arrays(traced)["alpha"], state["alpha"])


@each_of(
    ("op", "others", "whole"),
    [
        ("Gather", {"at": np.array([[3, 0], [1, -2]])}, True),
        ("Gather", {"at": np.array([[3, 0], [1, 1]])}, False),
        ("GatherND", {"at": np.array([[3], [0], [1], [-2]])}, True),
        ("GatherND", {"at": np.stack(np.indices((4, 4))[:, ::-1, ::-1], -1)}, True),
        ("GatherND", {"at": np.array([[3, 1], [0, 0]])}, False),
        ("Slice", {"starts": np.array([3]), "ends": np.array([-9]), "axes": [0], "steps": [-1]}, True),
        ("Slice", {"starts": np.array([0, 0]), "ends": np.array([9, 4])}, True),
        ("Slice", {"starts": np.array([0]), "ends": np.array([4]), "axes": [1], "steps": [2]}, False),
        ("Slice", {"starts": np.array([1]), "ends": np.array([4])}, False),
        ("Expand", {"shape": np.array([2, 4, 4])}, True),
        ("Tile", {"repeats": np.array([2, 3])}, True),
        ("CastLike", {"like": np.zeros(1, np.float32)}, True),
    ],
)
def test_gathered_tensor_returns_to_the_state_if_wholly_read(
    op: str, others: dict[str, object], whole: bool, tmp_path: Path
) -> None:
    named = {name: np.asarray(value) for name, value in others.items()}
    nodes = [node(op, " ".join(["table", *named]), "read"), node("Add", "read x", "y")]
    stored = {"table": weights(4, 4), **named}
    traced, state = _imported(model(nodes, {"x": ()}, ["y"], stored, opset=17), tmp_path)
    if not whole:
        assert read_origin(traced).absent == ("table",)
        with pytest.raises(ImportingError, match="lacks names of torch's state"):
            state_arrays(traced)
        return
    np.testing.assert_array_equal(state_arrays(traced)["table"], state["table"])
    (parameter,) = traced.parameters()
    parameter[...] = parameter * 2.0
    np.testing.assert_array_equal(state_arrays(traced)["table"], 2 * state["table"])


@pytest.mark.parametrize("repeated", [False, True])
def test_a_constant_that_a_module_took_of_its_table_comes_back(repeated: bool, tmp_path: Path) -> None:
    """Numbers that are equal in two rows are told apart by their rows; two in one row cannot be."""
    table = np.arange(8, dtype=np.float32).reshape(2, 4)
    table[1, 0] = table[0, 2]
    if repeated:
        table[0, 1] = table[0, 0]
    read = table[:, [[0, 3, 1], [2, 1, 0]]]
    nodes = [node("Add", "net.kept x", "y")]
    proto = model(nodes, {"x": ()}, ["y"], {"net.kept": read})
    traced = qtrace.from_onnx(save(proto, tmp_path))
    note_state(traced, {"net.table": _Tensor(table), "net.rest": _Tensor(table + 9)})
    origin = read_origin(traced)
    assert origin.absent == (("net.table", "net.rest") if repeated else ("net.rest",))
    if not repeated:
        np.testing.assert_array_equal(state_arrays(traced)["net.table"], table)


def test_a_tensor_times_two_is_computed(tmp_path: Path) -> None:
    nodes = [node("Mul", "alpha const_1", "gain"), node("Mul", "gain x", "h"), node("MatMul", "h w", "y")]
    stored = {"alpha": weights(1, 4), "const_1": np.float32(2), "w": weights(4, 4)}
    traced, _ = _imported(model(nodes, {"x": (2, 4)}, ["y"], stored), tmp_path)
    assert set(state_arrays(traced)) == {"w"}


def test_parts_of_one_weight_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    nodes = [
        node("Slice", "w zero two", "part"),  # a part that is read before the whole is a copy
        node("MatMul", "x part", "h"),
        node("MatMul", "h w", "y"),
    ]
    stored = {"w": weights(4, 4), "zero": np.zeros(1, np.int64), "two": np.full(1, 2)}
    traced, state = _imported(model(nodes, {"x": (2, 2)}, ["y"], stored), tmp_path)
    np.testing.assert_array_equal(state_arrays(traced)["w"], state["w"])
    named = dict(traced.named_parameters())
    assert len(named) == 2
    first = next(iter(named.values()))
    first[...] = first * 2.0
    with pytest.raises(ImportingError, match="are one tensor of torch's module, w, and differ in value"):
        state_arrays(traced)


def test_a_folded_norm_comes_back_as_the_bias_of_its_layer(tmp_path: Path) -> None:
    traced, state = _imported(conv_bn(), tmp_path)
    prepared = qtrace.prepare(traced, "backend/onnxruntime")
    arrays = state_arrays(prepared)
    assert arrays.keys() == state.keys()
    norm = "backbone.stage1.bn"
    gain = state[f"{norm}.weight"] / np.sqrt(state[f"{norm}.running_var"] + 1e-5)
    weight = state["backbone.stage1.conv.weight"] * gain[:, None, None, None]
    np.testing.assert_allclose(arrays["backbone.stage1.conv.weight"], weight, rtol=1e-5)
    unit = arrays[f"{norm}.weight"] / np.sqrt(arrays[f"{norm}.running_var"] + 1e-5)
    np.testing.assert_allclose(unit, 1, rtol=1e-6)
    np.testing.assert_array_equal(arrays[f"{norm}.running_mean"], 0)
    bias = state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * gain
    np.testing.assert_allclose(arrays[f"{norm}.bias"], bias, rtol=1e-4, atol=1e-6)


def test_an_origin_with_moves_and_norms_is_read_back() -> None:
    parameters = {"a.weight": FileParameter("w", (2, 3), (transposed_by((1, 0)),))}
    norms = {"a.weight": FileNorm("a.bias", 1e-3, ("g", "b", "m", "v"))}
    origin = FileOrigin(graph="g", parameters=parameters, norms=norms, absent=("c", "d"))
    origin = replace(origin, merged={"b.running_var": (1.0, 3)})
    assert FileOrigin.from_json(origin.to_json()) == origin
    for own, other in (("transpose", "twist"), ("[1.0, 3]", "[7.0, 3]"), ("[1.0, 3]", "[1.0, -3]")):
        with pytest.raises(GraphError, match="damaged"):
            FileOrigin.from_json(origin.to_json().replace(own, other))


def test_networks_that_torch_did_not_give_have_no_state(tmp_path: Path) -> None:
    nodes = [node("Relu", "x", "y")]
    with pytest.raises(ImportingError, match="import it by qtrace.from_torch"):
        state_arrays(qtrace.from_onnx(save(model(nodes, {"x": (2, 4)}), tmp_path)))


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportingError, match="package torch: run pip install -e"):
        qtrace.from_torch(object(), np.zeros((1, 3)))


def test_a_computed_weight_that_learned_is_refused_by_name(tmp_path: Path) -> None:
    """Weight normalization: the graph holds the product, the state its factors."""
    nodes = [
        node("Mul", "fc.g fc.v", "w"),
        node("MatMul", "x w", "h"),
        node("MatMul", "h out.weight", "y"),
    ]
    stored = {"fc.g": weights(1, 4), "fc.v": weights(4, 4), "out.weight": weights(4, 3)}
    traced, _ = _imported(model(nodes, {"x": (2, 4)}, ["y"], stored), tmp_path)
    assert "out.weight" in state_arrays(traced)
    for parameter in traced.parameters():
        parameter[...] = parameter * 1.5
    with pytest.raises(ImportingError, match="matmul.* changed, and torch's module lacks a tensor for it"):
        state_arrays(traced)


def test_a_bias_that_an_algorithm_added_is_refused_by_name(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x a.weight", "h"), node("Relu", "h", "r"), node("MatMul", "r b.weight", "y")]
    stored = {"a.weight": weights(4, 4), "b.weight": weights(4, 3)}
    traced, _ = _imported(model(nodes, {"x": (8, 4)}, ["y"], stored), tmp_path)
    config = {"ptq": ["bias_correction"], "weight": {"bits": 4}}
    prepared = qtrace.prepare(traced, config)
    qtrace.calibrate(prepared, [weights(8, 4)], progress=False)
    with pytest.raises(ImportingError, match="bias.* changed, and torch's module lacks a tensor for it"):
        state_arrays(prepared)


@each_of("shift", [False, True])
@each_of("gain", [False, True])
def test_a_folded_norm_without_gain_or_shift_adds_the_bias(gain: bool, shift: bool, tmp_path: Path) -> None:
    """The exporter stores ones and zeros, which are no tensors of the state, for what torch's norm lacks."""
    statistics = {"bn.running_mean": weights(4), "bn.running_var": np.abs(weights(4)) + 0.5}
    scales = {"bn.weight": weights(4) + 2, "bn.bias": weights(4)}
    stored = {"conv.weight": weights(4, 3, 1, 1), **statistics, **scales}
    names = "bn.weight bn.bias bn.running_mean bn.running_var"
    nodes = [node("Conv", "x conv.weight", "c"), node("BatchNormalization", f"c {names}", "y")]
    own = {name: _Tensor(array) for name, array in stored.items()}
    for name, has in (("bn.weight", gain), ("bn.bias", shift)):
        if not has:
            stored[name] = np.full(4, float(name == "bn.weight"), np.float32)
            del own[name]
    traced = qtrace.from_onnx(save(model(nodes, {"x": (2, 3, 4, 4)}, ["y"], stored), tmp_path))
    note_state(traced, own)
    prepared = qtrace.prepare(traced, "backend/onnxruntime")
    arrays = state_arrays(prepared)
    assert arrays.keys() == own.keys()
    x = weights(2, 3, 4, 4).astype(np.float64)
    scale = arrays.get("bn.weight", 1.0) / np.sqrt(arrays["bn.running_var"] + 1e-5)
    shifted = arrays.get("bn.bias", 0.0) - arrays["bn.running_mean"] * scale
    h = np.einsum("oi,nihw->nohw", arrays["conv.weight"][:, :, 0, 0], x)
    expected = h * np.broadcast_to(scale, 4)[:, None, None] + np.broadcast_to(shifted, 4)[:, None, None]
    want = traced(mge.Tensor(x.astype(np.float32))).numpy()
    np.testing.assert_allclose(expected, want, atol=1e-4)
