"""The runtimes in another interpreter: the same integers, and those of the newest versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification import runtimes
from tests.nets import MobileNetV2, ResNet, images, randomize

BATCHES = [images(2, 3, 32, 32, seed=s) for s in range(3)]
# Runtime -> the recipe of its target and the suffix of its files.
FORMS = {
    "onnxruntime": ("backend/onnxruntime", "onnx"),
    "openvino": ("backend/openvino", "onnx"),
    "litert": ("backend/tflite", "tflite"),
    "ncnn": ("backend/ncnn", "param"),
}
NEWEST = ("numpy", "onnxruntime", "openvino", "ai-edge-litert", "ncnn")


def _export(model: object, runtime: str, folder: Path) -> tuple[TracedModule, Path]:
    recipe, suffix = FORMS[runtime]
    prepared = qtrace.prepare(qtrace.trace(randomize(model), BATCHES[0], check=False), recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, BATCHES[:2], progress=False))
    return converted, qtrace.export(converted, folder / f"m.{suffix}")


@pytest.mark.parametrize(
    "runtime", ["onnxruntime", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FORMS)[1:])]
)
def test_another_interpreter_gives_the_same_integers(runtime: str, tmp_path: Path) -> None:
    converted, path = _export(ResNet(8, (1, 1)), runtime, tmp_path)
    here = qtrace.verify(path, converted, BATCHES[2:], runtime=runtime)
    there = qtrace.verify(
        path, converted, BATCHES[2:], runtime=runtime, runtime_host=RuntimeHost(sys.executable)
    )
    assert there.sites == here.sites
    assert (there.kernels is None) == (here.kernels is None)
    assert here.to_dict()["runtime_host"] is None
    side = there.to_dict()["runtime_host"]
    assert (side["runtime"], side["host"]) == (runtime, sys.executable)
    assert side["processor"]
    assert f"runtime: {runtime} {side['version']}, Python 3.10" in there.summary()


def test_a_runtime_of_this_process_alone_takes_no_host() -> None:
    with pytest.raises(
        ExportError, match=r"megengine runs in this process only: leave out the .*, ssh board"
    ):
        runtimes.get(Path("m.mge"), "megengine", RuntimeHost(runner="ssh board"))


def _later_python() -> str | None:
    """Returns a CPython of 3.12 or later that can make a virtual environment."""
    names = [f"python3.{minor}" for minor in (14, 13, 12)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [*(p for name in names for p in [shutil.which(name)] if p)]
    for minor in (14, 13, 12):
        candidates += map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/python")))
    code = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))"
    for candidate in candidates:
        if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeHost]:
    """An interpreter with the newest runtimes; QTRACE_NEWEST_PYTHON names one that is there already."""
    if ready := os.environ.get("QTRACE_NEWEST_PYTHON"):
        yield RuntimeHost(ready)
        return
    python = _later_python()
    if python is None:
        pytest.skip("no CPython of 3.12 or later is here to run the newest runtimes")
    folder = tmp_path_factory.mktemp("newest")
    # The runtimes of this environment are pinned by the variables of `make`; those there are the newest.
    clean = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    subprocess.run([python, "-m", "venv", folder], env=clean, check=True, capture_output=True)
    host = RuntimeHost(folder / "bin" / "python")
    command = [*host.command, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *NEWEST]
    installed = subprocess.run(command, env=clean, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the newest runtimes cannot be installed: {installed.stderr.strip()[-300:]}")
    yield host
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", list(FORMS))
def test_the_newest_runtime_computes_each_op_as_the_graph_does(
    newest: RuntimeHost, runtime: str, tmp_path: Path
) -> None:
    model = MobileNetV2(0.25, blocks=(1, 2, 1))
    converted, path = _export(model, runtime, tmp_path)
    report = qtrace.verify(
        path, converted, BATCHES[2:], runtime=runtime, runtime_host=newest, optimized=runtime != "openvino"
    )
    assert report.worst_lsb() <= 1, report.summary()
    assert report.passed, report.summary()
    if report.kernels is not None:
        assert len(report.kernels.integer) > len(report.kernels.floats), report.kernels.describe()
