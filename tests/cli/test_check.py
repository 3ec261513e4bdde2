"""``qtrace check``: exit codes, what it prints, and the file that --fix writes."""

from __future__ import annotations

import json
import sys

import megengine.module as M
import onnx
import pytest

import qtrace
from tests.extras.contracts.planted import FORMS, build
from tests.nets import images, net


@pytest.fixture
def file(here):
    onnx.save(build(FORMS["qnn"]), "net.onnx")
    return "net.onnx"


def test_a_file_that_keeps_the_contract(run, file):
    result = run("check", file, "--target", "qnn")
    assert result.code == 0, result.err
    assert result.out.endswith(
        "keeps the contract of qnn (QNN on the Hexagon tensor processor); not run on the device\n"
    )


def test_a_file_that_does_not(run, file):
    result = run("check", file, "-t", "tensorrt", "--json")
    assert result.code == 1
    report = json.loads(result.out)
    assert report["passed"] is False
    assert report["device"] == "not run on the device"
    rules = {(v["rule"], v["node"]) for v in report["violations"]}
    assert {("activation-types", "x_q"), ("float-biases", "conv1"), ("unrounded-summands", "sum")} <= rules
    assert all(v["source"] and v["text"] for v in report["violations"])
    assert run("check", file, "-t", "tensorrt").code == 1


def test_the_runtime_that_is_here_is_asked(run, file):
    result = run("check", file, "-t", "onnxruntime", "--json")
    assert result.code == 0
    assert json.loads(result.out)["float_by"] == "onnxruntime"
    result = run("check", file, "-t", "onnxruntime", "--json", "--runtime-python", sys.executable)
    assert result.code == 0, result.err
    by = json.loads(result.out)["float_by"]
    assert by.startswith("onnxruntime ")
    assert by.endswith(f"by {sys.executable}")


def test_fix_writes_another_file(run, file, here):
    before = (here.path / file).read_bytes()
    result = run("check", file, "-t", "tensorrt", "--fix", "-o", "fixed.onnx")
    assert result.code == 0, result.out
    assert "fixed: Conv conv1: its bias passes a DequantizeLinear of int32" in result.out
    assert (here.path / file).read_bytes() == before
    assert run("check", "fixed.onnx", "-t", "tensorrt").code == 0


def test_fix_and_out_belong_together(run, file, here):
    for arguments in (("--fix",), ("-o", "fixed.onnx")):
        result = run("check", file, "-t", "tensorrt", *arguments)
        assert result.code == 2
        assert "--fix and -o belong together" in result.err
    assert {path.name for path in here.path.iterdir() if path.suffix == ".onnx"} == {file}


@pytest.mark.parametrize(
    ("file", "target", "said"),
    [
        ("gone.onnx", "qnn", "gone.onnx does not exist"),
        ("text.onnx", "qnn", "text.onnx is not an ONNX file"),
        ("net.tflite", "qnn", "net.tflite is not an ONNX file by its name"),
        (
            "net.onnx",
            "npu",
            "unknown contract 'npu'; known: onnxruntime, qnn, ryzenai, ryzenai_xint8, tensorrt, or your own "
            "as 'pkg.mod:NAME'.",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(run, here, file, target, said):
    (here.path / "text.onnx").write_text("text")
    onnx.save(build(FORMS["qnn"]), "net.onnx")
    result = run("check", file, "-t", target)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("backend", "device"), [("tensorrt", "an NVIDIA GPU with TensorRT"), ("onnxruntime", "")]
)
def test_export_says_what_was_not_run_on_the_device(run, here, backend, device):
    x = images(2, 3, 8, 8)
    module = net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 16, 3))
    prepared = qtrace.prepare(qtrace.trace(module, x[:1], check=False), {"backend": backend})
    qtrace.save(qtrace.convert(qtrace.calibrate(prepared, [x], progress=False)), "q.mge")
    result = run("export", "q.mge", "-o", "net.onnx", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out).get("device", "") == (f"not run on the device, {device}" if device else "")
    assert (f"qtrace check net.onnx --target {backend}" in result.err) == bool(device)
