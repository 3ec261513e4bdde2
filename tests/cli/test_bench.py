"""``qtrace bench``: files side by side, and cost tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from qtrace import costs
from qtrace.benchmarking import files
from tests.benchmarking.nets import write


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "peak_memory", lambda *_: None)
    return [write(tmp_path / f"{name}.onnx", "plain", name == "int8") for name in ("float", "int8")]


def test_a_table_of_all_files(run, pair):
    result = run("bench", *pair, "--seconds", 0)
    assert (result.code, result.err) == (0, "")
    head, *lines = result.out.splitlines()
    assert head.split()[:3] == ["min", "ms", "median"]
    assert [line.split()[0] for line in lines[:2]] == ["float.onnx", "int8.onnx"]


def test_json_has_all_figures(run, pair):
    result = run("bench", *pair, "--seconds", 0, "--by-op", "--predict", "--threads", 2, "--json")
    data = json.loads(result.out)
    assert data["threads"] == 2
    assert "warning: the cost table was measured elsewhere: " in result.err
    assert "threads 1, here 2." in result.err
    assert [entry["file"] for entry in data["files"]] == [str(path) for path in pair]
    assert data["files"][0]["latency"]["runs"] == 9
    assert data["files"][1]["profile"]["nodes"][0]["name"]
    assert data["files"][1]["predicted_seconds"] > 0


def test_another_interpreter_is_timed_and_named(run, pair):
    options = ("--seconds", 0, "--by-op", "--runtime-python", sys.executable)
    data = json.loads(run("bench", *pair, *options, "--json").out)
    for entry in data["files"]:
        assert entry["runtime_host"]["host"] == sys.executable
        assert entry["latency"]["minimum"] > 0
        assert entry["profile"]["nodes"]
    assert f"by {sys.executable}" in run("bench", *pair, *options).out


def test_shapes_and_batches(run, pair):
    result = run("bench", pair[0], "--shape", "input0=1x16x8x9")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: input 'input0' is 1x16x8x8 in the file")
    assert "fixed batch of 1" in run("bench", pair[0], "--batch", 3).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", 1], "name the files to run"),
        (["x.onnx", "--shape", "x=1", "--shape", "x=2"], "--shape names an input twice"),
        (["none.onnx"], "none.onnx does not exist"),
        (["x.onnx", "--predict", "none.json"], "none.json cannot be read"),
    ],
)
def test_bench_refuses_wrong_arguments(run, pair, arguments, message):
    result = run("bench", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_table_of_another_runtime_predicts_nothing(run, pair):
    table = Path(costs.__file__).parent / "tables" / "openvino.json"
    result = run("bench", *map(str, pair), "--predict", str(table))
    assert (result.code != 0, result.out) == (True, "")
    assert "has the times of openvino" in " ".join(result.err.split())
