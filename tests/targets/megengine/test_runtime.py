"""The runtime of MegEngine's dumps: what it takes, and what it says about files that do not fit."""

from __future__ import annotations

import io
from pathlib import Path

import megengine as mge
import megengine.functional as F
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
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, 3)), x, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/megengine"), [x], progress=False)
    return qtrace.export(qtrace.convert(prepared), tmp_path / "m.mge", format="megengine")


@pytest.mark.parametrize("optimize", [False, True])
def test_integers_and_outputs_of_a_batch(exported: Path, optimize: bool) -> None:
    session = runtimes.get(exported).open(exported, optimize)
    assert set(session.integer_names) == {"x", "c_out"}
    run = session.run([images(3, 4, 8, 8)])
    assert run.integers["x"].shape == (3, 4, 8, 8)
    assert run.integers["c_out"].dtype == np.int32
    assert [o.shape for o in run.outputs] == [(3, 6, 6, 6)]


def test_files_that_are_missing_or_something_else(exported: Path, tmp_path: Path) -> None:
    runtime = runtimes.get(exported)
    assert runtime.name == "megengine"
    with pytest.raises(ExportError, match=r"none\.mge cannot be read .*: export the module first"):
        runtime.open(tmp_path / "none.mge", False)
    (tmp_path / "other.mge").write_text("hello, this is no graph at all")
    with pytest.raises(ExportError, match=r"other\.mge is not a MegEngine dump"):
        runtime.open(tmp_path / "other.mge", False)
    stream = io.BytesIO()
    traced = mge.jit.trace(F.relu, symbolic=True, capture_as_const=True)
    traced(mge.Tensor(images(1, 4, 8, 8)))
    traced.dump(stream)
    (tmp_path / "foreign.mge").write_bytes(stream.getvalue())
    with pytest.raises(ExportError, match=r"foreign\.mge was not written by qtrace\.export"):
        runtime.open(tmp_path / "foreign.mge", False)


def test_inputs_that_do_not_fit(exported: Path) -> None:
    session = runtimes.get(exported).open(exported, False)
    x = images(1, 4, 8, 8)
    with pytest.raises(ExportError, match="takes 1 inputs, not 2"):
        session.run([x, x])
    with pytest.raises(ExportError, match="MegEngine refused the input"):
        session.run([images(1, 3, 8, 8)])
