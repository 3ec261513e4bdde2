"""Deployed, a file is verified as it is, not by the outputs of the copy that shows its integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import openvino

import qtrace
from qtrace.verification.runtimes import get
from tests.nets import ResNet, images, randomize


def test_outputs_are_those_of_the_file_as_it_is(tmp_path: Path) -> None:
    x = images(8, 3, 32, 32)
    module = randomize(ResNet(4, (1, 1, 1, 1)))
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), "backend/onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")

    alone = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    ran = get(path, "onnxruntime").open(path, True).run([x])
    np.testing.assert_array_equal(ran.outputs[0], alone[0])

    # OpenVINO fuses across tensors that are not outputs, so there the copy gives other values.
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    alone = openvino.Core().compile_model(str(path), "CPU", settings)([x])[0]
    ran = get(path, "openvino").open(path, True).run([x])
    np.testing.assert_array_equal(ran.outputs[0], alone)
