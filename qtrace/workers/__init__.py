"""Work that is shared out to processes of this machine or to a Ray cluster.

`calibrate` and `tune` bring their `Job`; nothing here knows what it does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Protocol

import qtrace.errors
from qtrace.errors import ConfigError, QtraceError, install

_LENGTH = struct.Struct(">Q")


def write_message(stream: IO[bytes], value: Any) -> None:
    """Writes an object, at once."""
    data = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Reads an object.

    Args:
        stream: a pipe, buffered or not.

    Raises:
        EOFError: when the stream ends before the object does.
    """
    (size,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    return pickle.loads(_read(stream, size))


def _read(stream: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


News = Callable[[Any], None]
"""Gets what a task tells before its end, such as the number of a finished batch."""


class Job(Protocol):
    """What every worker does; it is pickled, and so are its tasks, their news and their values."""

    def open(self) -> Callable[[Any, News], Any]:
        """Prepares a worker, and returns the function from a task to its value.

        Raises:
            QtraceError: when the worker cannot do any task.
        """

    def describe_end(self, number: int, ending: str, news: int) -> str:
        """Returns the sentence for a process that ended before its task did.

        Args:
            number: the number of the task.
            ending: how the process ended, as a clause.
            news: how many news it gave before.
        """

    def describe_failure(self, number: int, line: str) -> str:
        """Returns the sentence for a task that failed on a cluster, which says why in a line."""


@dataclass(frozen=True)
class Outcome:
    """The end of a task, as workers send it.

    Attributes:
        value: the value of the task; None after an error.
        problem: the name of an error's class and its text; None without an error.
    """

    value: Any = None
    problem: tuple[str, str] | None = None

    @property
    def error(self) -> QtraceError | None:
        """The error as an object."""
        if self.problem is None:
            return None
        kind, text = self.problem
        return getattr(qtrace.errors, kind, QtraceError)(text)

    def get(self) -> Any:
        """Returns the value, or raises the error."""
        error = self.error
        if error is not None:
            raise error
        return self.value


def attempt(function: Callable[[], Any]) -> Outcome:
    """Calls a function; an error of the user becomes the outcome."""
    try:
        return Outcome(function())
    except QtraceError as error:
        return Outcome(problem=(type(error).__name__, str(error)))


class Pool(Protocol):
    """Workers that do tasks at the same time.

    Attributes:
        count: number of tasks at a time.
    """

    count: int

    def __enter__(self) -> Pool:
        """Starts the workers."""

    def __exit__(self, *error: Any) -> None:
        """Ends the workers, even in the middle of a task."""

    def run(self, tasks: Sequence[Any], news: News = lambda item: None) -> Iterable[Outcome]:
        """Does tasks; the outcomes come in their order, as soon as they are there."""


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
        """Does tasks; see `qtrace.workers.Pool`."""
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


class RayTasks:
    """Tasks on a Ray cluster. Each opens its data anew, so that paths must exist on every node.

    Args:
        job: what a task does; it is stored in the cluster once.
        count: the number of tasks at a time.
        address: the address of the cluster; "" for a local one.

    Raises:
        ConfigError: when Ray is not installed or does not answer.
    """

    def __init__(self, job: Job, count: int, address: str) -> None:
        self.count, self._job, self._address = count, job, address

    def __enter__(self) -> RayTasks:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs the package ray: run {install('ray')}.") from error
        try:
            ray.init(address=self._address or None, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise ConfigError(
                f"the Ray cluster {self._address!r} does not answer: {_first_line(error)}"
            ) from error
        return self

    def __exit__(self, *error: Any) -> None:
        import ray

        ray.shutdown()

    def run(self, tasks: Sequence[Any], news: News = lambda item: None) -> Iterator[Outcome]:
        """Does tasks; see `qtrace.workers.Pool`. The news of a task come at its end."""
        import ray

        stored = ray.put(self._job)
        # A Python worker runs one task at a time: MegEngine stays on that process's main thread.
        remote = ray.remote(num_cpus=1, max_retries=2)(do_elsewhere)
        for number, waiting in enumerate([remote.remote(stored, task) for task in tasks]):
            try:
                ended, messages = ray.get(waiting)
            except ray.exceptions.RayError as error:
                line = self._job.describe_failure(number, _first_line(error))
                yield Outcome(problem=(QtraceError.__name__, line))
                continue
            for item in messages:
                news(item)
            yield ended


def do_elsewhere(job: Job, task: Any) -> tuple[Outcome, list[Any]]:
    """Does a task on a node of the cluster; returns its end and its news."""
    messages: list[Any] = []
    return attempt(lambda: job.open()(task, messages.append)), messages


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
