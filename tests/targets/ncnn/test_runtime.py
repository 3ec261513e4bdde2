"""The ncnn runtime: which files it takes, and what it says about those that do not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.runtimes import worker
from qtrace.runtimes.child import RuntimeChild
from qtrace.verification import runtimes
from qtrace.verification.runtimes.base import run_outputs
from tests.nets import images, net


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    x = images(2, 4, 8, 8)
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, 3)), x, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/ncnn"), [x], progress=False)
    return qtrace.export(qtrace.convert(prepared), tmp_path / "m.param")


def test_integers_and_outputs_of_a_batch(exported: Path) -> None:
    session = runtimes.get(exported).open(exported, False)
    assert session.integer_names == ["x"]
    run = session.run([images(3, 4, 8, 8)])
    assert run.integers["x"].shape == (3, 4, 8, 8)
    assert run.integers["x"].dtype == np.int32
    assert np.abs(run.integers["x"]).max() == 127
    assert [o.shape for o in run.outputs] == [(3, 6, 6, 6)]


SCORES = {
    "mean": lambda self, x: F.mean(self.c(x), axis=(1, 2, 3)),
    "distance": lambda self, x: F.sqrt(F.sum(F.mean(self.c(x), axis=(2, 3)) ** 2, axis=1)),
    "maximum beside maps": lambda self, x: (self.c(x), F.max(F.flatten(self.c(x), 1), axis=1)),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("forward", SCORES.values(), ids=SCORES)
def test_an_output_of_one_number_for_each_sample(tmp_path: Path, forward: Any) -> None:
    """ncnn has it with an axis of its own, for which the net was refused."""
    x = images(5, 4, 8, 8)
    traced = qtrace.trace(net(forward, c=M.Conv2d(4, 6, 3)), x, check=False)
    converted = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced, "backend/ncnn"), [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.param")
    report = qtrace.verify(path, converted, [x])
    assert report.passed
    assert report.outputs["deployed"]


@pytest.mark.parametrize("optimize", [False, True])
def test_outputs_alone_are_those_of_a_whole_run(exported: Path, optimize: bool) -> None:
    session = runtimes.get(exported).open(exported, optimize)
    inputs = [images(3, 4, 8, 8)]
    for own, whole in zip(run_outputs(session, inputs), session.run(inputs).outputs, strict=True):
        np.testing.assert_array_equal(own, whole)
    with pytest.raises(ExportError, match="takes 1 inputs, not 2"):
        run_outputs(session, inputs * 2)


def test_the_suffix_chooses(exported: Path) -> None:
    assert runtimes.get(exported).name == "ncnn"
    with pytest.raises(ExportError, match=r"onnxruntime does not run files like m\.param"):
        runtimes.get(exported, "onnxruntime")


def test_files_that_are_missing_or_something_else(exported: Path, tmp_path: Path) -> None:
    runtime = runtimes.get(exported)
    with pytest.raises(ExportError, match=r"none\.param does not exist"):
        runtime.open(tmp_path / "none.param", False)
    exported.with_suffix(".bin").rename(tmp_path / "other.bin")
    with pytest.raises(ExportError, match=r"m\.bin does not exist: export the module first"):
        runtime.open(exported, False)
    (tmp_path / "other.param").write_text("hello\nworld\n")
    with pytest.raises(ExportError, match=r"other\.param is not an ncnn net: it does not begin with 7767517"):
        runtime.open(tmp_path / "other.param", False)


def test_inputs_that_do_not_fit(exported: Path) -> None:
    session = runtimes.get(exported).open(exported, False)
    x = images(1, 4, 8, 8)
    with pytest.raises(ExportError, match="takes 1 inputs, not 2"):
        session.run([x, x])


def test_idle_threads_of_a_checked_net_sleep(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning ones wait for a turn of the processor at each layer: 50 ms, not 0.5, on a busy machine."""
    opened, own = [], RuntimeChild.open

    def recorded(child: RuntimeChild, *arrays: Any, **options: Any) -> Any:
        opened.append(options)
        return own(child, *arrays, **options)

    monkeypatch.setattr(RuntimeChild, "open", recorded)
    runtimes.get(exported).open(exported, True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    paths = {"param": str(exported), "bin": str(exported.with_suffix(".bin"))}
    worker.Ncnn({**opened[0], **paths}, [])
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    worker.Ncnn({**opened[0], **paths, "yields": False}, [])  # a benchmark runs it as it is deployed
    assert "OMP_WAIT_POLICY" not in os.environ
