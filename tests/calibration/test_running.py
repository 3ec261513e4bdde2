"""Collections in shards, with interruptions and in workers: the statistics are the same, bit for bit."""

from __future__ import annotations

import dataclasses
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtrace
from qtrace.calibration import running
from qtrace.calibration.algorithms import Cadence, StoredParts, fingerprint
from qtrace.calibration.running import (
    LocalCollection,
    RemoteCollection,
    Result,
    RunSettings,
    Source,
    WorkerJob,
    collect_all,
    run_job,
)
from qtrace.errors import CalibrationError, DataError
from qtrace.graph.types import TracedModule
from qtrace.observers.base import to_dict
from qtrace.preparation.model import QuantizedModel
from qtrace.storage.checkpoints import pack_arrays, unpack_arrays
from qtrace.storage.outputs import has_parts
from qtrace.workers import Outcome, do_elsewhere
from tests.nets import Chain, images

_BATCHES = 7


@pytest.fixture(scope="module")
def prepared() -> TracedModule:
    traced = qtrace.trace(Chain(2, 3), images(2, 3, 8, 8), check=False)
    rule = {"match": {"position": "first"}, "observers": {"activation": "moving_average"}}
    return qtrace.prepare(traced, {"observers": {"activation": "percentile"}, "rules": [rule]})


@pytest.fixture
def data(tmp_path: Path) -> Source:
    np.save(tmp_path / "x.npy", images(2 * _BATCHES - 1, 3, 8, 8))
    return Source(str(tmp_path / "x.npy"), batch_size=2)


def _collect(prepared: TracedModule, data: Source, folder: Path, **settings: Any) -> Result:
    folder.mkdir(exist_ok=True)
    return collect_all(prepared, data.open(), data, folder, RunSettings(**{"seconds": None, **settings}))


def _state(result: Result) -> Any:
    statistics = result.collected.statistics
    assert sorted(statistics.batches) == list(range(_BATCHES))
    return {name: to_dict(observer) for name, observer in statistics.observers.items()}


class InThisProcess:
    """Runs jobs one after the other, in any order."""

    def __init__(self, order: Callable[[list[WorkerJob]], list[WorkerJob]]) -> None:
        self.order = order

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def run(self, jobs: Sequence[WorkerJob], told: Callable[[int], None]) -> list[Outcome]:
        return [Outcome(run_job(pickle.loads(pickle.dumps(job)), told)) for job in self.order(list(jobs))]


def _shuffled(jobs: list[WorkerJob]) -> list[WorkerJob]:
    return random.Random(len(jobs)).sample(jobs, len(jobs))


