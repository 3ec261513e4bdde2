"""Layers that `prepare` merges come back as torch's state: one has the sum, the others add nothing."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.errors import ImportingError
from qtrace.extras.torch.state import note_state, state_arrays
from tests.extras.torch.test_without_torch import _Tensor
from tests.importing.onnx.networks import model, node, save, weights

X = weights(2, 4, 6, 6)
MERGE = {"ptq": ["fuse_bn", "reparameterize"]}


def _network(branches: str, values: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """Writes ``relu(sum of branches)``.

    Args:
        branches: kernel sizes with ``b`` for a bias and ``n`` for a norm behind, or ``n`` for a norm of x.
        values: the stored tensors; None for random ones.
    """
    nodes, stored, results = [], {}, []
    for number, branch in enumerate(branches.split()):
        result, size = "x", branch.strip("bn")
        if size:
            path, k = f"conv{number}", int(size)
            stored[f"{path}.weight"] = weights(4, 4, k, k, seed=number)
            inputs = f"x {path}.weight"
            if "b" in branch:
                stored[f"{path}.bias"] = weights(4, seed=number + 10)
                inputs += f" {path}.bias"
            result = f"c{number}"
            nodes.append(node("Conv", inputs, result, kernel_shape=[k, k], pads=[k // 2] * 4))
        if "n" in branch:
            path = f"norm{number}"
            for i, name in enumerate(("weight", "bias", "running_mean", "running_var")):
                stored[f"{path}.{name}"] = weights(4, seed=number + 20 + i)
            stored[f"{path}.running_var"] = np.abs(stored[f"{path}.running_var"]) + np.float32(0.5)
            parameters = " ".join(f"{path}.{n}" for n in ("weight", "bias", "running_mean", "running_var"))
            nodes.append(node("BatchNormalization", f"{result} {parameters}", f"n{number}"))
            result = f"n{number}"
        results.append(result)
    for number, result in enumerate(results[1:]):
        nodes.append(node("Add", f"{results[0] if not number else f's{number - 1}'} {result}", f"s{number}"))
    nodes.append(node("Relu", f"s{len(results) - 2}", "y"))
    return model(nodes, {"x": X.shape}, ["y"], stored if values is None else values)


def _prepared(proto: onnx.ModelProto, folder: Path) -> tuple[object, np.ndarray]:
    traced = qtrace.from_onnx(save(proto, folder))
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    note_state(traced, {name: _Tensor(array) for name, array in stored.items()})
    prepared = qtrace.prepare(traced, MERGE)
    weights_left = [name for name, _ in prepared.named_parameters() if name.endswith("weight")]
    assert len(weights_left) == 1
    return prepared, traced(mge.Tensor(X)).numpy()


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "branches",
    [
        "3b 1b",
        "1b 3b",
        "3 1b",
        "3b 1",
        "3n 1n n",
        "3n 1n",
        "3bn 1bn",
        "3 1n",
        "3 1bn",
        "3 n",
        "3b n",
        "5 3 1n n",
    ],
)
def test_the_state_of_merged_layers_gives_the_same_network(branches: str, tmp_path: Path) -> None:
    proto = _network(branches)
    prepared, expected = _prepared(proto, tmp_path)
    bias = next(p for name, p in prepared.named_parameters() if name.endswith("bias"))
    for grown in (0, 1):  # as merged, and trained on
        bias[...] = bias + np.float32(grown)
        state = state_arrays(prepared)
        assert state.keys() == {t.name for t in proto.graph.initializer}
        again = qtrace.from_onnx(save(_network(branches, state), tmp_path))(mge.Tensor(X)).numpy()
        if not grown:
            np.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(again, prepared(mge.Tensor(X)).numpy(), rtol=1e-4, atol=1e-4)
    assert np.abs(again - expected).max() > 0.5


def test_a_merged_weight_that_the_module_computes_is_refused_by_name(tmp_path: Path) -> None:
    nodes = [
        node("Mul", "gain v", "w"),
        node("Conv", "x w", "a", kernel_shape=[1, 1]),
        node("Conv", "x conv.weight", "b", kernel_shape=[3, 3], pads=[1] * 4),
        node("Add", "a b", "s"),
        node("Relu", "s", "y"),
    ]
    stored = {
        "gain": weights(4, 1, 1, 1),
        "v": weights(4, 4, 1, 1, seed=1),
        "conv.weight": weights(4, 4, 3, 3, seed=2),
    }
    prepared, _ = _prepared(model(nodes, {"x": X.shape}, ["y"], stored), tmp_path)
    with pytest.raises(
        ImportingError, match=r"reparameterize merged the layer of .* leave reparameterize out"
    ):
        state_arrays(prepared)
