"""``qtrace verify``: its table, JSON and exit code."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify(run, here, fakes, passed, code):
    fakes.passed = passed
    result = run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy", "--batch-size", 2)
    assert (result.code, result.out) == (code, "a table\n")
    assert fakes.calls["verify"] == ("net.onnx", "float", 3, None)
    options = ("--float", "float.mge", "--json", "--progress")
    result = run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy", *options)
    assert fakes.calls["verify"][3] == "float"
    assert "1/1" in result.err
    assert (result.code, json.loads(result.out)["passed"]) == (code, passed)
