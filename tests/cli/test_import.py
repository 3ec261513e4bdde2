"""``qtrace import``, and ONNX files where a command takes a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import qtrace
from tests.importing.onnx.networks import conv_bn, model, node, save, weights


@pytest.fixture
def files(here):
    save(conv_bn(), Path())
    stored = {"conv.weight": weights(4, 3, 3, 3)}
    save(
        model([node("Conv", "x conv.weight", "y")], {"x": ["n", 3, "h", "w"]}, stored=stored),
        Path(),
        "open.onnx",
    )
    np.savez("image.npz", image=weights(4, 3, 8, 8))
    np.savez("x.npz", x=weights(4, 3, 10, 12))


def test_a_file_becomes_a_traced_model(run, files):
    result = run("import", "net.onnx", "-o", "imported.mge")
    assert (result.code, result.out) == (0, "imported.mge\n")
    assert dict(qtrace.load("imported.mge").named_modules()).keys() >= {"backbone.stage1.conv", "head.fc"}


def test_open_sizes_are_named_and_given(run, files):
    result = run("import", "open.onnx", "-o", "imported.mge")
    assert result.code == 2
    assert "leaves sizes of 'x' [n, 3, h, w] open" in result.err
    assert "--shape name=1x3x..." in result.err
    assert not Path("imported.mge").exists()
    assert run("import", "open.onnx", "--shape", "x=1x3x9x9", "-o", "imported.mge").code == 0
    assert (
        run("import", "open.onnx", "--shape", "x=1x3x9x9", "--batch", "none", "-o", "imported.mge").code == 0
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--shape", "1x3x9x9"), "is not an input and its shape, such as x=1x3x48x320"),
        (("--shape", "x=1xx3"), "is not a shape such as 1x3x224x224"),
        (("--shape", "x=1x3x9x9", "--shape", "x=1x3x9x9"), "names an input twice"),
        (("--shape", "z=1x3x9x9"), "there is no input 'z'"),
        (("--shape", "x=1x3x9x9", "--batch", "x:7"), "names no axis of an input"),
    ],
)
def test_wrong_arguments_are_one_sentence(run, files, arguments, sentence):
    result = run("import", "open.onnx", *arguments, "-o", "imported.mge")
    assert result.code == 2
    assert sentence in result.err
    assert not Path("imported.mge").exists()


def test_commands_take_the_file_itself(run, files):
    assert "scores" in run("explain", "net.onnx", "-r", "onnxruntime").out
    calibrated = run("calibrate", "open.onnx", "-d", "x.npz", "-r", "onnxruntime", "-o", "int8", "-q")
    assert calibrated.code == 0, calibrated.err
    node_shapes = [tuple(n.shape) for n in qtrace.load("int8/quantized.mge").graph.inputs[1:]]
    assert node_shapes == [(1, 3, 10, 12)]
    assert run("export", "net.onnx", "-o", "again.onnx").code == 0


def test_the_float_network_takes_the_sizes_of_the_quantized_model(run, files):
    np.save("x.npy", weights(4, 3, 10, 12))
    assert run("calibrate", "open.onnx", "--data", "x.npy", "-o", "int8").code == 0
    assert run("export", "int8/quantized.mge", "-o", "int8.onnx").code == 0
    result = run(
        "verify", "int8.onnx", "-m", "int8/quantized.mge", "-d", "x.npy", "--float", "open.onnx", "--json"
    )
    assert (result.code, result.err) == (0, "")
