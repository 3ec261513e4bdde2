"""The last lines of calibrate and export: size, MACs, predicted time, and why a file is slower."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.benchmarking.prediction import read_graph
from qtrace.cli.console import Console
from qtrace.errors import ExportError
from qtrace.quantizing.figures import note_file, note_graph


class Net(M.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = M.Conv2d(3, width, 3, padding=1)
        self.second = M.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def converted(width: int, side: int, config: dict | str):
    x = np.random.default_rng(0).normal(size=(1, 3, side, side)).astype("float32")
    prepared = qtrace.prepare(qtrace.trace(Net(width), x, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def test_parameters_and_macs_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    facts = note_graph(converted(8, 16, "backend/tflite"), Console())
    weights, biases = 8 * 3 * 9 + 8 * 8 * 9, 8
    assert facts["parameter_bytes"] == weights + 4 * biases
    assert facts["float_parameter_bytes"] == 4 * (weights + biases)
    assert facts["macs"] == facts["integer_macs"] == 16 * 16 * weights
    assert "predicted_seconds" not in facts  # tflite has no cost table
    assert capsys.readouterr().err.endswith(" million MACs, 100% of them on integers\n")


def test_a_placed_graph_says_the_predicted_times(capsys: pytest.CaptureFixture[str]) -> None:
    model = converted(64, 32, {"placement": "fastest"})
    facts = note_graph(model, Console())
    assert 0 < facts["predicted_seconds"] < facts["predicted_float_seconds"]
    error = capsys.readouterr().err
    assert "ms in float (" in error
    assert "warning" not in error


def test_a_graph_that_gains_nothing_is_said_to_be_slower(capsys: pytest.CaptureFixture[str]) -> None:
    facts = note_graph(converted(2, 4, {"placement": "small"}), Console(quiet=True))
    assert facts["predicted_seconds"] > facts["predicted_float_seconds"]
    assert (
        "predicted to be slower than float in onnxruntime, as its config asks for size"
        in capsys.readouterr().err
    )


def test_an_onnx_file_says_its_predicted_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = converted(64, 32, "onnxruntime"), tmp_path / "net.onnx"
    qtrace.export(model, path)
    facts = note_file(model, path, Console())
    assert facts["bytes"] == path.stat().st_size
    assert 0 < facts["predicted_seconds"] < facts["predicted_float_seconds"]
    error = capsys.readouterr().err
    assert "x), in one thread by cost table onnxruntime" in error
    assert "warning" not in error


def test_a_slower_file_says_where_its_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = converted(2, 4, "onnxruntime"), tmp_path / "net.onnx"
    qtrace.export(model, path)
    facts = note_file(model, path, Console(quiet=True))
    assert facts["predicted_seconds"] > facts["predicted_float_seconds"]
    error = capsys.readouterr().err
    assert "net.onnx is predicted to be slower than float in onnxruntime: of its time, " in error
    assert "% in Q/DQ" in error


@pytest.mark.parametrize("suffix", ["tflite", "onnx"])
def test_files_for_runtimes_without_a_table_say_size_and_macs(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = converted(8, 8, "backend/tflite" if suffix == "tflite" else "backend/openvino")
    path = tmp_path / f"net.{suffix}"
    qtrace.export(model, path)
    facts = note_file(model, path, Console())
    assert {*facts} - {"choice"} == {"bytes", "macs", "integer_macs", "precision"}
    assert "predicted" not in capsys.readouterr().err


def test_a_float_file_has_one_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = qtrace.trace(Net(8), np.zeros((1, 3, 8, 8), "float32"), check=False)
    qtrace.export(traced, tmp_path / "net.onnx")
    facts = note_file(traced, tmp_path / "net.onnx", Console())
    assert facts["macs"] == 8 * 8 * (8 * 3 * 9 + 8 * 8 * 9)
    assert facts["predicted_seconds"] == facts["predicted_float_seconds"] > 0
    assert "in float" not in capsys.readouterr().err


def test_a_file_whose_shapes_cannot_be_inferred_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise qtrace.errors.ExportError("no shapes")

    traced = qtrace.trace(Net(8), np.zeros((1, 3, 8, 8), "float32"), check=False)
    qtrace.export(traced, tmp_path / "net.onnx")
    monkeypatch.setattr("qtrace.benchmarking.prediction.read_graph", refuse)
    assert "predicted_seconds" not in note_file(traced, tmp_path / "net.onnx", Console())


def test_the_time_of_open_sizes_is_that_of_the_recorded_ones(tmp_path: Path) -> None:
    seconds, x = {}, np.zeros((1, 3, 48, 48), "float32")
    for name, dynamic in (("open", {"x": {0: "N", 2: "H", 3: "W"}}), ("fixed", None)):
        traced = qtrace.trace(Net(32), x, dynamic=dynamic)
        path = qtrace.export(traced, tmp_path / f"{name}.onnx")
        seconds[name] = note_file(traced, path, Console(quiet=True))["predicted_seconds"]
    assert seconds["open"] == pytest.approx(seconds["fixed"])
    with pytest.raises(ExportError, match="axis 2 of input 'x' .* is open: give its shape"):
        read_graph(tmp_path / "open.onnx")
