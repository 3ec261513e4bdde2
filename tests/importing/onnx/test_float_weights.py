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

import qtrace
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import TracedModule
from qtrace.preparation.record import is_quantized
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
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
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


def _config(recipe: str) -> dict[str, object]:
    config: dict[str, object] = qtrace.load_recipe(recipe).to_dict()
    return config
