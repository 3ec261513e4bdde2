"""Bias correction: the mean error of every channel is gone, on inputs of the corrected graph."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace import QConfig
from qtrace.graph.interpreter import Interpreter
from qtrace.preparation.model import read_record
from tests.nets import ResNet, images, net, randomize


def _calibrated(module: M.Module, batches: list[np.ndarray], *ptq: Any, bits: int = 4) -> Any:
    traced = qtrace.trace(module, batches[0], check=False)
    config = QConfig(backend="generic", weight={"bits": bits}, activation={"bits": bits}, ptq=ptq)
    return qtrace.calibrate(qtrace.prepare(traced, config), batches, progress=False)


def _values(model: Any, batches: list[np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    values: dict[str, list[np.ndarray]] = {n: [] for n in names}

    class Keep(Interpreter):
        def on_node(self, node: Any, value: Any) -> Any:
            if node.name in values:
                values[node.name].append(value.numpy())
            return value

    for batch in batches:
        Keep(model).run(mge.Tensor(batch))
    return {n: np.concatenate(v).astype(np.float64) for n, v in values.items()}


def test_no_channel_has_a_mean_error_on_the_calibration_data() -> None:
    module = randomize(ResNet(width=4, blocks=(1, 1)))
    batches = [images(4, 3, 32, 32, seed=s) for s in range(3)]
    plain = _calibrated(module, batches, "fuse_bn", bits=8)
    prepared = _calibrated(module, batches, "fuse_bn", "bias_correction", bits=8)
    report = read_record(prepared).ptq[-1]
    names = [e["site"] for e in report["errors"]]
    assert len(names) == 7
    qtrace.set_phase(plain, "float")
    expected = _values(plain, batches, names)
    actual = _values(prepared, batches, names)
    for name in names:
        axes = (0, 2, 3) if expected[name].ndim == 4 else (0,)
        error = np.abs((expected[name] - actual[name]).mean(axis=axes)).max()
        assert error < 1e-3 * np.abs(expected[name]).max(), name  # an int32 step of the bias
    assert all(e["after"] >= e["before"] for e in report["errors"])


def test_the_report_has_the_error_of_the_outputs_on_calibration_data() -> None:
    module, batches = randomize(ResNet(width=4, blocks=(1, 1))), [images(8, 3, 32, 32)]
    plain = _calibrated(module, batches, "fuse_bn")
    prepared = _calibrated(module, batches, "fuse_bn", "bias_correction")
    (output,) = read_record(prepared).ptq[-1]["outputs"]
    assert read_record(prepared).ptq[-1]["measured"] == "8 samples of the calibration data"
    expected = {}
    for key, model in (("before", plain), ("after", prepared)):
        expected[key] = _values(model, batches, [model.graph.outputs[0].name]).popitem()[1]
    qtrace.set_phase(plain, "float")
    exact = _values(plain, batches, [plain.graph.outputs[0].name]).popitem()[1]
    for key, value in expected.items():
        ratio = 10 * np.log10(np.sum(exact**2) / np.sum((value - exact) ** 2))
        assert abs(output[key] - ratio) < 1e-3
    assert output["after"] > output["before"]
    text = "\n".join(qtrace.explain(prepared).algorithms())
    assert f"outputs: {output['site']} {output['before']:.1f} -> {output['after']:.1f} dB (SQNR on 8" in text


def test_a_layer_without_bias_gets_one_and_convert_and_export_keep_it(tmp_path: Any) -> None:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))),
        a=M.Conv2d(4, 6, 3, bias=False),
        b=M.Conv2d(6, 5, 1, bias=False),
    )
    batches = [images(4, 4, 8, 8, seed=s) for s in range(2)]
    prepared = _calibrated(module, batches, "bias_correction", bits=8)
    assert np.abs(prepared.a.bias.numpy()).max() > 0
    quantized = qtrace.convert(prepared)
    x = mge.Tensor(batches[0])
    np.testing.assert_array_equal(quantized(x).numpy(), prepared(x).numpy())
    assert qtrace.explain(quantized).ptq == read_record(prepared).ptq
