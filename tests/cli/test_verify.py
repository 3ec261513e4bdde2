"""``qtrace verify``: its table, JSON and exit code."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify(run, here, fakes, passed, code):
    fakes.passed = passed
    result = run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy", "--batch-size", 2)
    text = "a table\nmeasured on 5 samples, all of --data\n"
    assert (result.code, result.out) == (code, text)
    assert fakes.calls["verify"] == ("net.onnx", "float", 3, None)
    options = ("--float", "float.mge", "--json", "--progress")
    result = run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy", *options)
    assert fakes.calls["verify"][3] == "float"
    assert "1/1" in result.err
    assert (result.code, json.loads(result.out)["passed"]) == (code, passed)


def test_a_file_of_a_graph_that_lost_columns_is_no_success(run, here, fakes, monkeypatch):
    lost = {"rows": [], "lost_groups": {"out, columns 4..9": 0.0}}
    monkeypatch.setattr("tests.cli.fakes.Table.to_dict", lambda _: lost)
    assert run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy").code == 1
