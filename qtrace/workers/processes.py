"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qtrace.errors import QtraceError
from qtrace.workers.job import Job, News, Outcome, read_message, write_message

__all__ = ["Processes"]

# By name: it stands above this room, with the other programs.
_WORKER = "qtrace.workers"
_EXIT_SECONDS = 30  # for all workers together, to write what they have


class Processes:
    """Spawned processes, never forked ones: MegEngine cannot be used after a fork.

    Args:
        job: what the processes do.
        count: number of processes.
        saves: whether an ending worker writes what it has done. It gets time for that, and the failure of one
            ends all. Else a failure ends only its task, and workers are killed.
    """

    def __init__(self, job: Job, count: int, saves: bool = False) -> None:
        self.count, self._job, self._saves = count, job, saves
        self._workers: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        self._failure: Outcome | None = None

    def __enter__(self) -> Processes:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        for _ in range(self.count):
            worker = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # an interrupt from the keyboard is for the parent
            )
            self._workers.append(worker)
            self._idle.put(worker)
        list(self._threads.map(lambda worker: _send(worker, self._job), self._workers))
        return self

    def __exit__(self, *error: Any) -> None:
        deadline = time.monotonic() + (_EXIT_SECONDS if self._saves else 0)
        self._terminate()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            try:
                worker.wait(max(deadline - time.monotonic(), 0.1 if self._saves else 0))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._threads.shutdown()
        for worker in self._workers:
            for stream in (worker.stdin, worker.stdout):
                with contextlib.suppress(BrokenPipeError):  # the buffer holds what the worker did not read
                    if stream is not None:
                        stream.close()

    def run(self, tasks: Sequence[Any], news: News = lambda item: None) -> Iterator[Outcome]:
        """Does tasks; see `qtrace.workers.job.Pool`."""
        return self._threads.map(lambda pair: self._do(pair[0], pair[1], news), enumerate(tasks))

    def _do(self, number: int, task: Any, news: News) -> Outcome:
        """Gives a task to an idle worker and waits for its end."""
        worker, count = self._idle.get(), 0
        _send(worker, task)
        try:
            assert worker.stdout is not None
            while not isinstance(outcome := read_message(worker.stdout), Outcome):
                count += 1
                news(outcome)
        except (EOFError, OSError):
            code = worker.wait()
            ending = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            text = self._job.describe_end(number, ending, count)
            outcome = Outcome(problem=(QtraceError.__name__, text))
        finally:
            self._idle.put(worker)
        return self._end_all(outcome) if self._saves and outcome.problem else outcome

    def _end_all(self, outcome: Outcome) -> Outcome:
        """Ends all workers on the first failure, which is the cause of what others say from then on."""
        if self._failure is None:
            self._failure = outcome
            self._terminate()
        return self._failure

    def _terminate(self) -> None:
        """Asks all workers to end; one that was stopped (SIGSTOP) must go on to receive the signal."""
        for worker in self._workers:
            if worker.poll() is None:
                if self._saves:
                    worker.terminate()
                else:
                    worker.kill()
                worker.send_signal(signal.SIGCONT)


def _send(worker: subprocess.Popen[bytes], message: Any) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: its exit code says how
        write_message(worker.stdin, message)
