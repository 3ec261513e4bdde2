"""The executors of workers: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import qtrace.errors
from qtrace.calibration.jobs import WorkerJob, run_job
from qtrace.errors import ConfigError, QtraceError, install

__all__ = ["Executor", "Processes", "Ray"]

OnBatch = Callable[[int], None]

# By name: it stands above this room, with the other programs.
_WORKER = "qtrace.calibration.worker"
_EXIT_SECONDS = 30  # for all workers together, to write their statistics


class Executor(Protocol):
    """Runs jobs in parallel."""

    def __enter__(self) -> Executor:
        """Starts the workers."""

    def __exit__(self, *error: Any) -> None:
        """Ends the workers, even in the middle of a job."""

    def run(self, jobs: Sequence[WorkerJob], on_batch: OnBatch) -> None:
        """Runs all jobs; afterwards their parts are files of this machine.

        Args:
            jobs: at most one job for each worker.
            on_batch: a function that is called with the number of each observed batch.

        Raises:
            QtraceError: when a job fails; the parts hold the batches that were observed until then.
        """


class Processes:
    """Spawned processes, never forked ones: MegEngine cannot be used after a fork.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[subprocess.Popen[str]] = []
        self._ending = False

    def __enter__(self) -> Processes:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        for _ in range(self._count):
            worker = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,  # an interrupt from the keyboard is for the parent
            )
            self._workers.append(worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._terminate()
        deadline = time.monotonic() + _EXIT_SECONDS
        for worker in self._workers:
            try:
                worker.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            for stream in (worker.stdin, worker.stdout):
                with contextlib.suppress(
                    BrokenPipeError
                ):  # the buffer holds a job that the worker did not read
                    if stream is not None:
                        stream.close()

    def run(self, jobs: Sequence[WorkerJob], on_batch: OnBatch) -> None:
        """Runs jobs; see `Executor`."""
        failures: dict[int, QtraceError] = {}
        readers = []
        for index, (worker, job) in enumerate(zip(self._workers, jobs, strict=False)):
            assert worker.stdin is not None
            try:
                worker.stdin.write(job.to_json() + "\n")
                worker.stdin.flush()
            except OSError:
                pass  # the worker has died: its exit code says how
            reader = threading.Thread(
                target=self._follow, args=(index, worker, on_batch, failures), daemon=True
            )
            reader.start()
            readers.append(reader)
        for reader in readers:
            reader.join()
        if failures:
            raise failures[min(failures)]

    def _follow(
        self, index: int, worker: subprocess.Popen[str], on_batch: OnBatch, failures: dict[int, QtraceError]
    ) -> None:
        """Reads the events of a worker until it ends."""
        count = 0
        assert worker.stdout is not None
        for line in worker.stdout:
            event = json.loads(line)
            if "batch" in event:
                count += 1
                on_batch(event["batch"])
            elif not self._ending:  # an import that is interrupted raises errors of its own
                failures[index] = getattr(qtrace.errors, event["kind"], QtraceError)(event["error"])
        code = worker.wait()
        if code and index not in failures:
            ending = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            if not failures:  # else it was ended because of another failure
                failures[index] = QtraceError(f"worker {index} {ending} after {count} batches.")
        if failures:
            self._terminate()

    def _terminate(self) -> None:
        """Asks all workers to end; one that was stopped (SIGSTOP) must go on to receive the signal."""
        self._ending = True
        for worker in self._workers:
            if worker.poll() is None:
                worker.terminate()
                worker.send_signal(signal.SIGCONT)


class Ray:
    """Tasks on a Ray cluster. Each task opens the data, so that paths must exist on every node.

    Args:
        address: the address of the cluster; "" for a local one.

    Raises:
        ConfigError: when Ray is not installed or does not answer.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> Ray:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs the package ray: run {install('ray')}.") from error
        try:
            ray.init(address=self._address or None, log_to_driver=False, logging_level="error")
        except Exception as error:
            line = " ".join(str(error).split())[:200]
            raise ConfigError(f"the Ray cluster {self._address!r} does not answer: {line}") from error
        return self

    def __exit__(self, *error: Any) -> None:
        import ray

        ray.shutdown()

    def run(self, jobs: Sequence[WorkerJob], on_batch: OnBatch) -> None:
        """Runs jobs; see `Executor`."""
        import ray

        model = ray.put(Path(jobs[0].model).read_bytes())
        # A Python worker runs one task at a time: MegEngine stays on that process's main thread.
        remote = ray.remote(num_cpus=1, max_retries=2)(run_elsewhere)
        waiting = {remote.remote(job.to_json(), model): job for job in jobs}
        failure: QtraceError | None = None
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(ready)
            try:
                data, numbers, problem = ray.get(ready)
            except Exception as error:
                line = " ".join(str(error).split())[:200]
                failure = failure or QtraceError(f"worker {job.shard} of the Ray cluster failed: {line}")
                continue
            if data:
                Path(job.part).write_bytes(data)
            for number in numbers:
                on_batch(number)
            if problem is not None:
                failure = failure or getattr(qtrace.errors, problem[0], QtraceError)(problem[1])
        if failure is not None:
            raise failure


def run_elsewhere(text: str, model: bytes) -> tuple[bytes, list[int], tuple[str, str] | None]:
    """Runs a job on a machine without the files of the caller; returns the part as bytes.

    Args:
        text: the job as JSON.
        model: the content of the prepared model's file.

    Returns:
        The part (empty if no batch was observed), the numbers of the observed batches, and the class name and
        text of an error, or None.
    """
    numbers: list[int] = []
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        data = {**json.loads(text), "model": f"{folder}/prepared.mge", "part": f"{folder}/part.npz"}
        Path(data["model"]).write_bytes(model)
        try:
            run_job(WorkerJob.from_json(json.dumps(data)), numbers.append)
        except QtraceError as error:
            problem = type(error).__name__, str(error)
        part = Path(data["part"])
        return part.read_bytes() if part.exists() else b"", numbers, problem
