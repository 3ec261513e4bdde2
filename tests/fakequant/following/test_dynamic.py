"""DynamicQuant beside onnxruntime's DynamicQuantizeLinear: the same integers, bit for bit."""

from __future__ import annotations

import megengine as mge
import numpy as np
import onnxruntime
import pytest
from megengine.jit import trace
from onnx import TensorProto, helper

from qtrace.fakequant.following.dynamic import DynamicQuant
from tests.each import each_of

RNG = np.random.default_rng(0)
VALUES = {
    "both signs": RNG.normal(size=(3, 5, 7)),
    "above 0": RNG.uniform(2, 3, (4, 9)),
    "below 0": RNG.uniform(-3, -2, (4, 9)),
    "zeros": np.zeros((2, 3)),
    "ties": np.arange(-12, 40).reshape(4, 13) / 2 / 51 * 51,
    "one value": np.full((1, 1), 0.7),
    "far ends": np.array([[-1e30, 1e30, 3.0]]),
    "tiny": RNG.normal(size=(4, 4)) * 1e-30,
}


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    results = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in (
            ("y", TensorProto.FLOAT),
            ("scale", TensorProto.FLOAT),
            ("zero", TensorProto.UINT8),
        )
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], results), opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@each_of("name", VALUES)
@each_of("traced", [False, True])
def test_it_computes_what_onnxruntime_does(
    name: str, traced: bool, session: onnxruntime.InferenceSession
) -> None:
    x = VALUES[name].astype(np.float32)
    module = DynamicQuant("x")
    module.phase = "quantize"
    run = trace(module.forward, symbolic=True) if traced else module
    expected, scale, zero = session.run(None, {"x": x})
    np.testing.assert_array_equal(run(mge.Tensor(x)).numpy(), expected)
    grid = [part.numpy().reshape(()) for part in module.grid(mge.Tensor(x))]
    np.testing.assert_array_equal(grid, [scale, zero])


def test_it_passes_floats_and_gradients() -> None:
    x = mge.Parameter(VALUES["both signs"].astype(np.float32))
    module = DynamicQuant("x")
    assert module(x) is x
    module.phase = "train"
    with mge.autodiff.GradManager().attach(x) as manager:
        manager.backward((module(x) * 3.0).sum())
    inside = x.numpy() > x.numpy().min()  # the zero point is rounded, and leaves the lower end outside here
    np.testing.assert_array_equal(x.grad.numpy(), np.where(inside, 3.0, 0.0).astype(np.float32))
