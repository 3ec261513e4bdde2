"""A runtime whose optimized kernel is wrong: bisect names the kernel and says that the file is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime as ort
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.kernels import find_kernels, products_are_wrong
from qtrace.onnxfile.local_session import onnxruntime_errors
from qtrace.runtimes import worker
from qtrace.targets.onnxruntime import runtime as onnxruntime
from qtrace.targets.openvino import runtime as openvino
from qtrace.targets.tflite import runtime as litert
from qtrace.verification import crosscheck
from qtrace.verification.runtimes.base import RuntimeRun
from tests.nets import images, net

BATCH = images(1, 64, 8, 8)
FILES = {"onnxruntime": "m.onnx", "openvino": "m.onnx", "litert": "m.tflite"}


@pytest.fixture(scope="module")
def converted() -> TracedModule:
    parts = {"conv": M.Conv2d(64, 19, 1)}
    traced = qtrace.trace(net(lambda self, x: F.relu(self.conv(x)), **parts), BATCH, check=False)
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced, "onnxruntime"), [BATCH], progress=False))


@pytest.fixture
def path(converted: TracedModule, tmp_path: Path) -> Path:
    return qtrace.export(converted, tmp_path / "m.onnx")


class _WrongWhenOptimized(onnxruntime.OnnxSession):
    """Stands for a wrong kernel: with optimizations, the last channels of the convolution are off."""

    def __init__(self, path: Path, optimize: bool) -> None:
        # On some machines onnxruntime's own kernel is wrong: this one runs without optimizations always.
        super().__init__(path, False)
        self.wrong = optimize

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        run = super().run(inputs)
        if self.wrong:
            integers = run.integers["relu_out"].copy()
            integers[:, 16:, -1, -1] ^= 64
            run = dataclasses.replace(run, integers={**run.integers, "relu_out": integers})
        return run


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = dataclasses.replace(onnxruntime.RUNTIME, open=_WrongWhenOptimized)
    monkeypatch.setattr(onnxruntime, "RUNTIME", runtime)
    monkeypatch.setattr(crosscheck, "products_saturate", lambda: False)


@pytest.mark.usefixtures("wrong_kernel")
@pytest.mark.parametrize("flags", ["fpu amx_bf16 amx_int8 avx2", "fpu avx2", None])
def test_a_wrong_optimized_kernel_is_named(
    flags: str | None, converted: TracedModule, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = path.with_name("cpuinfo")
    if flags is not None:
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
    monkeypatch.setattr(worker, "_CPU_INFO", cpuinfo)
    difference = qtrace.bisect(path, converted, [BATCH])
    assert difference is not None
    assert (difference.stage, difference.op) == ("optimized", "F.conv2d")
    first = difference.causes[0]
    assert ("AMX" in first) == ("amx_int8" in (flags or ""))
    assert "optimizations disabled" in first
    assert "in float by a rule" in first
    assert not any(cause.startswith("unknown") for cause in difference.causes)
    assert difference.check.side == "runtime"
    assert "so the file is right" in difference.table()


def test_other_ops_and_runtimes_are_not_blamed_on_amx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: amx_int8\n")
    monkeypatch.setattr(worker, "_CPU_INFO", cpuinfo)
    assert "AMX" in crosscheck.optimized_kernel_cause("onnxruntime", "matmul")
    assert "AMX" not in crosscheck.optimized_kernel_cause("onnxruntime", "avg_pool2d")
    assert "AMX" not in crosscheck.optimized_kernel_cause("openvino", "matmul")


def _raise_bug(*args: object, **kwargs: object) -> None:
    raise LookupError("a bug")


def test_the_exceptions_of_onnxruntime_are_listed() -> None:
    errors = onnxruntime_errors()
    with pytest.raises(errors):
        ort.InferenceSession(b"no model")
    assert Exception not in errors
    assert not issubclass(LookupError, errors)


def _break_onnx_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("onnx.load", _raise_bug)


def _break_session(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("onnxruntime.InferenceSession", _raise_bug)


def _break_external_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qtrace.onnxfile.external_data.load_tensors", _raise_bug)


@pytest.mark.parametrize("plant", [_break_onnx_load, _break_session, _break_external_data])
def test_a_bug_surfaces_while_onnxruntime_opens_a_file(
    plant: Callable[[pytest.MonkeyPatch], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(LookupError, match="a bug"):
        onnxruntime.OnnxSession(path, False)


def test_a_bug_surfaces_while_kernels_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_session(monkeypatch)
    with pytest.raises(LookupError, match="a bug"):
        find_kernels(path)


def test_a_bug_surfaces_while_a_file_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for session in (onnxruntime.OnnxSession(path, False), openvino.OpenvinoSession(path, False)):
        with pytest.raises(ExportError, match="refused the input"):
            session.run([BATCH[:, :5]])
    session = onnxruntime.OnnxSession(path, False)
    monkeypatch.setattr(session.compiled, "run", _raise_bug)
    with pytest.raises(LookupError, match="a bug"):
        session.run([BATCH])
    session = openvino.OpenvinoSession(path, False)
    monkeypatch.setattr(worker.Openvino, "run", _raise_bug)
    with pytest.raises(LookupError, match="a bug"):
        session.run([BATCH])


def test_a_bug_surfaces_while_openvino_opens_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openvino.Core.compile_model", _raise_bug)
    with pytest.raises(LookupError, match="a bug"):
        openvino.OpenvinoSession(path, False)


def test_a_bug_surfaces_while_litert_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.tflite"
    file.write_bytes(b"\x1c\0\0\0TFL3" + b"\xff" * 60)
    with pytest.raises(ExportError, match="not a TFLite file"):
        litert.LitertSession(file, False)
    monkeypatch.setattr("ai_edge_litert.schema_py_generated.ModelT.InitFromPackedBuf", _raise_bug)
    with pytest.raises(LookupError, match="a bug"):
        litert.LitertSession(file, False)


def test_a_bug_surfaces_in_the_cross_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from qtrace.verification import crosscheck

    _break_session(monkeypatch)
    with pytest.raises(LookupError, match="a bug"):
        crosscheck._run_onnxruntime(b"", {})


@pytest.mark.skipif(not products_are_wrong(), reason="onnxruntime's kernels are right on this CPU")
def test_the_real_fault_is_named(converted: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(converted, tmp_path / "plain.onnx", amx=False)
    difference = qtrace.bisect(path, converted, [BATCH])
    assert difference is not None
    assert difference.stage == "optimized"
    assert "AMX" in difference.causes[0]
    assert "amx_int8" in difference.table()
    report = qtrace.verify(path, converted, [BATCH])
    assert crosscheck.WRONG_PRODUCTS in report.summary()
