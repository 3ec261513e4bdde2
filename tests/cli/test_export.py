"""``qtrace export``: formats by name, options, and files that stay when it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from qtrace.errors import QtraceError


def test_export(run, here, fakes):
    result = run("export", "float.mge", "-o", "new/net.param", "--json")
    assert json.loads(result.out) == {"file": "new/net.param", "inputs": [], "outputs": []}
    assert sorted(os.listdir("new")) == ["net.bin", "net.param"]


def test_export_options(run, here, fakes):
    given = ["-O", "packed=true", "-O", "io-type=int8", "--allow-float", "softmax"]
    assert run("export", "float.mge", "-o", "net.onnx", "-f", "onnx", *given).code == 0
    wanted = {"packed": True, "io_type": "int8", "allow_float": ("softmax",)}
    assert fakes.calls["export"] == ("onnx", wanted)
    result = run("export", "float.mge", "-o", "net.onnx", "-O", "packed")
    assert result.code == 2
    assert "'packed' is not of the form NAME=VALUE" in result.err


def test_export_options_are_read_as_in_a_recipe(run, here, fakes):
    options = ["-O", "a=yes", "-O", "b=1e-4", "-O", "c=010", "-O", "d=2024-01-01", "-O", "e=[1, x]"]
    assert run("export", "float.mge", "-o", "net.onnx", *options).code == 0
    assert fakes.calls["export"][1] == {"a": "yes", "b": 1e-4, "c": 10, "d": "2024-01-01", "e": [1, "x"]}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a={b: 1, b: 2}", "duplicate key 'b', first given in line 1."),
        ("a=!!set {b}", "the tag tag:yaml.org,2002:set is not supported"),
        ("a=" + "[" * 60 + "]" * 60, "more than 50 levels of nesting."),
        ("a=*b", "found undefined alias 'b'; quote text that begins with *."),
        ("a=", "it is empty: write null, or quotes for empty text."),
    ],
)
def test_export_options_that_cannot_be_read(run, here, fakes, value, reason):
    result = run("export", "float.mge", "-o", "net.onnx", "-O", value)
    assert result.code == 2
    assert f"the value of {value!r} cannot be read as YAML: " in " ".join(result.err.split())
    assert reason in " ".join(result.err.split())


def test_failed_export_keeps_the_old_file(run, here, fakes):
    Path("net.onnx").write_text("old")
    fakes.fail = QtraceError("no")
    assert run("export", "float.mge", "-o", "net.onnx").code == 2
    assert Path("net.onnx").read_text() == "old"
    assert not [name for name in here.names() if name.startswith(".")]


def test_export_takes_no_code(run, here, fakes):
    result = run("export", f"{here.module}:Net", "-o", "net.onnx")
    assert result.code == 2
    assert "takes a file" in result.err


def test_a_traced_model_is_written_in_float_and_verified(run, here):
    np.save("x.npy", np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32))
    assert run("trace", f"{here.module}:factory", "--shape", "2x4", "-o", "plain.mge").code == 0
    result = run("export", "plain.mge", "-o", "net.onnx", "-O", "opset=17")
    assert (result.code, result.out) == (0, "net.onnx\n")
    model = onnx.load("net.onnx")
    assert [node.name for node in model.graph.node] == ["/fc/Gemm"]
    assert {t.name for t in model.graph.initializer} == {"fc.weight", "fc.bias"}
    assert model.opset_import[0].version == 17
    result = run("verify", "net.onnx", "--model", "plain.mge", "--data", "x.npy")
    assert result.code == 0, result.err
    assert "a float file: its outputs are compared" in result.out


def test_a_format_of_quantized_models_refuses_a_traced_one(run, here):
    assert run("trace", f"{here.module}:factory", "--shape", "2x4", "-o", "plain.mge").code == 0
    result = run("export", "plain.mge", "-o", "net.dot")
    assert result.code == 2
    text = " ".join(result.err.split())
    assert "format dot writes quantized modules, and Net is a plain traced module: prepare, calibrate" in text
    assert not Path("net.dot").exists()


def test_help_says_which_models_it_takes(run):
    text = " ".join(run("export", "--help").out.split())
    assert "or a float.mge of `qtrace trace`, which is written in float" in text
