"""Sessions of a runtime that run together with the graph, and a batch ahead of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace import process
from qtrace.errors import CalibrationError
from qtrace.process import LargeFrees, Together
from qtrace.targets.onnxruntime import runtime
from qtrace.targets.onnxruntime.runtime import OnnxSession
from qtrace.verification import verify
from qtrace.verification.runtimes import base
from qtrace.verification.runtimes.base import Prefetcher, RuntimeRun, threads_for
from tests.nets import images, net


class _Session:
    """Notes on which thread it runs."""

    integer_names = ()

    def __init__(self, concurrent: bool) -> None:
        self.concurrent, self.threads = concurrent, list[int]()

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        self.threads.append(threading.get_ident())
        if inputs[0].size == 3:
            raise ValueError("three")
        return RuntimeRun([inputs[0] + 1], {})


def test_only_thread_safe_sessions_are_prefetched_on_a_thread() -> None:
    on_thread, in_turn = _Session(True), _Session(False)
    sessions = [on_thread, in_turn]
    with Together(threads_for(sessions)) as together:
        runs = Prefetcher(sessions, together)
        begun = runs.begin([np.zeros(2)])
        assert [float(run().outputs[0][0]) for run in begun] == [1.0, 1.0]
        refused = runs.begin([np.zeros(3)])
        for run in refused:
            with pytest.raises(ValueError, match="three"):
                run()
    assert threading.get_ident() not in on_thread.threads
    assert set(in_turn.threads) == {threading.get_ident()}


def test_a_large_batch_runs_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_VALUES", 4)
    session = _Session(True)
    with Together(threads_for([session])) as together:
        runs = Prefetcher([session], together)
        large, small = runs.begin([np.zeros(5)]), runs.begin([np.zeros(4)])
        small[0]()
        assert len(session.threads) == 1
        large[0]()
    assert session.threads[1] == threading.get_ident()


def _exported(folder: Path) -> tuple[Any, Path]:
    traced = qtrace.trace(
        net(lambda self, x: self.a(x), a=M.Conv2d(3, 4, 3)), Tensor(images(2, 3, 8, 8)), check=False
    )
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    converted = qtrace.convert(qtrace.calibrate(prepared, [images(2, 3, 8, 8)], progress=False))
    return converted, qtrace.export(converted, folder / "m.onnx")


def test_onnxruntime_runs_a_batch_before_the_graph_does_and_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, path = _exported(tmp_path)
    events: list[str] = []
    threads = set[int]()
    plain = OnnxSession.run

    def run(session: Any, inputs: list[np.ndarray]) -> RuntimeRun:
        threads.add(threading.get_ident())
        return plain(session, inputs)

    def batches() -> Iterator[np.ndarray]:
        for number in range(3):
            events.append(f"read {number}")
            yield images(2, 3, 8, 8, seed=number)

    monkeypatch.setattr(OnnxSession, "run", run)
    compare = verify._compare_outputs

    def note(*args: Any) -> None:
        events.append(f"compare {args[1].number}")
        compare(*args)

    monkeypatch.setattr(verify, "_compare_outputs", note)
    assert qtrace.verify(path, converted, batches()).passed
    assert events == ["read 0", "read 1", "compare 0", "read 2", "compare 1", "compare 2"]
    assert threads
    assert threading.get_ident() not in threads


def test_of_two_large_batches_only_one_has_its_integers_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a 1760x1760 image has gigabytes of them, and sessions kept as much for each of its sizes."""
    converted, path = _exported(tmp_path)
    monkeypatch.setattr(base, "MOST_VALUES", 0)
    runs, alive, shared = list[Callable[[], Any]](), list[int](), list[bool]()
    plain, opened = OnnxSession.run, runtime.open_session

    def run(session: Any, inputs: list[np.ndarray]) -> RuntimeRun:
        made = plain(session, inputs)
        runs.append(weakref.ref(made))
        return made

    def open_session(data: Any, settings: Any, *others: Any) -> Any:
        shared.append(settings.shared)
        return opened(data, settings, *others)

    monkeypatch.setattr(OnnxSession, "run", run)
    monkeypatch.setattr(runtime, "open_session", open_session)

    def count() -> None:
        alive.append(sum(made() is not None for made in runs))

    monkeypatch.setattr(verify, "return_free_memory", count)
    monkeypatch.setattr(process, "return_free_memory", count)
    monkeypatch.setattr(verify, "LargeFrees", lambda: LargeFrees(least=1))
    batches = (images(2, 3, 8, 8, seed=number) for number in range(3))
    assert qtrace.verify(path, converted, batches).passed
    assert alive == [0, 0, 0, 0, 0]  # before the first batch, after each, and at the end
    assert shared
    assert all(shared)


def test_a_batch_that_is_read_ahead_is_the_one_that_is_compared(tmp_path: Path) -> None:
    """A loader may fill the same array again for its next batch."""
    converted, path = _exported(tmp_path)

    def batches(last: float) -> Iterator[np.ndarray]:
        shared = np.empty((2, 3, 8, 8), np.float32)
        for value in (0.25, 0.5, last):
            shared[:] = images(2, 3, 8, 8) * value
            yield shared

    apart = qtrace.verify(path, converted, [b.copy() for b in batches(1.0)]).to_dict()
    assert qtrace.verify(path, converted, batches(1.0)).to_dict() == apart
    with pytest.raises(CalibrationError, match="batch 2 holds NaN"):
        qtrace.verify(path, converted, batches(np.nan))
