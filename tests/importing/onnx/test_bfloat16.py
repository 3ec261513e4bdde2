"""bfloat16: carried in float32, as float16 is, by every op that takes floats."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

import qtrace
from tests.each import each_of
from tests.importing.onnx.networks import model, node, weights

_INTO = {"to": TensorProto.BFLOAT16}
CASES = {
    "two inputs": ([node("MatMul", "a b", "r")], {"x": (2, 4), "z": (4, 3)}, {}),
    "stored": (
        [node("Cast", "w", "v", **_INTO), node("MatMul", "a v", "r")],
        {"x": (2, 4)},
        {"w": weights(4, 3)},
    ),
    "gemm": ([node("Gemm", "a b", "r", transB=1)], {"x": (2, 4), "z": (3, 4)}, {}),
    "softmax": ([node("Softmax", "a", "r")], {"x": (2, 4)}, {}),
    "mean": ([node("ReduceMean", "a", "r", axes=[1])], {"x": (2, 3, 6, 6)}, {}),
    "product": ([node("Mul", "a b", "r")], {"x": (2, 4), "z": (2, 4)}, {}),
}


@each_of("case", CASES)
def test_ops_on_bfloat16_compute_in_float32(case: str, tmp_path: Path) -> None:
    nodes, inputs, stored = CASES[case]
    casts = [node("Cast", name, cast, **_INTO) for name, cast in zip(inputs, "ab", strict=False)]
    back = node("Cast", "r", "y", to=TensorProto.FLOAT)
    onnx.save(model([*casts, *nodes, back], inputs, stored=stored), tmp_path / "bf16.onnx")
    traced = qtrace.from_onnx(tmp_path / "bf16.onnx")
    values = {name: weights(*shape, seed=i + 1) for i, (name, shape) in enumerate(inputs.items())}
    result = traced(*map(mge.tensor, values.values())).numpy()
    plain = [n for n in nodes if n.op_type != "Cast"]
    for n in plain:
        n.input[:] = [{"a": "x", "b": "z", "v": "w"}[name] for name in n.input]
    reference = ReferenceEvaluator(model(plain, inputs, ["r"], stored)).run(None, values)[0]
    np.testing.assert_allclose(result, reference, rtol=0.02, atol=0.05)


def test_stored_bfloat16_are_parameters(tmp_path: Path) -> None:
    file = model(
        [node("Mul", "x s", "m"), node("Add", "m x", "y")], {"x": (2, 4)}, stored={"s": weights(1, 4)}
    )
    rounded = weights(1, 4).astype(onnx.helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    file.graph.initializer[0].CopyFrom(numpy_helper.from_array(rounded, "s_16"))
    file.graph.node.insert(0, node("Cast", "s_16", "s", to=TensorProto.FLOAT))
    onnx.save(file, tmp_path / "m.onnx")
    traced = qtrace.from_onnx(tmp_path / "m.onnx")
    x = weights(2, 4, seed=1)
    np.testing.assert_allclose(traced(mge.tensor(x)).numpy(), x * rounded.astype(np.float32) + x, rtol=1e-6)
