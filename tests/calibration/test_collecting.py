"""Batches are computed while earlier ones are observed, to the same statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import qtrace
from qtrace.calibration import choice, engines
from qtrace.calibration.collecting import CollectOptions, Statistics, collect
from qtrace.calibration.engines import OnnxRuntime
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from tests.nets import Chain, images

_BATCHES = [images(4, 3, 16, 16, seed=seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small graphs worth an export."""
    monkeypatch.setattr(choice, "_MIN_MACS_FOR_EXPORT", 0)


def _prepared() -> TracedModule:
    return qtrace.prepare(qtrace.trace(Chain(3, 3), _BATCHES[0], check=False))


def _collected(prepared: TracedModule, batches: Any = _BATCHES, **options: Any) -> Statistics:
    return collect(prepared, enumerate(batches), CollectOptions(batches=6, **options)).statistics


def _assert_equal(first: Statistics, second: Statistics) -> None:
    assert first.batches == second.batches
    assert first.observers.keys() == second.observers.keys()
    for group, observer in first.observers.items():
        for key, value in observer.state_dict().items():
            np.testing.assert_array_equal(value, second.observers[group].state_dict()[key], err_msg=group)


def _record_begun(monkeypatch: pytest.MonkeyPatch, sizes: list[float] | None = None) -> list[list[float]]:
    """Records the first values of the batches that wait after each call that begins one, and their sizes."""
    begun: list[list[float]] = []

    class Recorded(OnnxRuntime):
        def begin(self, arguments: Any) -> None:
            super().begin(arguments)
            batches = list(self._pending.values())
            begun.append([float(batch.arguments[0][0].numpy().flat[0]) for batch in batches])
            if sizes is not None:
                sizes.extend(batch.size for batch in batches)

    monkeypatch.setattr(choice, "OnnxRuntime", Recorded)
    return begun


def test_statistics_are_those_of_one_batch_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = _prepared()
    alone = _collected(prepared, threads=1)
    begun = _record_begun(monkeypatch)
    _assert_equal(_collected(prepared, threads=2, prefetch=True), alone)
    assert max(map(len, begun)) == 3
    assert len({number for waiting in begun for number in waiting}) == 6


def test_a_loader_may_use_the_memory_of_a_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.empty_like(_BATCHES[0])

    def load() -> Iterator[np.ndarray]:
        for batch in _BATCHES:
            memory[:] = batch
            yield memory

    prepared, begun = _prepared(), _record_begun(monkeypatch)
    _assert_equal(_collected(prepared, load(), threads=2, prefetch=True), _collected(prepared, threads=1))
    assert max(map(len, begun)) == 3


@pytest.mark.parametrize("wrong", ["shape", "values", "loader"])
def test_an_error_of_a_batch_that_was_read_ahead_comes_in_its_turn(wrong: str) -> None:
    def load() -> Iterator[np.ndarray]:
        yield from _BATCHES[:2]
        if wrong == "loader":
            raise OSError("batch 2 cannot be read")
        yield _BATCHES[2][:, :2] if wrong == "shape" else _BATCHES[2] * np.float32(np.nan)

    done: list[Any] = []
    options = CollectOptions("onnxruntime", batches=6, threads=2, prefetch=True)
    with pytest.raises((CalibrationError, OSError), match="batch 2"):
        collect(_prepared(), enumerate(load()), options, lambda c: done.append(len(c.statistics.batches)))
    assert done == [1, 2]


@pytest.mark.parametrize(("threads", "limit"), [(1, 1 << 30), (2, 1)])
def test_prefetch_needs_two_threads_and_memory(
    threads: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "STAGE_BYTES", limit)
    begun, prepared = _record_begun(monkeypatch), _prepared()
    _assert_equal(_collected(prepared, threads=threads, prefetch=True), _collected(prepared, threads=1))
    assert not any(begun)


def test_prefetch_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = _prepared()
    sizes: list[float] = []
    begun = _record_begun(monkeypatch, sizes)
    _collected(prepared, threads=2, prefetch=True)
    monkeypatch.setattr(engines, "STAGE_BYTES", 2.5 * sizes[0])
    begun.clear()
    _assert_equal(_collected(prepared, threads=2, prefetch=True), _collected(prepared, threads=1))
    assert max(map(len, begun)) == 2
    assert len({number for waiting in begun for number in waiting}) == 6


def test_batches_of_a_runtime_that_disagrees_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes: list[OnnxRuntime] = []

    class Wrong(OnnxRuntime):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            runtimes.append(self)

        def run(self, arguments: Any, index: int, observe: Any) -> None:
            super().run(arguments, index, lambda node, value: observe(node, value * np.float32(1.001)))

    prepared = _prepared()
    alone = _collected(prepared, engine="megengine")
    monkeypatch.setattr(choice, "OnnxRuntime", Wrong)
    waiting: list[int] = []
    options = CollectOptions(batches=6, threads=2, prefetch=True)
    collected = collect(
        prepared, enumerate(_BATCHES), options, lambda _: waiting.append(len(runtimes[0]._pending))
    )
    assert collected.chosen.name == "megengine"
    _assert_equal(collected.statistics, alone)
    assert waiting == [2, 1, 0, 0, 0, 0]


def test_calibrate_computes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, prepared = _record_begun(monkeypatch), _prepared()
    qtrace.calibrate(prepared, _BATCHES, progress=False, engine="onnxruntime", threads=2)
    assert max(map(len, begun)) == 3
