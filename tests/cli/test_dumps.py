"""``qtrace export --test-vectors``, and ``qtrace verify`` and ``bisect`` on tensors that were dumped."""

from __future__ import annotations

import json

import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import images, net

X = images(3, 3, 6, 6)


@pytest.fixture
def model(here):
    prepared = qtrace.prepare(
        qtrace.trace(net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 4, 3)), X[:1], check=False),
        "onnxruntime",
    )
    qtrace.save(qtrace.convert(qtrace.calibrate(prepared, [X], progress=False)), "q.mge")
    np.save("x.npy", X)


def test_vectors_out_and_dumps_back(run, model, here):
    result = run("export", "q.mge", "-o", "net.onnx", "--test-vectors", 2, "-d", "x.npy", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["vectors"] == "net.vectors"
    there = (
        "net.onnx",
        "-m",
        "q.mge",
        "-d",
        "net.vectors/inputs.npz",
        "--batch-size",
        1,
        "--dumped",
        "net.vectors",
    )
    assert run("verify", *there).code == 0
    result = run("bisect", *there)
    assert (result.code, result.out) == (0, "no site differs by more than 1 LSB, and no output\n")
    with np.load("net.vectors/0001.npz") as archive:
        tensors = {name: archive[name] for name in archive.files}
    tensors["sites/conv_out"] = tensors["sites/conv_out"][:, ::-1]
    np.savez("net.vectors/0001.npz", **tensors)
    assert run("verify", *there).code == 1
    result = run("bisect", *there)
    assert result.code == 1
    assert result.out.startswith("conv_out_q: F.conv2d in conv, batch 1")


def test_wrong_options_of_dumps_are_refused(run, model, here):
    result = run("export", "q.mge", "-o", "net.onnx", "--test-vectors", 2)
    assert (result.code, "--test-vectors and --data belong together" in result.err) == (2, True)
    there = ("net.onnx", "-m", "q.mge", "-d", "x.npy", "--batch-size", 1)
    result = run("verify", *there, "--layout", "nhwc")
    assert (result.code, "say how to read the tensors of --dumped" in result.err) == (2, True)
    (here.path / "map.yaml").write_text("a: [b]\n")
    result = run("verify", *there, "--dumped", ".", "--names", "map.yaml")
    assert (result.code, "map.yaml must be a mapping of names" in result.err) == (2, True)
    (here.path / "map.yaml").write_text("a: b\na: c\n")
    result = run("verify", *there, "--dumped", ".", "--names", "map.yaml")
    assert (result.code, "map.yaml:2" in result.err) == (2, True)
    result = run("export", "q.mge", "-o", "net.param", "--example")
    assert (result.code, "--example writes scripts for .onnx and .tflite files" in result.err) == (2, True)
    result = run("export", "q.mge", "-o", "net.onnx", "--test-vectors", 4, "-d", "x.npy")
    assert (result.code, "there are 3 batches for 4 test vectors" in result.err) == (2, True)
    assert here.names().count("net.vectors") == 0
