"""``qtrace quantize``: a verified file, or a sentence and no file."""

from __future__ import annotations

import json
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from tests.nets import images, net


def test_a_file_its_verdict_and_a_mismatch(run, here) -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))
    x = images(32, 3, 8, 8)
    qtrace.export(qtrace.trace(module, x[:2], check=False), "net.onnx")
    np.savez("d.npz", x=x, y=np.zeros(32))
    before = here.names()
    wrong = run("quantize", "net.onnx", "-d", "d.npz", "-o", "out.tflite", "--target", "onnxruntime")
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err == (
        "error: out.tflite is no file for onnxruntime: name it out.onnx, or give another target.\n"
    )
    limit = run("quantize", "net.onnx", "-d", "d.npz", "-o", "out.onnx", "--at-least", "90", "-q")
    assert limit.code == 1
    assert "nothing was written, as a limit does not hold" in limit.err
    assert here.names() == before
    result = run("quantize", "net.onnx", "-d", "d.npz", "-o", "out.onnx", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["file"] == "out.onnx"
    assert data["verified"] is True
    assert data["verdict"]["word"] == "good"
    assert data["verdict"]["measured_on"] == "held-back samples"
    assert "d.npz: taken for labels and left out: y" in result.err
    assert "verdict   good: " in result.err
    assert "verified  " in result.err
    assert Path("out.onnx").is_file()
