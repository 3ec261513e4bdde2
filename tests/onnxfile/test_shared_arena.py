"""Sessions that share memory keep it for each other, and give it back when they are asked."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from qtrace.calibration.engines import start_session
from qtrace.onnxfile import local_session
from qtrace.onnxfile.local_session import OrtSession, SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.process import return_free_memory

_MB = 2**20
_VALUES = np.arange(16 * _MB, dtype=np.float32)  # 64 MB


def _model() -> bytes:
    """Returns ``sum(exp(-x) + x)``, whose values need new memory."""
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("Exp", ["n"], ["e"]),
        helper.make_node("Add", ["e", "x"], ["s"]),
        helper.make_node("ReduceMean", ["s"], ["y"], keepdims=0),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [None]), ("y", []))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7)
    return bytes(model.SerializeToString())


def _resident() -> float:
    """Returns the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / _MB


def _run(session: OrtSession) -> float:
    (result,) = session.run(None, {"x": _VALUES})
    return float(result)


def test_what_a_session_has_freed_stays_for_the_next_one_until_it_is_given_back() -> None:
    settings = SessionSettings(threads=1)
    expected = _run(open_session(_model(), settings))
    _run(start_session(_model()))  # what onnxruntime loads once
    gc.collect()
    return_free_memory()
    before = _resident()
    results = [_run(start_session(_model())) for _ in range(3)]
    gc.collect()
    kept = _resident() - before
    assert results == [expected] * 3
    assert 60 < kept < 300
    return_free_memory()
    assert _resident() - before < kept - 50  # what other parts of the process hold may change meanwhile


def test_only_sessions_that_ask_for_it_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("qtrace.onnxfile.local_session.register_shared_arena", lambda: asked.append(True))
    open_session(_model(), SessionSettings(threads=1))
    assert not asked
    start_session(_model())  # which works where there is no such memory
    assert asked == [True]


def test_without_the_package_onnx_no_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnx" else find_spec(name))
    assert not local_session.register_shared_arena.__wrapped__()


def test_memory_is_given_back_though_onnxruntime_can_no_longer_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert local_session.register_shared_arena()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    return_free_memory()
