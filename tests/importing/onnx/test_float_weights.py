"""Files with weights alone as integers, or with dynamic inputs, come in as float networks."""

from __future__ import annotations

import logging
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from onnxruntime.quantization.quant_utils import QuantFormat

import qtrace
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import is_quantized
from tests.each import each_of
from tests.importing.onnx.networks import model, node, save, weights
from tests.nets import net

X = np.random.default_rng(0).normal(size=(2, 5, 72)).astype(np.float32)


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    forward = lambda self, x: self.c(self.b(F.relu(self.a(x))))  # noqa: E731
    return qtrace.trace(
        net(forward, a=M.Linear(72, 48), b=M.Linear(48, 64, bias=False), c=M.Linear(64, 9)), X
    )


@pytest.fixture
def float_file(traced: TracedModule, tmp_path: Path) -> Path:
    qtrace.export(traced, tmp_path / "float.onnx")
    return tmp_path / "float.onnx"


def _run(path: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    # Else it fuses a DequantizeLinear with blocks and a MatMul to a kernel that rounds what it reads.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: X})[0])


def _imported(path: Path) -> np.ndarray:
    """The outputs of an imported network, which has float layers alone."""
    module = qtrace.from_onnx(path, {"x": X.shape})
    assert not is_quantized(module)
    assert sum(isinstance(layer, M.Linear) for layer in module.modules()) == 3
    assert not any(isinstance(layer, OpaqueOp) for layer in module.modules())
    return module(mge.Tensor(X)).numpy()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_of_onnxruntimes_quantizer(
    bits: int, symmetric: bool, float_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=symmetric, accuracy_level=1, bits=bits)
    quantizer = MatMulNBitsQuantizer(onnx.load(float_file), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(tmp_path / "blocks.onnx"))
    with caplog.at_level(logging.INFO, logger="qtrace"):
        imported = _imported(tmp_path / "blocks.onnx")
    np.testing.assert_allclose(imported, _run(tmp_path / "blocks.onnx"), atol=1e-4)
    assert "3 layers of the file are quantized by weight_only" in caplog.text


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("weight_type", [QuantType.QUInt8, QuantType.QInt8])
def test_dynamic_files_of_onnxruntimes_quantizer(
    per_channel: bool, weight_type: QuantType, float_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "dynamic.onnx"
    quantize_dynamic(float_file, path, per_channel=per_channel, weight_type=weight_type)
    exact = _run(float_file)
    # The weights are rounded once, what they multiply no longer is.
    assert 10 * np.log10((exact**2).sum() / ((exact - _imported(path)) ** 2).sum()) > 36


@pytest.mark.parametrize("recipe", ["w4", "w8a8_dynamic"])
def test_files_of_our_own_come_back_with_their_weights(
    recipe: str, traced: TracedModule, tmp_path: Path
) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced, {**_config(recipe), "ptq": []}), [X], progress=False)
    qtrace.export(qtrace.convert(prepared), tmp_path / "net.onnx")
    module = qtrace.from_onnx(tmp_path / "net.onnx", {"x": X.shape})
    again = qtrace.convert(
        qtrace.calibrate(qtrace.prepare(module, {**_config(recipe), "ptq": []}), [X], progress=False)
    )
    qtrace.export(again, tmp_path / "again.onnx")
    np.testing.assert_allclose(_run(tmp_path / "again.onnx"), _run(tmp_path / "net.onnx"), atol=1e-5)


@pytest.mark.parametrize("backend", ["onnxruntime", "generic"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_of_whole_channels_come_back(
    bits: int, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = np.random.default_rng(0).normal(size=(2, 3, 9, 9)).astype(np.float32)
    forward = lambda self, x: self.b(F.relu(self.a(x)).mean(axis=(2, 3)))  # noqa: E731
    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 6, 3), b=M.Linear(6, 9)), images)
    config = {"method": "weight_only", "backend": backend, "weight": {"bits": bits}}
    prepared = qtrace.calibrate(qtrace.prepare(traced, config), [images], progress=False)
    qtrace.export(qtrace.convert(prepared), tmp_path / "net.onnx")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="qtrace"):
        module = qtrace.from_onnx(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {session.get_inputs()[0].name: images})[0]
    np.testing.assert_allclose(module(mge.Tensor(images)).numpy(), expected, atol=1e-5)
    logged = "2 layers of the file are quantized by weight_only" in caplog.text
    assert logged is (backend == "onnxruntime")
    assert is_quantized(module) is not logged


