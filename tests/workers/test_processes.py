"""Processes do tasks: outcomes in order, news, errors, deaths, and an end that saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qtrace import workers
from qtrace.errors import DataError, QtraceError
from qtrace.workers import Outcome, Processes, read_message, write_message
from tests.workers.jobs import Echo


def test_outcomes_come_in_order_and_errors_are_those_of_their_tasks() -> None:
    news: list[Any] = []
    tasks = [3, "fail", "print", "die", 5]
    with Processes(Echo(), 2) as pool:
        first, failed, printed, died, *_ = pool.run(tasks, news.append)
    assert (first.get(), printed.get()) == (3, "print")
    assert ("begun", 3) in news
    with pytest.raises(DataError, match="^it is bad$"):
        failed.get()
    with pytest.raises(QtraceError, match=r"^task 3 was ended by signal 9 after 1 news\.$"):
        died.get()


def test_a_job_that_cannot_be_opened_fails_every_task() -> None:
    with Processes(Echo(closed=True), 1) as pool:
        outcomes = list(pool.run([1, 2]))
    assert [str(outcome.error) for outcome in outcomes] == ["the shop is closed"] * 2


def test_the_first_failure_ends_workers_that_save_and_is_the_cause_of_all(tmp_path: Path) -> None:
    saved, begun = tmp_path / "saved", []

    def told(news: Any) -> None:
        begun.append(news)

    with Processes(Echo(), 2, saves=True) as pool:
        outcomes = pool.run([("wait", str(saved)), "fail"], told)
        assert [str(outcome.error) for outcome in outcomes] == ["it is bad"] * 2
    assert saved.exists() or len(begun) < 2  # the first may have been ended before its task


def test_errors_after_shutdown_are_not_reported_as_cause() -> None:
    pool = Processes(Echo(), 2, saves=True)
    pool._end_all(Outcome(problem=("DataError", "the cause")))
    said = pool._end_all(Outcome(problem=("QtraceError", "initialization failed")))
    assert str(said.error) == "the cause"


def test_a_worker_that_dies_is_reported() -> None:
    with Processes(Echo(), 1, saves=True) as pool:
        pool._workers[0].kill()
        (outcome,) = pool.run([1])
    assert str(outcome.error) == "task 0 was ended by signal 9 after 0 news."


def test_a_worker_that_was_stopped_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_EXIT_SECONDS", 300)  # a busy machine may need more than usual
    pool = Processes(Echo(), 1, saves=True)
    pool.__enter__()
    worker = pool._workers[0]
    worker.send_signal(signal.SIGSTOP)
    wait, waited = worker.wait, list[float]()
    monkeypatch.setattr(worker, "wait", lambda seconds: waited.append(seconds) or wait(seconds))
    pool.__exit__(None, None, None)
    assert len(waited) == 1
    assert waited[0] > 200
    assert worker.returncode in (143, -signal.SIGTERM)  # not killed: it could write what it had seen


def test_a_worker_ends_with_its_parent_and_saves_before(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "qtrace.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    write_message(worker.stdin, Echo())
    write_message(worker.stdin, 1)
    assert read_message(worker.stdout) == ("begun", 1)
    assert read_message(worker.stdout) == Outcome(1)
    write_message(worker.stdin, ("wait", str(tmp_path / "saved")))
    assert read_message(worker.stdout)[0] == "begun"
    worker.stdin.close()
    assert worker.wait(600) == 143
    assert (tmp_path / "saved").exists()
    worker.stdout.close()
