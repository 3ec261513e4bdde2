"""Biases of one number, as ``bias[...] = 0`` makes them, and of shapes that no layer of a runtime takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace.config.recipe import load_recipe
from qtrace.graph.types import TracedModule
from tests.nets import images, net

BATCHES = [images(2, 3, 8, 8, seed=s) for s in range(2)]
X = mge.Tensor(BATCHES[0])


def _calibrated(module: M.Module, config: Any = None) -> TracedModule:
    module.eval()
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    np.testing.assert_allclose(prepared(X).numpy(), module(X).numpy(), rtol=1e-4, atol=1e-5)
    return qtrace.calibrate(prepared, BATCHES, progress=False)


def _filled() -> M.Module:
    """A conv, a transposed conv and a linear layer, each with a bias of one number."""
    module = net(
        lambda self, x: self.l(F.mean(self.t(F.relu(self.c(x))), (2, 3))),
        c=M.Conv2d(3, 6, 3),
        t=M.ConvTranspose2d(6, 5, 2, stride=2),
        l=M.Linear(5, 4),
    )
    for layer in (module.c, module.t, module.l):
        layer.bias[...] = 0.25
        assert layer.bias.numpy().size == 1
    return module


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("backend/onnxruntime", "m.onnx"),
        ("backend/tflite", "m.tflite"),
        pytest.param("backend/ncnn", "m.ncnn.param", marks=pytest.mark.slow),
    ],
)
def test_files_have_one_number_per_channel(tmp_path: Path, recipe: str, name: str) -> None:
    converted = qtrace.convert(_calibrated(_filled(), load_recipe(recipe)))
    report = qtrace.verify(qtrace.export(converted, tmp_path / name), converted, BATCHES[:1])
    assert report.passed, report.table()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"ptq": []},
        {"ptq": ["fuse_bn", "equalize", "bias_correction"]},
        {"qat": {"bn": {"fold": False}, "fakequant": "lsq"}},
    ],
    ids=str,
)
def test_the_parameter_keeps_its_shape_unless_a_norm_is_folded_into_it(config: dict[str, Any]) -> None:
    module = net(lambda self, x: self.d(self.n(self.c(x))), c=M.Conv2d(3, 8, 3), n=M.BatchNorm2d(8))
    module.d = M.Conv2d(8, 4, 1)
    module.c.bias[...] = 0.5
    module.d.bias[...] = 0.0
    prepared = _calibrated(module, config)
    folded = config.get("ptq") != [] and "qat" not in config
    assert prepared.c.bias.numpy().size == (8 if folded else 1)
    assert prepared.d.bias.numpy().size == 1
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), prepared(X).numpy())


def test_a_computed_bias_before_a_norm_that_trains_is_converted() -> None:
    module = net(
        lambda self, x: self.n(F.conv2d(x, self.w, F.reshape(self.b, (1, -1, 1, 1)))), n=M.BatchNorm2d(8)
    )
    rng = np.random.default_rng(0)
    module.w = mge.Parameter(rng.normal(size=(8, 3, 3, 3)).astype(np.float32))
    module.b = mge.Parameter(rng.normal(size=8).astype(np.float32))
    prepared = _calibrated(module, {"qat": {"bn": {"fold": False}, "fakequant": "lsq"}})
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), prepared(X).numpy())


# Kind of layer -> its function (looked up in the call, as the tracer replaces it), the shape of its weight,
# that of its input, and axes of space of its output.
KINDS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "conv1d": (lambda *a: F.nn.conv1d(*a), (8, 3, 3), (2, 3, 10), (8,)),
    "conv2d": (lambda *a: F.conv2d(*a), (8, 3, 3, 3), (2, 3, 10, 10), (8, 8)),
    "grouped": (lambda x, w, b: F.conv2d(x, w, b, groups=3), (3, 4, 1, 3, 3), (2, 3, 10, 10), (8, 8)),
    "conv3d": (lambda *a: F.nn.conv3d(*a), (8, 3, 3, 3, 3), (2, 3, 5, 5, 5), (3, 3, 3)),
    "conv_transpose2d": (lambda *a: F.conv_transpose2d(*a), (3, 8, 3, 3), (2, 3, 6, 6), (8, 8)),
    "conv_transpose3d": (lambda *a: F.nn.conv_transpose3d(*a), (3, 8, 3, 3, 3), (2, 3, 3, 3, 3), (5, 5, 5)),
    "linear": (lambda *a: F.linear(*a), (8, 6), (2, 6), ()),
}


def _bias_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    *_, space = KINDS[kind]
    if kind == "linear":
        return {"channels": (8,), "a row": (1, 8), "samples": (2, 8), "more axes": (1, 1, 8), "one": (1, 1)}
    channels, ones = (12 if kind == "grouped" else 8), (1,) * len(space)
    shapes = {"channels": (1, channels, *ones), "samples": (2, channels, *ones), "one": (1, 1, *ones)}
    shapes["places"] = (1, channels, *space)
    if kind == "conv2d":
        shapes["columns"] = (8,)  # as many as channels, along the last axis
    return shapes


CASES = [(kind, name) for kind in KINDS for name in _bias_shapes(kind)]


def _with_bias(kind: str, name: str, form: str) -> tuple[M.Module, np.ndarray]:
    function, weight, shape, _ = KINDS[kind]
    rng = np.random.default_rng(3)

    class Biased(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.g = (
                mge.Parameter(rng.normal(size=size).astype(np.float32))
                for size in (weight, *[_bias_shapes(kind)[name]] * 2)
            )

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            bias = self.b if form == "stored" else self.b * self.g
            return function(x, self.w, bias * F.mean(x) if form == "of the input" else bias)

    module = Biased()
    module.eval()
    return module, rng.normal(size=shape).astype(np.float32)


def _run(path: Path, x: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = ort.InferenceSession(str(path))
    values: np.ndarray = session.run(None, {session.get_inputs()[0].name: x})[0]
    return values


def _node_inputs(path: Path, *kinds: str) -> list[list[int]]:
    """The ranks of the third input of nodes, which is the bias."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in model.graph.value_info}
    ranks |= {t.name: len(t.dims) for t in model.graph.initializer}
    return [[ranks[name] for name in n.input[2:]] for n in model.graph.node if n.op_type in kinds]


