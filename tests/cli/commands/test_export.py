"""``qtrace export``: formats by name, options, and files that stay when it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qtrace.errors import QtraceError


def test_export(run, here, fakes):
    result = run("export", "float.mge", "-o", "new/net.param", "--json")
    assert json.loads(result.out) == {"file": "new/net.param"}
    assert sorted(os.listdir("new")) == ["net.bin", "net.param"]


def test_export_options(run, here, fakes):
    given = ["-O", "packed=true", "-O", "io-type=int8", "--allow-float", "softmax"]
    assert run("export", "float.mge", "-o", "net.onnx", "-f", "onnx", *given).code == 0
    wanted = {"packed": True, "io_type": "int8", "allow_float": ("softmax",)}
    assert fakes.calls["export"] == ("onnx", wanted)
    result = run("export", "float.mge", "-o", "net.onnx", "-O", "packed")
    assert result.code == 2
    assert "'packed' is not of the form NAME=VALUE" in result.err


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
