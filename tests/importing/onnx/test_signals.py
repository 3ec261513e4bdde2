"""Grouped convolutions along one axis, which MegEngine's Conv1d has not, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import onnxruntime
import pytest

import qtrace
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights

X = np.random.default_rng(3).standard_normal((2, 4, 17)).astype(np.float32)


def runtime(path: Path, *inputs: np.ndarray) -> np.ndarray:
    """Runs the file as it is written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return np.asarray(session.run(None, dict(zip(names, inputs, strict=True)))[0])


def write(folder: Path, computed: bool = False, bias: bool = True, **attributes: Any) -> Path:
    stored = {"w": weights(8, 4 // attributes["group"], 3), "b": weights(8)}
    stored |= {
        "scale": weights(8) + 2,
        "shift": weights(8),
        "mean": weights(8),
        "var": np.abs(weights(8)) + 1,
    }
    nodes = [
        node("Conv", "x w b" if bias else "x w", "c", **attributes),
        node("BatchNormalization", "c scale shift mean var", "y"),
    ]
    given = {name: stored.pop(name) for name in ("w", "b") if computed and (bias or name == "w")}
    inputs = {"x": [None, *X.shape[1:]], **{name: list(array.shape) for name, array in given.items()}}
    return save(model(nodes, inputs, ["y"], stored), folder)


@each_of("computed", [False, True])
@each_of("bias", [False, True])
@each_of(
    "attributes",
    [
        {"group": 2},
        {"group": 4, "pads": [1, 1]},
        {"group": 4, "pads": [2, 0], "strides": [2]},
        {"group": 2, "dilations": [3], "pads": [1, 4]},
        {"group": 2, "strides": [2], "auto_pad": "SAME_LOWER"},
        {"group": 4, "strides": [3], "auto_pad": "SAME_UPPER"},
    ],
    ids=lambda attributes: "-".join(map(str, attributes.values())),
)
def test_groups_of_signals(attributes: dict[str, Any], bias: bool, computed: bool, tmp_path: Path) -> None:
    path = write(tmp_path, computed, bias, **attributes)
    given = [weights(8, 4 // attributes["group"], 3), *([weights(8)] if bias else [])] if computed else []
    result = qtrace.from_onnx(path)(*map(mge.Tensor, (X, *given))).numpy()
    np.testing.assert_allclose(result, runtime(path, X, *given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [2, 4])
def test_groups_of_signals_run_on_integers(group: int, tmp_path: Path) -> None:
    net = qtrace.from_onnx(write(tmp_path, group=group, pads=[2, 0]))
    prepared = qtrace.prepare(net, {"backend": "onnxruntime"})
    qtrace.calibrate(prepared, [mge.Tensor(X)])
    converted = qtrace.convert(prepared)
    path = tmp_path / "q.onnx"
    qtrace.export(converted, path)
    assert qtrace.verify(path, converted, [X]).passed
    weight = next(n for n in onnx.load(path).graph.node if n.op_type == "Conv").input[1]
    assert any(weight in n.output for n in onnx.load(path).graph.node if n.op_type == "DequantizeLinear")
