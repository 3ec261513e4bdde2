"""qtrace inspect on traced, quantized and ONNX files, and on a factory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from tests.nets import images, net

MACS = 4 * 64 * 3 * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model: traced, as ONNX, and calibrated."""
    home = tmp_path_factory.mktemp("inspect")
    x = images(1, 3, 8, 8)
    traced = qtrace.trace(
        net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(3, 4, 3, padding=1)), x, check=False
    )
    qtrace.save(traced, home / "float.mge")
    qtrace.export(traced, home / "float.onnx")
    qtrace.save(qtrace.calibrate(qtrace.prepare(traced), [x], progress=False), home / "prepared.mge")
    (home / "nets.py").write_text(
        "import megengine.module as M\n\n\ndef conv():\n    return M.Conv2d(3, 4, 3, padding=1)\n"
    )
    return home


@pytest.fixture
def inspect(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(folder)

    def call(*args: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as caught:
            cli.main(["inspect", *args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return call


def test_a_table_with_the_totals(inspect: Any) -> None:
    result = inspect("float.mge")
    assert result.code == 0
    assert "conv_out" in result.out
    assert f"MACs: {MACS:,}; parameters: 112" in result.out
    assert "activation memory: 2.0 KiB at most, at relu_out" in result.out


@pytest.mark.parametrize("model", ["float.mge", "float.onnx", "prepared.mge"])
def test_json_of_every_sort_of_file(inspect: Any, model: str) -> None:
    data = json.loads(inspect(model, "--json").out)
    assert data["model"] == model
    assert data["totals"]["macs"] == MACS


def test_a_factory_and_times(inspect: Any) -> None:
    data = json.loads(inspect("nets:conv", "--shape", "1x3x8x8", "--time", "1", "--json").out)
    assert data["totals"]["macs"] == MACS
    assert data["totals"]["seconds"] > 0


def test_a_drawing_of_a_float_graph(inspect: Any, folder: Path) -> None:
    result = inspect("float.mge", "--dot", "graph.dot")
    assert "graph.dot is written" in result.err
    text = (folder / "graph.dot").read_text()
    assert text.startswith("digraph ")
    assert "conv_out" in text


def test_a_missing_file_is_a_mistake(inspect: Any) -> None:
    result = inspect("missing.mge")
    assert result.code == 2
    assert "missing.mge" in result.err


def test_a_factory_without_a_shape_is_reported_the_option_that_this_command_has(inspect):
    result = inspect("nets:conv")
    assert result.code == 2
    assert "nets:conv must be traced: give --shape, such as --shape 1x3x224x224." in result.err


@pytest.mark.parametrize("model", ["float.mge", "prepared.mge", "float.onnx"])
def test_a_batch_is_compared_with_its_samples(inspect: Any, folder: Path, model: str) -> None:
    np.save(folder / "images.npy", images(6, 3, 8, 8))
    result = inspect(model, "--samples", "images.npy")
    assert result.code == 0, result.err
    assert result.out.rstrip().endswith("A batch of 4 gives what its samples give one by one.")


def test_the_op_that_combines_samples_is_named(inspect: Any, folder: Path) -> None:
    np.save(folder / "images.npy", images(6, 3, 8, 8))
    traced = qtrace.trace(
        net(lambda self, x: x - F.mean(x, axis=0, keepdims=True)), images(2, 3, 8, 8), check=False
    )
    qtrace.save(traced, folder / "centred.mge")
    result = inspect("centred.mge", "--samples", "images.npy")
    assert result.code == 1
    assert "first, mean_out (F.mean, tests/cli/test_inspect.py:" in result.out
    difference = json.loads(inspect("centred.mge", "--samples", "images.npy", "--json").out)["samples"]
    assert difference["difference"]["kind"] == "samples"
    np.save(folder / "one.npy", images(1, 3, 8, 8))
    result = inspect("centred.mge", "--samples", "one.npy")
    assert result.code == 2
    assert "give at least two along the first axis" in result.err