@pytest.mark.parametrize("form", ["stored", "computed", "of the input"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_bias_of_any_shape_is_a_vector_or_a_sum_in_a_float_file(
    kind: str, name: str, form: str, tmp_path: Path
) -> None:
    module, x = _with_bias(kind, name, form)
    path = qtrace.export(qtrace.trace(module, x, check=False), tmp_path / "m.onnx")
    np.testing.assert_allclose(_run(path, x), module(mge.Tensor(x)).numpy(), rtol=1e-4, atol=1e-4)
    assert all(rank == [1] or not rank for rank in _node_inputs(path, "Conv", "ConvTranspose"))


@pytest.mark.parametrize("form", ["stored", "computed", "of the input"])
@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if "3d" not in case[0]])
def test_a_bias_of_any_shape_is_quantized(kind: str, name: str, form: str, tmp_path: Path) -> None:
    module, x = _with_bias(kind, name, form)
    traced = qtrace.trace(module, x, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/onnxruntime"), [x], progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [x])
    assert report.passed, report.table()
    exact, own = module(mge.Tensor(x)).numpy(), converted(mge.Tensor(x)).numpy()
    assert np.square(own - exact).sum() < 1e-3 * np.square(exact).sum()
    ranks = _node_inputs(path, "Conv", "ConvTranspose")
    assert all(rank == [1] or not rank for rank in ranks)


def test_a_stored_bias_is_no_node_of_a_quantized_file(tmp_path: Path) -> None:
    module, x = _with_bias("conv2d", "channels", "stored")
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), "backend/onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert "Reshape" not in [node.op_type for node in onnx.load(path).graph.node]
