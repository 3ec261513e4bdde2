"""The ncnn runtime: which files it takes, and what it says about those that do not fit."""

from __future__ import annotations

from pathlib import Path

import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.verification import runtimes
from tests.nets import images, net


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    x = images(2, 4, 8, 8)
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, 3)), x)
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
