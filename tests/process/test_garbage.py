"""What the garbage collector leaves alone for a while is collected afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import qtrace
from qtrace.process import older_objects_spared, paused_collector
from tests.nets import Chain, images


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def _garbage() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    gc.freeze()


def test_older_objects_are_spared_within_the_block_alone() -> None:
    cycle = _Cycle()
    before = weakref.ref(cycle)
    with older_objects_spared():
        del cycle
        within = _garbage()
        with older_objects_spared():
            pass
        gc.collect()
        assert before() is not None
        assert within() is None
    gc.collect()
    assert before() is None


@pytest.mark.slow  # each collection takes a second among the modules of all tests
def test_what_was_dropped_before_is_freed_each_time() -> None:
    """A network a call would stay, as each call spares it before a collection of all objects comes."""
    for _ in range(3):
        before = _garbage()
        with older_objects_spared():
            assert before() is None
            _garbage()


@pytest.mark.slow
def test_calls_of_quantize_keep_no_networks(tmp_path: Path) -> None:
    left = []
    for number in range(2):
        traced = qtrace.trace(Chain(1, 3), images(1, 3, 8, 8), check=False)
        options = {"progress": False, "verify": False, "measure": False, "force": True, "allow_broken": True}
        qtrace.quantize(traced, images(4, 3, 8, 8, seed=number), tmp_path / "net.onnx", **options)
        left.append(weakref.ref(traced))
        del traced
    assert sum(graph() is not None for graph in left[:-1]) == 0


def test_objects_that_the_caller_spares_stay_so() -> None:
    gc.freeze()
    try:
        with older_objects_spared():
            pass
        assert gc.get_freeze_count()  # fewer than before, where another thread has freed some
    finally:
        gc.unfreeze()


def test_both_end_with_an_error() -> None:
    for block in (paused_collector, older_objects_spared):
        with pytest.raises(ValueError, match="an error"), block():
            raise ValueError("an error")
        assert gc.isenabled()
        assert not gc.get_freeze_count()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_quantize_spares_what_was_there_before(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def stop(*_: object, **__: object) -> None:
        counts.append(gc.get_freeze_count())
        raise ValueError("stopped")

    monkeypatch.setattr("qtrace.quantizing.call_data.DataOpener.open", stop)
    with pytest.raises(ValueError, match="stopped"):
        qtrace.quantize(Chain(1, 3), [np.asarray(images(1, 3, 8, 8))], f"{tmp_path}/net.onnx", progress=False)
    assert counts[0] > 50_000


def test_nothing_is_collected_while_names_of_qtrace_are_imported() -> None:
    code = (
        "import gc, qtrace; seen = []; gc.callbacks.append(lambda phase, info: seen.append(phase)); "
        "qtrace.calibrate; print(len(seen), gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, enabled = done.stdout.split()
    assert int(count) <= 2  # the first one behind the import
    assert enabled == "True"
