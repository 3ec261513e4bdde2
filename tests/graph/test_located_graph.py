"""A direct call that fails names the op and its line; files and copies keep MegEngine's own graph."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.jit import trace as jit_trace
from megengine.traced_module import trace_module
from megengine.traced_module.traced_module import InternalGraph

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import LocatedGraph
from tests.native_nets import one_kernel_at_a_time
from tests.nets import images, net

X, WRONG = images(2, 3, 8, 8), images(2, 3, 8, 10)


def _traced() -> Any:
    inner = net(lambda self, x: F.matmul(x, self.table), table=mge.Parameter(np.ones((8, 4), "float32")))
    model = net(
        lambda self, x: F.relu(self.inner(self.conv(x))), inner=inner, conv=M.Conv2d(3, 4, 3, padding=1)
    )
    return qtrace.trace(model, X, check=False)


@pytest.fixture(params=["trace", "copy", "load", "copy of a trace"])
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    model = _traced()
    if request.param == "copy":
        return copy.deepcopy(model)
    if request.param == "load":
        qtrace.save(model, tmp_path / "a.mge")
        return qtrace.load(tmp_path / "a.mge")
    return qtrace.trace(model, check=False) if request.param == "copy of a trace" else model


def test_the_op_and_its_line_are_named(traced: Any) -> None:
    assert traced(mge.Tensor(X)).shape == (2, 4, 8, 4)
    with (
        one_kernel_at_a_time(),
        pytest.raises(RuntimeError, match=r"matmul_out \(F.matmul, tests/graph/test_located_graph.py:\d+\)"),
    ):
        traced(mge.Tensor(WRONG))
    assert traced(mge.Tensor(X)).shape == (2, 4, 8, 4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("phase", ["float", "observe", "train", "converted", "flat"])
def test_the_op_is_named_in_every_stage(phase: str) -> None:
    model = _traced()
    with one_kernel_at_a_time():
        if phase == "flat":
            model = flatten(model)
        else:
            model = qtrace.calibrate(qtrace.prepare(model, "onnxruntime"), [(X,)], progress=False)
            model = qtrace.convert(model) if phase == "converted" else qtrace.set_phase(model, phase) or model
        with pytest.raises(RuntimeError, match=r"\w+_out \(F.matmul, tests/.*:\d+\) fails on"):
            model(mge.Tensor(WRONG))
    assert model(mge.Tensor(X)).shape == (2, 4, 8, 4)


def test_a_file_has_the_class_of_megengine(tmp_path: Path) -> None:
    traced = _traced()
    assert type(traced.graph) is LocatedGraph
    assert type(pickle.loads(pickle.dumps(traced.graph))) is InternalGraph
    qtrace.save(traced, tmp_path / "a.mge")
    assert b"LocatedGraph" not in (tmp_path / "a.mge").read_bytes()
    code = "import sys, megengine; megengine.load('a.mge'); assert 'qtrace' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={}, timeout=600)


def test_a_jit_trace_and_a_second_trace_of_megengine_run_as_before() -> None:
    traced, x = _traced(), mge.Tensor(X)
    compiled = jit_trace(traced, symbolic=True)
    for _ in range(2):
        np.testing.assert_allclose(compiled(x).numpy(), traced(x).numpy(), rtol=1e-5)
    np.testing.assert_array_equal(trace_module(traced, x)(x).numpy(), traced(x).numpy())
    np.testing.assert_array_equal(traced.flatten()(x).numpy(), traced(x).numpy())