def _dequantized_file(
    path: Path, kind: int, block: int, affine: bool, outside: bool = False, static: bool = False
) -> None:
    """Writes a product with packed integers behind a DequantizeLinear."""
    random = np.random.default_rng(1)
    bits, signed = (
        int(onnx.TensorProto.DataType.Name(kind)[-1]),
        onnx.TensorProto.DataType.Name(kind)[0] == "I",
    )
    lowest = -(2 ** (bits - 1)) if signed else 0
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    draw = lambda *shape: random.integers(lowest, lowest + 2**bits, shape).astype(dtype)  # noqa: E731
    shape = (-(-72 // block), 47) if block else (47,)
    stored = {"q": draw(72, 47), "s": random.uniform(0.01, 0.1, shape).astype(np.float32)}
    inputs = ["q", "s"]
    if affine:
        stored["z"] = draw(*shape)
        inputs.append("z")
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [onnx.helper.make_node("DequantizeLinear", inputs, ["w"], **attributes)]
    source = "x"
    if static:
        stored |= {"xs": np.float32(0.03), "xz": np.uint8(128)}
        nodes += [
            onnx.helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
            onnx.helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        ]
        source = "xd"
    nodes.append(onnx.helper.make_node("MatMul", [source, "w"], ["y"]))
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "g", [info("x", 1, [2, 5, 72])], [info("y", 1, [2, 5, 47])], tensors
    )
    opset = 25 if bits == 2 else 21
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    model.ir_version = 10 if bits == 4 else 13
    onnx.save(model, path, save_as_external_data=outside, location="net.data", size_threshold=0)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("kind", [onnx.TensorProto.INT4, onnx.TensorProto.UINT4])
def test_packed_weights_of_other_tools(
    kind: int, block: int, affine: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for static in (False, True):
        path = tmp_path / f"{static}.onnx"
        _dequantized_file(path, kind, block, affine, outside=affine, static=static)
        with caplog.at_level(logging.INFO, logger="qtrace"):
            module = qtrace.from_onnx(path)
        assert is_quantized(module) is static
        assert not any(isinstance(layer, OpaqueOp) for layer in module.modules())
        np.testing.assert_allclose(module(mge.Tensor(X)).numpy(), _run(path), atol=1e-4)
        assert ("1 layers of the file are quantized by weight_only" in caplog.text) is (
            bool(block) or not static
        )
        caplog.clear()


@pytest.mark.parametrize("kind", [onnx.TensorProto.INT2, onnx.TensorProto.UINT2])
def test_packed_weights_of_2_bits(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    _dequantized_file(path, kind, 0, affine=False)
    tensors = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer
    }
    weight = tensors["q"].astype(np.float32) * tensors["s"]
    np.testing.assert_allclose(qtrace.from_onnx(path)(mge.Tensor(X)).numpy(), X @ weight, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_blocks_that_onnxruntimes_quantizer_dequantizes(
    symmetric: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = np.random.default_rng(2).normal(size=(72, 48)).astype(np.float32)
    info = onnx.helper.make_tensor_value_info
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [info("x", 1, [2, 5, 72])],
        [info("y", 1, [2, 5, 48])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=symmetric, quant_format=QuantFormat.QDQ)
    quantizer = MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(tmp_path / "net.onnx"))
    with caplog.at_level(logging.INFO, logger="qtrace"):
        module = qtrace.from_onnx(tmp_path / "net.onnx")
    assert not any(isinstance(layer, OpaqueOp) for layer in module.modules())
    np.testing.assert_allclose(module(mge.Tensor(X)).numpy(), _run(tmp_path / "net.onnx"), atol=1e-4)
    assert "1 layers of the file are quantized by weight_only" in caplog.text


def test_the_log_says_what_a_file_with_static_layers_loses(
    traced: TracedModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"match": {"name": "a*"}, "method": "dynamic", "weight": {"bits": 7}}
    prepared = qtrace.calibrate(qtrace.prepare(traced, {"rules": [rule]}), [X], progress=False)
    qtrace.export(qtrace.convert(prepared), tmp_path / "net.onnx")
    caplog.clear()
    assert is_quantized(qtrace.from_onnx(tmp_path / "net.onnx"))
    (record,) = (r for r in caplog.records if "by dynamic" in r.message)
    assert record.levelno == logging.WARNING
    assert "in the prepared graph they are float layers" in record.message
    assert "prepare the float network that the file was made of" in record.message


def test_the_log_names_integer_nodes_that_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [node("Cast", "x", "u", to=2), node("MatMulInteger", "u w", "i"), node("Cast", "i", "y", to=1)]
    stored = {"w": np.arange(48, dtype=np.uint8).reshape(8, 6)}
    module = qtrace.from_onnx(save(model(nodes, {"x": [3, 8]}, stored=stored), tmp_path))
    assert any(isinstance(part, OpaqueOp) for part in module.modules())
    assert "1 nodes compute with integers" in caplog.text
    assert "MatMulInteger 'i'" in caplog.text


TABLE = [node("Gather", "e i", "p"), node("MatMul", "p m", "y")]
FORMS = {
    "conv": [node("Conv", "x w b", "y", pads=[1, 1])],
    "conv without bias": [node("Conv", "x w", "y")],
    "groups": [node("Conv", "x half b", "y", group=2)],
    "gemm": [node("Flatten", "x", "f"), node("Gemm", "f g b", "y", transB=1)],
    "product": [node("MatMul", "x m", "p"), node("Add", "p mb", "y")],
    "two results": [
        node("MatMul", "x m", "p"),
        node("Transpose", "x", "t", perm=[0, 2, 1]),
        node("MatMul", "t p", "y"),
    ],
    "table": [node("Relu", "x", "z"), node("Cast", "z", "i", to=7), *TABLE],
    "lstm": [node("LSTM", "x l r lb", "o", hidden_size=5, direction="bidirectional"), node("Relu", "o", "y")],
    "lstm without bias": [
        node("LSTM", "x l r", "o _ c", hidden_size=5, direction="bidirectional"),
        node("Relu", "o", "p"),
        node("Add", "p c", "y"),
    ],
}
STORED = {
    **{"w": weights(6, 4, 3), "half": weights(6, 2, 3), "b": weights(6), "g": weights(6, 32)},
    **{"m": weights(8, 6), "mb": weights(6), "l": weights(2, 20, 8), "r": weights(2, 20, 5)},
    **{"lb": weights(2, 40), "e": weights(9, 8)},
}


@each_of("form", FORMS)
def test_all_forms_of_dynamic_layers_come_in_as_float_layers(form: str, tmp_path: Path) -> None:
    read = {name for part in FORMS[form] for name in part.input}
    stored = {name: array for name, array in STORED.items() if name in read}
    source = save(model(FORMS[form], {"x": [3, 4, 8]}, stored=stored), tmp_path)
    x = np.random.default_rng(3).normal(size=(3, 4, 8)).astype(np.float32)
    expected = onnxruntime.InferenceSession(source).run(None, {"x": x})[0]
    files = []
    for per_channel in (False, True):
        options = {"per_channel": per_channel, "extra_options": {"MatMulConstBOnly": False}}
        files.append(tmp_path / f"{per_channel}.onnx")
        quantize_dynamic(source, files[-1], **options)
    if "Conv" not in {part.op_type for part in FORMS[form]}:  # has no kernel for these integers
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        onnxruntime.InferenceSession(files[0], settings)
        files.append(tmp_path / "optimized.onnx")
    for file in files:
        module = qtrace.from_onnx(file)
        assert not any(isinstance(part, OpaqueOp) for part in module.modules())
        error = module(mge.Tensor(x)).numpy() - expected
        assert 10 * np.log10((expected**2).sum() / (error**2).sum()) > 34


def _config(recipe: str) -> dict[str, object]:
    config: dict[str, object] = qtrace.load_recipe(recipe).to_dict()
    return config
