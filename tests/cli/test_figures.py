"""The figures that commands print."""

from __future__ import annotations

import json

import numpy as np


def test_commands_print_the_figures(run, here) -> None:
    np.save("x.npy", np.ones((4, 4), "float32"))
    assert run("trace", f"{here.module}:factory", "--shape", "2x4", "-o", "plain.mge").code == 0
    result = run("calibrate", "plain.mge", "-d", "x.npy", "-r", "onnxruntime", "-o", "out", "--json")
    assert json.loads(result.out)["macs"] == 16
    result = run("export", "out/quantized.mge", "-o", "net.onnx", "--json")
    assert json.loads(result.out)["predicted_seconds"] > 0
