"""Who judges the trials of a search: this process, further processes, or a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from qtrace.calibration.executors import Ray
from qtrace.config import QConfig
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError
from qtrace.graph.files.serialize import load, save
from qtrace.tuning.judge import Judge, Judged, RungData
from qtrace.tuning.pareto import CostLimits

__all__ = ["Here", "Pool", "RayTasks", "Subject", "Task", "TrialProcesses", "attempt"]

# By name: it stands above this room, with the other programs.
_WORKER = "qtrace.tuning.worker"


@dataclass(frozen=True)
class Task:
    """A recipe to judge.

    Attributes:
        recipe: the recipe, as plain data.
        rung: how much of the data to use.
        limits: what the recipe may cost to be calibrated; None for anything.
    """

    recipe: dict[str, Any]
    rung: int
    limits: CostLimits | None


def attempt(judge: Judge, parts: Sequence[RungData], task: Task) -> Judged:
    """Judges a recipe, without keeping its graph; one that does not fit has a problem instead of a value."""
    try:
        config = QConfig.model_validate(task.recipe)
        too_much = None if task.limits is None else task.limits.exceeded_by
        judged = judge.judge(config, parts[task.rung], too_much)
        return replace(judged, model=None, twin=None)
    except (ConfigError, GraphError, CalibrationError) as error:
        return Judged(None, (), None, 0, " ".join(str(error).split()))


class Pool(Protocol):
    """Judges several recipes.

    Attributes:
        count: how many at a time.
    """

    count: int

    def __enter__(self) -> Pool:
        """Begins."""

    def __exit__(self, *error: Any) -> None:
        """Ends all work, even in the middle of a recipe."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Judged]:
        """Judges recipes; the results come in their order, as soon as they are there, without graphs.

        Raises:
            QtraceError: when a process ends before its result is there.
        """


class Here:
    """Judges one recipe after the other, in this process."""

    count = 1

    def __init__(self, judge: Judge, parts: Sequence[RungData]) -> None:
        self._judge, self._parts = judge, parts

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def run(self, tasks: Sequence[Task]) -> Iterator[Judged]:
        """Judges recipes; see `Pool`."""
        return (attempt(self._judge, self._parts, task) for task in tasks)


@dataclass(frozen=True)
class Subject:
    """All that another process needs to judge recipes; it is pickled.

    Attributes:
        model: the network as `qtrace.save` writes it.
        allow: the user's classes that the network may contain.
        parts: the data of each rung.
        metric: the user's metric, which is imported by its name.
        threads: threads of onnxruntime in each process.
    """

    model: bytes
    allow: tuple[str, ...]
    parts: tuple[RungData, ...]
    metric: Any
    threads: int

    @classmethod
    def of(cls, judge: Judge, parts: Sequence[RungData], allow: Sequence[str], count: int) -> Subject:
        """Packs the network, the data and the metric; the cores are divided between ``count`` processes."""
        threads = max(1, (os.cpu_count() or 1) // count)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "float.mge"
            save(judge.traced, file)
            return cls(file.read_bytes(), tuple(allow), tuple(parts), judge.metric, threads)

    def judge(self) -> Judge:
        """Unpacks the network."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "float.mge"
            file.write_bytes(self.model)
            return Judge(load(file, allow=self.allow), self.metric, self.threads)

    def pickled(self) -> bytes:
        """Returns the bytes for another process.

        Raises:
            ConfigError: when the metric has no name by which another process could import it.
        """
        name = getattr(self.metric, "__module__", "")
        try:
            if name == "__main__":
                raise AttributeError("it is defined in the script that runs")
            return pickle.dumps(self)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the metric cannot go to other processes ({error}): define it in a module, as a function."
            ) from error


class TrialProcesses:
    """Judges recipes in spawned processes, never forked ones: MegEngine cannot be used after a fork.

    Args:
        subject: the network, the data and the metric.
        count: the number of processes.
    """

    def __init__(self, subject: Subject, count: int) -> None:
        self.count, self._subject = count, subject.pickled()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def __enter__(self) -> TrialProcesses:
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
        self._threads = ThreadPoolExecutor(self.count)
        list(self._threads.map(lambda worker: _send(worker, self._subject), self._workers))
        return self

    def __exit__(self, *error: Any) -> None:
        for worker in self._workers:
            worker.kill()  # it writes no files, and a recipe that nobody waits for may take minutes
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()

    def run(self, tasks: Sequence[Task]) -> Iterator[Judged]:
        """Judges recipes; see `Pool`."""
        return self._threads.map(self._judge, tasks)

    def _judge(self, task: Task) -> Judged:
        worker = self._idle.get()
        try:
            _send(worker, pickle.dumps(task))
            assert worker.stdout is not None
            answer = pickle.load(worker.stdout)  # from a program of qtrace
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = worker.wait()
            ending = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise QtraceError(
                f"a process that judged a recipe {ending}: run the command again, which goes on after the "
                "trials that are done; with --workers 1 if memory is short."
            ) from error
        finally:
            self._idle.put(worker)
        if isinstance(answer, QtraceError):
            raise answer
        assert isinstance(answer, Judged)
        return answer


def _send(worker: subprocess.Popen[bytes], data: bytes) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: reading its answer says how
        worker.stdin.write(data)
        worker.stdin.flush()


class RayTasks:
    """Judges recipes as tasks on a Ray cluster.

    Args:
        subject: the network, the data and the metric.
        count: the number of tasks at a time.
        address: the address of the cluster; "" for a local one.
    """

    def __init__(self, subject: Subject, count: int, address: str) -> None:
        self.count, self._subject, self._cluster = count, subject.pickled(), Ray(address)

    def __enter__(self) -> RayTasks:
        self._cluster.__enter__()
        import ray

        self._stored = ray.put(self._subject)
        self._remote = ray.remote(num_cpus=1, max_retries=2)(_judge_elsewhere)
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def run(self, tasks: Sequence[Task]) -> Iterator[Judged]:
        """Judges recipes; see `Pool`."""
        import ray

        for waiting in [self._remote.remote(self._stored, task) for task in tasks]:
            try:
                yield ray.get(waiting)
            except ray.exceptions.RayError as error:
                line = " ".join(str(error).split())[:200]
                raise QtraceError(f"a trial failed on the Ray cluster: {line}") from error


def _judge_elsewhere(subject: bytes, task: Task) -> Judged:
    unpacked: Subject = pickle.loads(subject)
    return attempt(unpacked.judge(), unpacked.parts, task)
