"""``--float fp16``: from the option to the file, and the note of what stays float32."""

from __future__ import annotations

import json
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
from onnx import TensorProto

import qtrace
from tests.nets import images, net

RECIPE = """schema: qtrace/1
backend: onnxruntime
rules:
  - {match: {name: "b*"}, quantize: false}
"""


def _halves(path: str) -> set[str]:
    model = onnx.load(path)
    return {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16}


def test_calibrate_export_and_quantize(run, here) -> None:
    module = net(
        lambda self, x: F.exp(self.b(F.relu(self.a(x))) * 0.1), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1)
    )
    x = images(32, 3, 8, 8)
    qtrace.save(qtrace.trace(module, x[:2], check=False), "net.mge")
    np.save("d.npy", x)
    Path("mine.yaml").write_text(RECIPE)
    common = ("-d", "d.npy", "-r", "mine.yaml", "--float", "fp16")
    done = run("calibrate", "net.mge", *common, "--out", "int8")
    assert done.code == 0, done.err
    assert "float16: 1 of 2 ops that stay float" in done.err
    assert "  float32: 1 exp: small errors of what it reads" in done.err
    exported = run("export", "int8/quantized.mge", "-o", "out.onnx", "--json")
    assert exported.code == 0, exported.err
    assert json.loads(exported.out)["float16"] == 1
    assert any(name.startswith("b_weight") for name in _halves("out.onnx"))
    wide = run("export", "int8/quantized.mge", "-o", "wide.onnx", "-O", "float=fp32")
    assert wide.code == 0
    assert "float16" not in wide.err
    assert _halves("wide.onnx") == set()
    verified = run("verify", "out.onnx", "-m", "int8/quantized.mge", "-d", "d.npy")
    assert verified.code == 0, verified.err
    assert "float16: 1 ops of the file" in verified.out + verified.err
    before = here.names()
    refused = run("quantize", "net.mge", "-d", "d.npy", "--float", "fp16", "-o", "out.tflite")
    assert refused.code == 2
    assert refused.err == (
        "error: float: fp16 has a form only in .onnx files, and out.tflite is none: leave it out.\n"
    )
    Path("fp.yaml").write_text(f"{RECIPE}float: fp16\n")
    refused = run("quantize", "net.mge", "-d", "d.npy", "-r", "fp.yaml", "-o", "out.tflite", "--force")
    assert (refused.code, refused.err.startswith("error: fp.yaml:5: float: fp16")) == (2, True)
    assert here.names() == [*before, "fp.yaml"] or sorted(here.names()) == sorted([*before, "fp.yaml"])
    Path("typo.yaml").write_text(f"{RECIPE}float: half\n")
    misspelt = run("quantize", "net.mge", "-d", "d.npy", "-r", "typo.yaml", "-o", "q.onnx")
    assert misspelt.err == "error: typo.yaml:5: float must be 'fp32' or 'fp16', not 'half'.\n"
    whole = run("quantize", "net.mge", *common, "-o", "q.onnx", "--no-measure")
    assert whole.code == 0, whole.err
    assert any(name.startswith("b_weight") for name in _halves("q.onnx"))
