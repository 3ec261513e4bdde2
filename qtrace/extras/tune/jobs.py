"""The job of tune's workers: they judge the recipes of trials."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qtrace.config import QConfig
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError
from qtrace.extras.tune.judge import Judge, Judged, RungData
from qtrace.extras.tune.pareto import CostLimits
from qtrace.graph.files.serialize import load, save
from qtrace.workers.job import Outcome

__all__ = ["Here", "Subject", "Task", "TrialJob"]


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


def _judge_task(judge: Judge, parts: Sequence[RungData], task: Task) -> Judged:
    """Judges a recipe, without keeping its graph; one that does not fit has a problem instead of a value."""
    try:
        config = QConfig.model_validate(task.recipe)
        too_much = None if task.limits is None else task.limits.exceeded_by
        judged = judge.judge(config, parts[task.rung], too_much)
        return replace(judged, model=None, twin=None)
    except (ConfigError, GraphError, CalibrationError) as error:
        return Judged(None, (), None, 0, " ".join(str(error).split()))


class Here:
    """Judges one recipe after the other, in this process."""

    count = 1

    def __init__(self, judge: Judge, parts: Sequence[RungData]) -> None:
        self._judge, self._parts = judge, parts

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def run(self, tasks: Sequence[Task], news: Any = None) -> Iterator[Outcome]:
        """Judges recipes; see `qtrace.workers.job.Pool`."""
        return (Outcome(_judge_task(self._judge, self._parts, task)) for task in tasks)


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

    def job(self) -> TrialJob:
        """Returns the job of workers.

        Raises:
            ConfigError: when the metric lacks a name by which another process could import it.
        """
        name = getattr(self.metric, "__module__", "")
        try:
            if name == "__main__":
                raise AttributeError("it is defined in the script that runs")
            return TrialJob(pickle.dumps(self))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the metric cannot go to other processes ({error}): define it in a module, as a function."
            ) from error


@dataclass(frozen=True)
class TrialJob:
    """Judges recipes in another process.

    Attributes:
        subject: the pickled `Subject`.
    """

    subject: bytes

    def open(self) -> Callable[[Task, Any], Judged]:
        """Unpacks the network, the data and the metric.

        Raises:
            QtraceError: when the metric cannot be imported.
        """
        try:
            subject: Subject = pickle.loads(self.subject)
        except (AttributeError, ImportError) as error:
            raise QtraceError(f"a process that judges recipes cannot import your metric: {error}.") from error
        judge = subject.judge()
        return lambda task, news: _judge_task(judge, subject.parts, task)

    def describe_end(self, number: int, ending: str, news: int) -> str:
        """Returns the sentence for a process that died; see `qtrace.workers.job.Job`."""
        return (
            f"a process that judged a recipe {ending}: run the command again, which goes on after the "
            "trials that are done; with --workers 1 if memory is short."
        )

    def describe_failure(self, number: int, line: str) -> str:
        """Returns the sentence for a trial that failed on a cluster; see `qtrace.workers.job.Job`."""
        return f"a trial failed on the Ray cluster: {line}"
