"""Weights and biases that are computed from parameters: trained as written, converted to parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.optimizer import SGD

import qtrace
from qtrace.config.recipe import load_recipe
from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.lint import lint
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import read_record
from tests.nets import images, left_lines, net

BATCHES = [images(2, 3, 8, 8, seed=s) for s in range(2)]
X = mge.Tensor(BATCHES[0])


def _standardized(w: Any, axes: tuple[int, ...]) -> Any:
    """Weight standardisation (Qiao et al. 2019)."""
    centred = w - F.mean(w, axes, keepdims=True)
    return centred / F.sqrt(F.mean(centred**2, axes, keepdims=True) + 1e-5)


def _net(forward: Callable[..., Any], **shapes: tuple[int, ...]) -> M.Module:
    """A module with normal Parameters of these shapes; one called ``mask`` is a Tensor of zeros and ones."""
    rng, module = np.random.default_rng(3), net(forward)
    for name, shape in shapes.items():
        value = rng.normal(size=shape).astype(np.float32) * 0.3
        masks = name == "mask"
        setattr(module, name, mge.Tensor((value > 0).astype(np.float32)) if masks else mge.Parameter(value))
    return module


CONV = {"w": (8, 3, 3, 3), "b": (1, 8, 1, 1)}
NETS: dict[str, Callable[[], M.Module]] = {
    "bias reshaped": lambda: _net(
        lambda s, x: F.conv2d(F.relu(x), s.w, F.reshape(s.b, (1, -1, 1, 1))), w=(8, 3, 3, 3), b=(8,)
    ),
    "bias scaled": lambda: _net(
        lambda s, x: F.conv2d(F.relu(x), s.w, s.b * s.g + 0.1), **CONV, g=(1, 8, 1, 1)
    ),
    "weight reshaped": lambda: _net(
        lambda s, x: F.conv2d(F.relu(x), F.reshape(s.w, (8, 3, 3, 3)), s.b), w=(8, 27), b=(1, 8, 1, 1)
    ),
    "weight transposed": lambda: _net(
        lambda s, x: F.conv2d(F.relu(x), F.transpose(s.w, (1, 0, 2, 3))), w=(3, 8, 3, 3)
    ),
    "weight masked": lambda: _net(
        lambda s, x: F.conv2d(F.relu(x), s.w * s.mask, s.b), **CONV, mask=CONV["w"]
    ),
    "weight scaled": lambda: _net(lambda s, x: F.conv2d(F.relu(x), s.w * s.g, s.b), **CONV, g=(8, 1, 1, 1)),
    "weight standardized": lambda: _net(
        lambda s, x: F.conv2d(F.relu(x), _standardized(s.w, (1, 2, 3)), s.b), **CONV
    ),
    "transposed standardized": lambda: _net(
        lambda s, x: F.conv_transpose2d(F.relu(x), _standardized(s.w, (0, 2, 3)), s.b, 2),
        w=(3, 8, 2, 2),
        b=(1, 8, 1, 1),
    ),
    "linear": lambda: _net(
        lambda s, x: F.linear(F.mean(F.relu(x), (2, 3)), F.transpose(s.w, (1, 0)) * s.mask, s.b * 2.0),
        w=(3, 5),
        b=(5,),
        mask=(5, 3),
    ),
    "matmul": lambda: _net(lambda s, x: F.matmul(F.mean(F.relu(x), (2, 3)), s.w * s.g), w=(3, 5), g=(1, 5)),
    "shared": lambda: _net(
        lambda s, x: F.conv2d(F.conv2d(F.relu(x), s.w), s.w * s.g, F.reshape(s.b, (1, 3, 1, 1))),
        w=(3, 3, 1, 1),
        g=(3, 1, 1, 1),
        b=(3,),
    ),
    "halves": lambda: _net(
        lambda s, x: F.conv2d(F.conv2d(F.relu(x), F.split(s.w, 2)[0]), F.split(s.w, 2)[1]), w=(6, 3, 1, 1)
    ),
}
FORMATS = {
    "onnx": ("backend/onnxruntime", "onnx"),
    "tflite": ("backend/tflite", "tflite"),
    "ncnn": ("backend/ncnn", "ncnn.param"),
    "megengine": ("backend/megengine", "mge"),
}
WITHOUT_KERNEL = {
    ("matmul", "ncnn"),  # ncnn has no product with a stored matrix
    ("transposed standardized", "ncnn"),  # nothing of it is quantized there
}
QUICK = {("bias reshaped", "onnx"), ("weight standardized", "ncnn"), ("weight masked", "tflite")}


def _calibrated(module: M.Module, config: Any = None) -> TracedModule:
    module.eval()
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    return qtrace.calibrate(prepared, BATCHES, progress=False)


@pytest.mark.quick(4)
@pytest.mark.usefixtures("synchronous")
@pytest.mark.parametrize("fakequant", ["fixed", pytest.param("lsq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NETS)
def test_gradients_reach_the_parameters_and_convert_writes_the_result(
    tmp_path: Path, name: str, fakequant: str
) -> None:
    module = NETS[name]()
    prepared = _calibrated(module, {"qat": {"fakequant": fakequant}})
    assert set(dict(module.named_parameters())) <= set(dict(prepared.named_parameters()))
    qtrace.set_phase(prepared, "train")
    before = {key: p.numpy().copy() for key, p in prepared.named_parameters()}
    manager = GradManager().attach(list(prepared.parameters()))
    optimizer = SGD(list(prepared.parameters()), lr=0.01)
    with manager:
        manager.backward((prepared(X) ** 2).mean())
    optimizer.step()
    for key, parameter in prepared.named_parameters():
        assert (parameter.numpy() != before[key]).any(), key
    qtrace.set_phase(prepared, "quantize")
    want = prepared(X).numpy()
    loaded = qtrace.load(qtrace.save(prepared, tmp_path / "p.mge") or tmp_path / "p.mge")
    converted = qtrace.convert(loaded)
    np.testing.assert_array_equal(converted(X).numpy(), want)
    assert lint(converted) == []
    nodes = {node.name for expr in exprs(converted) for node in expr.outputs}
    annotation = read_record(converted).annotation
    assert {site.node for site in annotation.sites} <= nodes | {"x"}
    assert {note.name for note in annotation.notes} <= nodes


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[] if (name, format) in QUICK else pytest.mark.slow)
        for name in NETS
        for format in FORMATS
        if (name, format) not in WITHOUT_KERNEL
    ],
)
def test_every_file_is_exact(tmp_path: Path, name: str, format: str) -> None:
    recipe, suffix = FORMATS[format]
    module = NETS[name]()
    prepared = _calibrated(module, load_recipe(recipe))
    want, got = module(X).numpy(), prepared(X).numpy()
    assert np.sum((want - got) ** 2) < 0.001 * np.sum(want**2)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / f"m.{suffix}", format)
    report = qtrace.verify(path, converted, BATCHES[:1])
    assert report.passed, report.table()


def test_a_large_computed_bias_widens_the_scales_of_its_weight() -> None:
    module = NETS["bias reshaped"]()
    bias = module.b.numpy().copy()
    weight = module.w.numpy().copy()
    bias[2], weight[2] = 30.0, weight[2] * 1e-9
    module.b[...], module.w[...] = mge.Tensor(bias), mge.Tensor(weight)
    prepared = _calibrated(module)
    np.testing.assert_allclose(prepared(X).numpy()[:, 2], 30.0, atol=0.2)


def test_a_parameter_that_nothing_reads_any_more_is_gone_and_one_that_is_read_stays() -> None:
    converted = qtrace.convert(_calibrated(NETS["weight scaled"]()))
    assert set(dict(converted.named_parameters())) == {"mul_out", "b"}
    converted = qtrace.convert(_calibrated(NETS["shared"]()))
    assert set(dict(converted.named_parameters())) == {"w", "mul_out", "reshape_out"}


def test_the_name_of_a_new_parameter_is_free() -> None:
    module = _net(lambda s, x: F.conv2d(x, s.w * s.mul_out, s.b), **CONV, mul_out=(8, 1, 1, 1))
    prepared = _calibrated(module)
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(X).numpy(), prepared(X).numpy())


def test_a_bias_that_depends_on_the_input_is_calibrated_and_stays_computed() -> None:
    module = _net(
        lambda s, x: F.conv2d(x, s.w, F.reshape(F.mean(x) * s.b, (1, -1, 1, 1))), w=(8, 3, 3, 3), b=(8,)
    )
    prepared = _calibrated(module)
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(X).numpy(), prepared(X).numpy())
    assert "reshape_out" not in dict(converted.named_parameters())


def test_what_is_fixed_depends_on_parameters_alone() -> None:
    module = _net(lambda s, x: x * F.zeros(x.shape) + s.w * 2.0 + s.w.shape[0], w=(3, 1, 1))
    traced = qtrace.trace(module, BATCHES[0], check=False)
    fixed = fixed_nodes(traced)
    product = next(n for e in exprs(traced) for n in e.outputs if n.name == "mul_out_1")
    assert product in fixed
    assert traced.graph.outputs[0] not in fixed
    value = evaluate_fixed(traced, [product])[product]
    np.testing.assert_array_equal(value.numpy(), module.w.numpy() * 2.0)


@pytest.mark.parametrize(
    "algorithm", ["equalize", "gptq", {"adaround": {"iterations": 5}}, "bias_correction"]
)
def test_algorithms_leave_computed_weights_and_say_so(algorithm: Any) -> None:
    prepared = _calibrated(NETS["weight standardized"](), {"ptq": ["fuse_bn", algorithm]})
    assert np.isfinite(prepared(X).numpy()).all()
    left = [line for report in read_record(prepared).ptq for line in left_lines(report)]
    assert left
