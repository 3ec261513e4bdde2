"""Weights as uint8: the same numbers, exact in onnxruntime on processors whose kernels saturate."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from megengine.traced_module import TracedModule
from onnx import numpy_helper

import qtrace
from qtrace.errors import ExportError
from qtrace.export.onnx import files
from qtrace.onnxfile.kernels import products_saturate
from qtrace.verification.crosscheck import SATURATION, SATURATION_ELSEWHERE
from tests.nets import images, net

X = images(2, 3, 8, 8)
BRIGHT = np.random.default_rng(1).uniform(0.2, 1.0, (2, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def converted() -> TracedModule:
    """A convolution, a depthwise one that is called twice, a transposed one, and a linear layer."""

    def forward(self, x):
        x = F.relu(self.conv(x) * 4)
        x = self.deep(F.relu(self.deep(x)))
        x = F.relu(self.up(x))
        return self.fc(F.flatten(F.avg_pool2d(x, 4), 1))

    conv, deep = M.Conv2d(3, 8, 3, padding=1), M.Conv2d(8, 8, 3, padding=1, groups=8)
    model = net(forward, conv=conv, deep=deep, up=M.ConvTranspose2d(8, 4, 2, stride=2), fc=M.Linear(64, 5))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        # Large weights of one sign let the sums of neighbouring products pass 16 bits.
        parameter[...] = rng.uniform(0.1, 0.2, parameter.shape).astype(np.float32)
    prepared = qtrace.prepare(qtrace.trace(model, X, check=False), "backend/onnxruntime")
    return qtrace.convert(qtrace.calibrate(prepared, [BRIGHT], progress=False))


def _weights(path: Path) -> dict[str, np.ndarray]:
    model = onnx.load(str(path))
    stored = {t.name: numpy_helper.to_array(t).astype(np.int32) for t in model.graph.initializer}
    return {
        node.output[0]: stored[node.input[0]] - np.reshape(stored[node.input[2]].flat[0], ())
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    }


def _types(path: Path) -> set[str]:
    graph = onnx.load(str(path)).graph
    read = {n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    arrays = [numpy_helper.to_array(t) for t in graph.initializer if t.name in read]
    return {array.dtype.name for array in arrays if array.dtype.itemsize == 1}


def test_uint8_weights_are_the_same_numbers_and_exact_in_optimized_kernels(
    converted: TracedModule, tmp_path: Path
) -> None:
    signed = qtrace.export(converted, tmp_path / "signed.onnx", weights="int8")
    unsigned = qtrace.export(converted, tmp_path / "unsigned.onnx", weights="uint8")
    assert (_types(signed), _types(unsigned)) == ({"int8"}, {"uint8"})
    before, after = _weights(signed), _weights(unsigned)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)
    assert not [t.name for t in onnx.load(str(unsigned)).graph.initializer if t.data_type == 3]
    report = qtrace.verify(unsigned, converted, [BRIGHT])
    assert report.passed, report.table()
    assert report.kernels is not None
    assert not report.kernels.saturates
    assert len(report.kernels.integer) >= 4, "uint8 weights have integer kernels, too"


@pytest.mark.parametrize("saturate", [True, False])
def test_the_processor_decides_by_default(
    converted: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saturate: bool
) -> None:
    monkeypatch.setattr(files, "products_saturate", lambda: saturate)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert _types(path) == ({"uint8"} if saturate else {"int8"})


@pytest.mark.parametrize("recipe", ["backend/tensorrt", "backend/qnn"])
def test_other_targets_keep_their_types(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "products_saturate", lambda: True)
    model = qtrace.trace(M.Sequential(M.Conv2d(3, 4, 3), M.ReLU()), X, check=False)
    other = qtrace.convert(qtrace.calibrate(qtrace.prepare(model, recipe), [X], progress=False))
    before = _types(qtrace.export(other, tmp_path / "a.onnx", format="onnx", weights="int8"))
    assert _types(qtrace.export(other, tmp_path / "b.onnx", format="onnx")) == before


def test_choices_that_are_wrong_are_refused(converted: TracedModule, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match="weights='int4' is no choice of the ONNX export: choose auto, int8"
    ):
        qtrace.export(converted, tmp_path / "m.onnx", weights="int4")
    model = qtrace.trace(M.Sequential(M.Conv2d(3, 4, 3), M.ReLU()), X, check=False)
    tensorrt = qtrace.convert(
        qtrace.calibrate(qtrace.prepare(model, "backend/tensorrt"), [X], progress=False)
    )
    with pytest.raises(ExportError, match="weights=uint8 is no choice for backend tensorrt with"):
        qtrace.export(tensorrt, tmp_path / "m.onnx", format="onnx", weights="uint8")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not products_saturate(), reason="this processor's products do not saturate")
def test_a_file_that_saturates_here_fails_with_the_cause(converted: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(converted, tmp_path / "m.onnx", weights="int8")
    report = qtrace.verify(path, converted, [BRIGHT])
    assert not report.passed
    assert SATURATION in report.remarks()
    difference = qtrace.bisect(path, converted, [BRIGHT])
    assert difference is not None
    assert SATURATION in difference.causes


def test_the_probe_is_right_about_this_processor() -> None:
    """A convolution takes the same instructions as the probe's product."""
    from onnx import TensorProto, helper

    numbers = {
        **{"xs": np.float32(1), "xz": np.uint8(0), "ws": np.float32(1), "wz": np.int8(0)},
        **{"ys": np.float32(2**15), "yz": np.uint8(0), "w": np.full((16, 16, 3, 3), 127, np.int8)},
    }
    inputs = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    graph = helper.make_graph(
        [helper.make_node("QLinearConv", inputs, ["y"])],
        "conv",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, (1, 16, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, (1, 16, 6, 6))],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in numbers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.full((1, 16, 8, 8), 255, np.uint8)})
    assert bool((y != round(255 * 127 * 144 / 2**15)).any()) == products_saturate()


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["flattened", "bias", "from the end", "channels last", "stacked"])
def test_openvino_takes_products_of_rows_that_a_concat_joins(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plugin refuses them with int8 weights, which are stored where products do not saturate."""
    openvino = pytest.importorskip("openvino")

    def rows(x: object) -> object:
        if form == "channels last":
            return F.flatten(F.transpose(x, (0, 2, 3, 1)), 1, 2)
        return F.transpose(F.flatten(x, 2), (0, 2, 1))

    def forward(self, x):
        first = F.silu(self.a(x))
        joined = F.concat([rows(first), rows(F.silu(self.b(first)))], -2 if form == "from the end" else 1)
        return self.fc(F.stack([joined, joined * 0.5], 1) if form == "stacked" else joined)

    layers = {"a": M.Conv2d(3, 8, 3, stride=2, padding=1), "b": M.Conv2d(8, 8, 3, padding=1)}
    model = net(forward, **layers, fc=M.Linear(8, 4, bias=form == "bias"))
    prepared = qtrace.prepare(qtrace.trace(model, X, check=False), "backend/openvino")
    quantized = qtrace.convert(qtrace.calibrate(prepared, [X, BRIGHT], progress=False))
    monkeypatch.setattr(files, "products_saturate", lambda: False)
    path = qtrace.export(quantized, tmp_path / "auto.onnx")
    openvino.Core().compile_model(str(path), "CPU")
    assert _types(path) == {"int8", "uint8"}  # the layers before keep int8
    assert qtrace.verify(path, quantized, [X], runtime="onnxruntime", optimized=False).passed


@pytest.fixture(scope="module")
def bright_layers() -> TracedModule:
    """Layers with large weights of one sign, traced: a depthwise and a transposed one among them."""

    def forward(self, x):
        x = F.relu(self.deep(F.relu(self.conv(x))))
        return self.last(F.relu(self.up(x)))

    layers = {"conv": M.Conv2d(3, 8, 3, padding=1), "deep": M.Conv2d(8, 8, 3, padding=1, groups=8)}
    model = net(forward, **layers, up=M.ConvTranspose2d(8, 4, 2, stride=2), last=M.Conv2d(4, 4, 1))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter[...] = rng.uniform(0.1, 0.2, parameter.shape).astype(np.float32)
    return qtrace.trace(model, BRIGHT, check=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("recipe", ["backend/openvino", "backend/openvino_avx2"])
def test_openvino_computes_the_file_for_a_processor_that_saturates(
    recipe: str, bright_layers: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino")
    monkeypatch.setattr(files, "products_saturate", lambda: True)
    calibrated = qtrace.calibrate(qtrace.prepare(bright_layers, recipe), [BRIGHT], progress=False)
    path = qtrace.export(qtrace.convert(calibrated), tmp_path / "m.onnx")
    assert _types(path) == ({"int8"} if recipe.endswith("avx2") else {"int8", "uint8"})  # depthwise: int8
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (exact,) = ort.InferenceSession(str(path), options).run(None, {"x": BRIGHT})
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    (result,) = compiled([BRIGHT]).values()
    np.testing.assert_allclose(result, exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({}, {}, True),
        ({"weight": {"bits": 7}}, {}, False),
        ({}, {"weights": "uint8"}, False),
        ({"method": "weight_only"}, {}, False),  # floats multiply the weights
        ({"backend": "onnxruntime"}, {"weights": "int8"}, False),
    ],
)
@pytest.mark.parametrize("saturate", [True, False])
def test_a_file_for_no_runtime_says_where_it_saturates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch, config, options, told, saturate
) -> None:
    """Verify sees nothing of it: here nothing saturates, or the file runs without optimizations."""
    monkeypatch.setattr(files, "products_saturate", lambda: saturate)
    model = net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(3, 8, 3))
    prepared = qtrace.prepare(qtrace.trace(model, X, check=False), {"backend": "generic", **config})
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx", **options)
    assert (files.SATURATING_FILE in caplog.messages) == told
    report = qtrace.verify(path, converted, [X])
    assert report.passed
    assert (SATURATION_ELSEWHERE in report.remarks()) == told
    assert (SATURATION_ELSEWHERE in report.summary()) == told
