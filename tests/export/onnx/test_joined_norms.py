"""Norms of an exported file are one kernel in onnxruntime, as those of the original are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from tests.importing.onnx.networks import model, node, save, weights

KERNELS = {"layer": "LayerNormalization", "rms": "SimplifiedLayerNormalization"}


def _optimized(path: Path, folder: Path) -> set[str]:
    """Returns the ops that onnxruntime makes of a file."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return {each.op_type for each in onnx.load(folder / "optimized.onnx").graph.node}


@pytest.mark.parametrize("in_float", [True, False])
@pytest.mark.parametrize(
    ("norm", "opset", "rounded"), [("layer", 13, False), ("rms", 17, False), ("layer", 17, True)]
)
def test_a_norm_is_one_kernel(tmp_path: Path, norm: str, opset: int, rounded: bool, in_float: bool) -> None:
    """With a Mul as the square each was nine or six passes over the values.

    Where the input is rounded, onnxruntime joins a LayerNorm that is one node alone.
    """
    apart = [node("ReduceMean", "m", "mean", axes=[-1]), node("Sub", "m mean", "d")]
    spread = [node("ReduceMean", "p", "v", axes=[-1]), node("Add", "v eps", "e"), node("Sqrt", "e", "s")]
    scaled = [node("Div", "d s" if norm == "layer" else "m s", "q"), node("Mul", "q g", "z")]
    nodes = {
        "layer": [*apart, node("Pow", "d two", "p"), *spread, *scaled, node("Add", "z b", "n")],
        "rms": [node("Pow", "m two", "p"), *spread, *scaled[:1], node("Mul", "q g", "n")],
    }[norm]
    arrays = {"w": weights(64, 64), "u": weights(64, 8), "g": weights(64) + 2, "b": weights(64)}
    arrays |= {"two": np.float32(2), "eps": np.float32(1e-5)}
    first = node("MatMul", "x w", "m") if rounded else node("Identity", "x", "m")
    nodes = [first, *nodes, node("MatMul", "n u", "y")]
    stored = {name: array for name, array in arrays.items() if any(name in each.input for each in nodes)}
    path = save(model(nodes, {"x": ["N", 16, 64]}, stored=stored, opset=opset), tmp_path)
    assert KERNELS[norm] in _optimized(path, tmp_path)
    net = qtrace.from_onnx(path, {"x": (1, 16, 64)})
    if not in_float:
        prepared = qtrace.prepare(net)
        qtrace.calibrate(prepared, [weights(8, 16, 64, seed=1)], progress=False)
        net = qtrace.convert(prepared)
    written = qtrace.export(net, tmp_path / "out.onnx")
    assert KERNELS[norm] in _optimized(written, tmp_path)
    if not in_float:
        assert qtrace.verify(written, net, [weights(8, 16, 64, seed=2)]).passed
