"""`quantize` with the runtime in another interpreter: speed and verification come from there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.benchmarking import files
from qtrace.benchmarking.files import Speed
from qtrace.errors import ExportError, QtraceError
from qtrace.quantizing import delivering
from qtrace.runtimes.host import RuntimeHost
from tests.nets import images, net

DATA = images(16, 3, 8, 8)
HERE = RuntimeHost(sys.executable)
_WHOLE = {"placement": "everything"}  # so small a network gains no time


def _module() -> M.Module:
    return net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 32, 3), b=M.Conv2d(32, 32, 3))


@pytest.fixture(autouse=True)
def _timed(_untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are timed, in short."""

    def compare(paths: Any, **options: Any) -> list[Speed]:
        return files.compare_files(paths, **{**options, "seconds": 0.1})

    monkeypatch.setattr(delivering, "compare_files", compare)


def _interpreter_without(package: str, tmp_path: Path) -> RuntimeHost:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / f"{package}.py").write_text(f"raise ImportError('No module named {package}')\n")
    script = tmp_path / "python"
    python = shlex.quote(sys.executable)
    script.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={shlex.quote(str(blocked))} exec {python} "$@"\n')
    script.chmod(0o755)
    return RuntimeHost(script)


@pytest.mark.parametrize(
    "name", ["m.onnx", *(pytest.param(n, marks=pytest.mark.slow) for n in ("m.tflite", "m.param"))]
)
def test_the_file_is_measured_and_verified_there(tmp_path: Path, name: str) -> None:
    result = qtrace.quantize(
        _module(), DATA, tmp_path / name, runtime_host=HERE, recipe=_WHOLE, progress=False
    )
    assert result.delivery.sentence().count(f"one thread, by {sys.executable}") == 1
    assert result.to_dict()["measured_by"] == sys.executable
    assert result.verify is not None
    assert result.verify.side["host"] == sys.executable
    assert result.card.figures["measured_by"] == sys.executable


def test_result_names_no_host_by_default(tmp_path: Path) -> None:
    result = qtrace.quantize(_module(), DATA, tmp_path / "m.onnx", verify=False, progress=False)
    assert "measured_by" not in result.to_dict()
    assert ", by " not in result.delivery.sentence()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("package", "name", "target"),
    [("onnxruntime", "m.onnx", "onnxruntime"), ("openvino", "m.onnx", "openvino"), ("ncnn", "m.param", None)],
)
def test_host_without_the_runtime_is_one_sentence(
    tmp_path: Path, package: str, name: str, target: str | None
) -> None:
    host = _interpreter_without(package, tmp_path)
    with pytest.raises(
        ExportError, match=f"the Python of .*python cannot import .*pip install {package}"
    ) as e:
        qtrace.quantize(
            _module(), DATA, tmp_path / name, target=target, verify=False, runtime_host=host, progress=False
        )
    assert "\n" not in str(e.value)
    assert not (tmp_path / name).exists()


def test_an_interpreter_that_is_not_there_is_refused_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtrace.quantizing.call_data.open_source", lambda *args: pytest.fail("too late"))
    with pytest.raises(
        QtraceError, match=r"m\.onnx needs a process of its own, and '/nowhere/python' does not"
    ):
        qtrace.quantize(
            _module(), DATA, tmp_path / "m.onnx", runtime_host=RuntimeHost("/nowhere/python"), progress=False
        )
