"""Trials that are judged at the same time, in other processes."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace import workers
from qtrace.errors import ConfigError, QtraceError
from qtrace.extras.tune import TuneSettings, Tuning, tune
from qtrace.extras.tune.judge import Here, Judge, Subject, Task
from qtrace.extras.tune.search import as_recipe, split
from qtrace.extras.tune.trials import TRIALS
from qtrace.workers import Processes
from tests.extras.tune.test_search import data, small, start, told


def weights(model: Any) -> float:
    """A metric that a worker imports: how close the rounded weight is to a number."""
    return -float(np.abs(model(mge.Tensor(data()[0])).numpy()).mean())


def _search(folder: Path, metric: Any = None, **options: Any) -> Tuning:
    batches = data()
    traced = qtrace.trace(small(), batches[0], check=False)
    return tune(traced, start(), batches, folder, TuneSettings(trials=6), metric=metric, **options)


def test_processes_judge_as_this_one_does() -> None:
    batches = data()
    judge = Judge(qtrace.trace(small(), batches[0], check=False))
    parts = split(batches)
    recipe = as_recipe(start())
    tasks = [Task({**recipe, "weight": {"bits": bits}}, rung, None) for bits in (8, 5) for rung in (0, 2)]
    tasks.append(Task({**recipe, "ptq": ["equalise"]}, 0, None))
    here = [outcome.get() for outcome in Here(judge, parts).run(tasks)]
    with Processes(Subject.of(judge, parts, (), 2).job(), 2) as pool:
        there = [outcome.get() for outcome in pool.run(tasks)]
    assert there == here
    assert all(judged.value is not None for judged in here[:-1])
    assert "equalise" in here[-1].problem


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """A search on two workers, which import its metric."""
    return _search(tmp_path_factory.mktemp("two") / "b", weights, workers=2)


@pytest.mark.slow
def test_a_metric_is_imported_by_the_processes(on_two: Tuning) -> None:
    assert on_two.unit == "weights"
    assert sum(trial.value is not None for trial in on_two.trials) == 6


@pytest.mark.slow
def test_two_workers_judge_as_one_does(on_two: Tuning, tmp_path: Path) -> None:
    judged = {(t.digest, t.rung): t.value for t in _search(tmp_path / "c", weights).trials}
    common = [t for t in on_two.trials if (t.digest, t.rung) in judged]
    assert len(common) >= 4
    assert [t.value for t in common] == [judged[t.digest, t.rung] for t in common]


def test_a_metric_without_a_name_is_refused_before_a_trial(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the metric cannot go to other processes .*define it in a module"):
        _search(tmp_path / "b", lambda model: 1.0, workers=2)
    assert not (tmp_path / "b" / TRIALS).exists()


@pytest.mark.slow
def test_a_process_that_dies_loses_no_trial_and_the_search_goes_on_to_the_same(
    on_two: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = workers._send

    def kill(worker: Any, message: bytes) -> None:
        send(worker, message)
        if isinstance(message, Task):
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(workers, "_send", kill)
    with pytest.raises(QtraceError, match=r"was ended by signal 9: run the command again"):
        _search(tmp_path / "b", weights, workers=2)
    monkeypatch.undo()
    lines = (tmp_path / "b" / TRIALS).read_bytes().splitlines()
    assert len(lines) == 1
    assert told(_search(tmp_path / "b", weights, workers=2).trials) == told(on_two.trials)
    assert (tmp_path / "b" / TRIALS).read_bytes().splitlines()[0] == lines[0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_local_ray_cluster_gives_the_same(tmp_path: Path) -> None:
    there = _search(tmp_path / "a", ray="", workers=2)
    assert told(there.trials) == told(_search(tmp_path / "b", workers=2).trials)
