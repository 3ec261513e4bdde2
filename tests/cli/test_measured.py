"""Every command says of which samples, and of which side of an export, its figures are."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import images, net

_GRAPH = "(graph with fake quants)"


@pytest.fixture
def folder(run, here):
    """A folder of `qtrace calibrate` with its data; the output of the command."""
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))
    x = images(40, 3, 8, 8)
    qtrace.save(qtrace.trace(module, x[:2], check=False), "conv.mge")
    np.save("x.npy", x)
    np.save("other.npy", x[:12])
    result = run("calibrate", "conv.mge", "-d", "x.npy", "-r", "onnxruntime", "-o", "int8", "--batch-size", 4)
    assert result.code == 0, result.err
    return result.err


def test_calibrate(folder):
    assert "on 8 held-back samples" in folder


def test_compare_tells_the_samples_of_its_verdict_from_those_of_its_table(run, folder):
    text = run("compare", "int8", "-d", "x.npy").out
    assert text.splitlines()[0].endswith("on 16 samples at the beginning of --data")
    assert f"sites and outputs: on 40 samples, all of --data {_GRAPH}" in text
    text = run("compare", "int8", "-d", "x.npy", "--max-batches", 3).out
    assert f"sites and outputs: on 24 samples at the beginning of --data (--max-batches) {_GRAPH}" in text


def test_verify(run, folder):
    assert run("export", "int8", "-o", "conv.onnx").code == 0
    text = run("verify", "conv.onnx", "-m", "int8", "-d", "x.npy").out
    last = text.splitlines()[-1]
    assert last.startswith("measured on 40 samples, all of --data (graph: graph with fake quants; ")
    assert last.endswith("the others: the runtime's outputs)")


@pytest.mark.quick(1)
@pytest.mark.parametrize("goal", [(), ("--at-least", 10)])
def test_sensitivity(run, folder, goal):
    words = ("sensitivity", "conv.mge", "-d", "x.npy", "-r", "onnxruntime", *goal)
    assert f"measured on 40 samples, all of --data, which calibrate it, too {_GRAPH}" in run(*words).out
    result = run(*words, "--eval-data", "other.npy")
    assert f"measured on 12 samples, all of --eval-data {_GRAPH}" in result.out


def test_a_model_whose_batch_is_fixed_is_judged_on_whole_batches(run, here):
    module = net(lambda self, x: F.reshape(F.relu(self.a(x)), (16, 288)), a=M.Conv2d(3, 8, 3))
    module.fc = M.Linear(288, 4)
    forward = net(lambda self, x: self.fc(self.head(x)), head=module, fc=M.Linear(288, 4))
    x = images(64, 3, 8, 8)
    qtrace.save(qtrace.trace(forward, x[:16], check=False), "fixed.mge")
    np.save("x.npy", x)
    words = ("fixed.mge", "-d", "x.npy", "-r", "onnxruntime", "--batch-size", 16, "-o", "int8")
    result = run("calibrate", *words)
    assert (result.code, "there is no verdict" in result.err) == (0, False), result.err
    assert "on 16 held-back samples" in result.err
    compared = run("compare", "int8", "-d", "x.npy", "--batch-size", 16)
    assert "on 16 samples at the beginning of --data" in compared.out
    assert Path("int8/verdict.json").exists()