@pytest.mark.quick(1)
@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_any_number_of_shards_in_any_order_gives_the_same(
    prepared: TracedModule, data: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    alone = _state(_collect(prepared, data, tmp_path / "alone", engine=engine))
    for workers, order in ((2, list), (5, _shuffled), (5, lambda jobs: jobs[::-1])):
        monkeypatch.setattr(running, "_pool", lambda *_, o=order: InThisProcess(o))
        folder = tmp_path / f"{workers}{order}"
        assert _state(_collect(prepared, data, folder, engine=engine, workers=workers)) == alone


def test_real_workers_give_the_same(
    prepared: TracedModule, data: Source, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = _state(_collect(prepared, data, tmp_path / "alone", engine="megengine"))
    result = _collect(prepared, data, tmp_path / "two", engine="megengine", workers=2)
    assert _state(result) == alone
    assert "[mgb]" not in capfd.readouterr().err  # MegEngine's remarks on how its threads wait


def test_what_a_cluster_gives_back_is_the_part(prepared: TracedModule, data: Source, tmp_path: Path) -> None:
    """The remote half of `RayTasks`, without a cluster."""
    model = tmp_path / "prepared.mge"
    qtrace.save(prepared, model)
    chosen = running.Chosen("megengine", "as asked")
    job = WorkerJob("elsewhere", (), data, 0, 1, (), chosen, None, str(tmp_path / "a.part.npz"), "id")
    there = pickle.loads(pickle.dumps(RemoteCollection(model)))
    model.unlink()
    ended, numbers = do_elsewhere(there, job)
    assert numbers == list(range(_BATCHES))
    ended.get().store()
    part = StoredParts(tmp_path, QuantizedModel(prepared), "id").gather()
    alone = _collect(prepared, data, tmp_path / "alone", engine="megengine").collected.statistics
    assert part.statistics.batches == alone.batches
    missing = dataclasses.replace(job, source=Source(str(tmp_path / "gone.npy")))
    with pytest.raises(DataError):
        do_elsewhere(there, missing)[0].get().store()


class Failing:
    """A source whose loader raises at one batch."""

    def __init__(self, data: Source, at: int, error: BaseException) -> None:
        self.inner, self.at, self.error = data.open(), at, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def numbered(self, *functions: Any) -> Iterator[tuple[int, Any]]:
        for number, batch in self.inner.numbered(*functions):
            if number == self.at:
                raise self.error
            yield number, batch


@pytest.mark.parametrize(
    "error", [DataError("batch 4 is bad"), KeyboardInterrupt(), SystemExit(143)], ids=type
)
def test_what_was_seen_is_kept_and_a_resumed_run_ends_the_same(
    prepared: TracedModule, data: Source, tmp_path: Path, error: BaseException
) -> None:
    alone = _state(_collect(prepared, data, tmp_path / "alone"))
    folder = tmp_path / "stopped"
    folder.mkdir()
    with pytest.raises(type(error)):
        collect_all(prepared, Failing(data, 4, error), data, folder, RunSettings(seconds=None))  # type: ignore[arg-type]
    assert has_parts(folder)
    result = _collect(prepared, data, folder)
    assert result.resumed == 4
    assert _state(result) == alone


def test_workers_go_on_where_one_process_stopped(
    prepared: TracedModule, data: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = _state(_collect(prepared, data, tmp_path / "alone"))
    folder = tmp_path / "stopped"
    folder.mkdir()
    source: Any = Failing(data, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        collect_all(prepared, source, data, folder, RunSettings(seconds=None))
    monkeypatch.setattr(running, "_pool", lambda *_: InThisProcess(_shuffled))
    result = _collect(prepared, data, folder, workers=3)
    assert (result.resumed, _state(result)) == (3, alone)


def test_killed_between_gathering_and_removing_counts_no_batch_twice(
    prepared: TracedModule, data: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_pool", lambda *_: InThisProcess(list))
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *a, **k: None)
        first = _state(_collect(prepared, data, folder, workers=2))
    assert len(list(folder.glob("*.part.npz"))) == 3
    again = _collect(prepared, data, folder)
    assert (again.resumed, _state(again)) == (_BATCHES, first)


def test_checkpoints_of_other_weights_or_data_are_refused(
    prepared: TracedModule, data: Source, tmp_path: Path
) -> None:
    _collect(prepared, data, tmp_path / "out")
    other = qtrace.prepare(qtrace.trace(Chain(2, 3), images(2, 3, 8, 8), check=False))
    with pytest.raises(CalibrationError, match="belongs to another calibration"):
        _collect(other, data, tmp_path / "out")
    np.save(data.source, images(13, 3, 8, 8, seed=1))
    with pytest.raises(CalibrationError, match="belongs to another calibration"):
        _collect(prepared, data, tmp_path / "out")


def _as_compressed(whole: bytes) -> bytes:
    """Its first array claims to be compressed, so that zlib would be asked."""
    data = bytearray(whole)
    for magic, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.find(magic) + method] = 8
    return bytes(data)


def _without_meta(whole: bytes) -> bytes:
    return pack_arrays({key: value for key, value in unpack_arrays(whole).items() if key != "meta"})


@pytest.mark.parametrize(
    "damage", [lambda whole: b"", lambda whole: whole[:500], _as_compressed, _without_meta]
)
def test_a_damaged_checkpoint_is_reported(
    prepared: TracedModule, data: Source, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    _collect(prepared, data, tmp_path / "out")
    path = tmp_path / "out" / "gathered.part.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CalibrationError, match="is damaged"):
        _collect(prepared, data, tmp_path / "out")


def test_a_loader_that_shuffles_is_found_out(
    prepared: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shuffling_loader.py").write_text(
        "import numpy as np\ndef batches():\n    for i in range(4): yield np.random.rand(2, 3, 8, 8)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(running, "_pool", lambda *_: InThisProcess(list))
    with pytest.raises(
        CalibrationError, match="not the same at every iteration: give the loader a fixed seed"
    ):
        _collect(prepared, Source("shuffling_loader:batches"), tmp_path / "out", workers=2)


def test_a_worker_that_fails_is_reported_and_what_it_saw_is_kept(
    prepared: TracedModule, tmp_path: Path
) -> None:
    (tmp_path / "cut.py").write_text(
        "import numpy as np\ndef batches():\n"
        "    for i in range(4): yield np.ones((2, 3, 8, 8), 'f4')\n"
        "    raise OSError('disk gone')\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(DataError, match="cut:batches: making batch 4 raised OSError: disk gone"):
            _collect(
                prepared, Source("cut:batches"), tmp_path / "out", engine="megengine", workers=1, ray=None
            )
        with pytest.raises(DataError, match="making batch 4 raised OSError"):
            _collect(prepared, Source("cut:batches"), tmp_path / "two", engine="megengine", workers=2)
    finally:
        sys.path.remove(str(tmp_path))
    source = Source("cut:batches")
    model = QuantizedModel(prepared)
    identity = fingerprint(model, source.source, 8, None, "megengine", None)
    seen = set(StoredParts(tmp_path / "two", model, identity).gather().statistics.batches)
    assert seen >= {0, 2} or seen >= {1, 3}  # the other one may have been stopped before its first batch


def test_a_collection_whose_worker_dies_says_after_how_many_batches() -> None:
    text = LocalCollection().describe_end(0, "was ended by signal 9", 3)
    assert text == "worker 0 was ended by signal 9 after 3 batches."


def test_cadence() -> None:
    every = Cadence(batches=3, seconds=None)
    assert [every.due() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert Cadence(seconds=0).due()
    assert not Cadence(seconds=None).due()
