"""Commands take the folder of `qtrace calibrate` where they take one of its models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.importing.onnx.networks import conv_bn, save

_ON_QUANTIZED = {
    "export": ("export", "int8", "-o", "net-int8.onnx"),
    "compare": ("compare", "int8", "-d", "x.npy"),
    "explain": ("explain", "int8"),
    "inspect": ("inspect", "int8"),
    "diff": ("diff", "int8", "int8/quantized.mge"),
    "finetune": ("finetune", "int8", "-d", "x.npy", "-o", "tuned", "--steps", "2", "--batch-size", "4"),
}
_ON_FLOAT = {
    "calibrate": ("calibrate", "int8", "-d", "x.npy", "-o", "again"),
    "sensitivity": ("sensitivity", "int8", "-d", "x.npy"),
    "tune": ("tune", "int8", "-d", "x.npy", "-o", "best"),
    "split": ("split", "int8", "--at", "a", "-o", "parts"),
    "recipes check": ("recipes", "check", "onnxruntime", "--model", "int8"),
    "the float network": ("compare", "int8", "-d", "x.npy", "--float", "int8"),
}


@pytest.fixture
def folder(run, here):
    save(conv_bn(), Path())
    np.save("x.npy", np.random.default_rng(0).standard_normal((16, 3, 8, 8), np.float32))
    assert run("calibrate", "net.onnx", "-d", "x.npy", "-r", "onnxruntime", "-o", "int8").code == 0


def test_of_the_folder_each_command_takes_the_model_that_it_needs(run, folder):
    for words in _ON_QUANTIZED.values():
        result = run(*words)
        assert result.code == 0, result.err
    verified = run("verify", "net-int8.onnx", "--model", "int8", "-d", "x.npy")
    assert "error" not in verified.err
    assert "error" not in run("bisect", "net-int8.onnx", "--model", "int8/", "-d", "x.npy").err
    for words in _ON_FLOAT.values():
        result = run(*words)
        assert result.code == 2
        assert "int8 is a folder with a quantized model, and this command takes a float one" in result.err


def test_another_folder_is_refused(run, here):
    Path("images").mkdir()
    np.save("x.npy", np.zeros((2, 3, 8, 8), np.float32))
    for words in (
        ("export", "images", "-o", "a.onnx"),
        ("explain", "images"),
        ("compare", "images", "-d", "x.npy"),
    ):
        result = run(*words)
        assert result.code == 2
        assert "a folder that `qtrace calibrate` has written" in result.err
    result = run("calibrate", "images", "-d", "x.npy", "-o", "out")
    assert (result.code, result.err.count("images is a folder: give the file of a model.")) == (2, 1)


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "int8"),
        ("bench", "int8/quantized.mge"),
        ("check", "int8", "-t", "qnn"),
        ("check", "int8/prepared.mge", "-t", "qnn"),
        ("verify", "int8", "-m", "int8", "-d", "x.npy"),
        ("bisect", "int8", "-m", "int8", "-d", "x.npy"),
    ],
)
def test_a_command_on_exported_files_says_how_to_export_the_model(run, here, words):
    Path("int8").mkdir()
    for name in ("prepared.mge", "quantized.mge"):
        Path("int8", name).touch()
    result = run(*words)
    assert result.code == 2
    name = "prepared.mge" if "prepared" in words[1] else "quantized.mge"
    assert f"write one by `qtrace export int8/{name} -o model.onnx`" in result.err
