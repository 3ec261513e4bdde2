"""The jobs of the workers of a collection: how they are made, and what a worker does with one."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtrace.calibration.checkpoint import Cadence, Part, StoredParts, write_part
from qtrace.calibration.choice import Chosen
from qtrace.calibration.collecting import Collected, CollectOptions, collect
from qtrace.calibration.statistics import arrays, checksum
from qtrace.config import Preprocess
from qtrace.data import DataSource, open_data
from qtrace.data.opening import SampleRange, recut
from qtrace.graph.files.serialize import load
from qtrace.runtimes.host import RuntimeHost
from qtrace.workers import Outcome, attempt

__all__ = [
    "LocalCollection",
    "PeriodicWriter",
    "RemoteCollection",
    "RemotePart",
    "RunSettings",
    "Source",
    "WorkerJob",
    "make_jobs",
    "run_job",
]


@dataclass(frozen=True)
class Source:
    """Data that any process can open.

    Attributes:
        source: a path or name for `qtrace.data.open_data`.
        batch_size: samples in a batch.
        max_batches: the most batches to read; None for all.
        skip_bad: whether to skip unreadable images.
        preprocess: the recipe's ``preprocess`` as plain data.
        size, whole: the batches that are made of the data, as for `qtrace.data.opening.recut`.
        stop: the number of samples that are read; None for all.
    """

    source: str
    batch_size: int = 8
    max_batches: int | None = None
    skip_bad: bool = False
    preprocess: dict[str, Any] | None = None
    size: int | None = None
    whole: bool = False
    stop: int | None = None

    def open(self) -> DataSource:
        """Opens the data."""
        preprocess = None if self.preprocess is None else Preprocess.model_validate(self.preprocess)
        source = open_data(
            self.source,
            preprocess=preprocess,
            batch_size=self.batch_size,
            max_batches=self.max_batches,
            skip_bad=self.skip_bad,
        )
        if self.size is None and self.stop is None:
            return source
        batches = recut(source, self.size, self.whole)
        return batches if self.stop is None else SampleRange(batches, 0, self.stop)


@dataclass(frozen=True)
class RunSettings:
    """The settings of `qtrace.calibration.running.collect_all`.

    Attributes:
        engine: one of `qtrace.calibration.choice.ENGINES`.
        threads: number of threads that compute in each process; None for all cores.
        workers: number of processes.
        ray: the address of a Ray cluster, "" for a local one; None for processes of this machine.
        every: number of batches between checkpoints; None for any number.
        seconds: time between checkpoints; None for any time.
        progress: whether to show a progress bar.
        allow: the user's classes that workers may load with the model.
        runtime_host: the interpreter or machine whose onnxruntime computes; None for each process's own.
    """

    engine: str = "auto"
    threads: int | None = None
    workers: int = 1
    ray: str | None = None
    every: int | None = None
    seconds: float | None = 60.0
    progress: bool = False
    allow: tuple[str, ...] = field(default=())
    runtime_host: RuntimeHost | None = None


@dataclass(frozen=True)
class WorkerJob:
    """The share of one worker: the batches whose number is ``shard`` modulo ``shards``, without ``done``.

    Attributes:
        model: the file of the prepared model.
        allow: the user's classes that the model may contain.
        source: the data.
        shard: the number of this worker.
        shards: number of workers.
        done: numbers of the batches that were observed before.
        engine: the engine, with the shapes at which it was compared with MegEngine.
        threads: number of threads that compute; None for all cores.
        part: the file that the worker writes its statistics to.
        identity: the fingerprint of the calibration; see `qtrace.calibration.checkpoint.fingerprint`.
        every: number of batches after which ``part`` is written; None for any number.
        seconds: time after which ``part`` is written; None for any time.
        host: the interpreter or machine whose onnxruntime computes; None for the worker's.
    """

    model: str
    allow: tuple[str, ...]
    source: Source
    shard: int
    shards: int
    done: tuple[int, ...]
    engine: Chosen
    threads: int | None
    part: str
    identity: str
    every: int | None = None
    seconds: float | None = None
    host: RuntimeHost | None = None


def make_jobs(
    model: Path, source: Source, whole: Part, parts: StoredParts, settings: RunSettings
) -> list[WorkerJob]:
    """Makes a job for each worker: its share of the batches that were not observed yet.

    Args:
        model: the file of the prepared model.
        source: the data.
        whole: the statistics so far, with the engine of all workers.
        parts: the files to which the workers write theirs.
        settings: how the workers run.
    """
    assert whole.chosen is not None
    return [
        WorkerJob(
            str(model),
            settings.allow,
            source,
            shard,
            settings.workers,
            tuple(whole.statistics.batches),
            whole.chosen,
            settings.threads,
            str(parts.path(f"worker-{shard}")),
            parts.identity,
            settings.every,
            settings.seconds,
            settings.runtime_host,
        )
        for shard in range(settings.workers)
    ]


def run_job(job: WorkerJob, on_batch: Callable[[int], None] = lambda number: None) -> None:
    """Collects the statistics of a worker's share and writes them, also when the worker ends early.

    Args:
        job: the share of the worker.
        on_batch: a function that is called with the number of each observed batch.

    Raises:
        QtraceError: when the model or the data is at fault; the statistics so far are written.
    """
    prepared = load(job.model, allow=job.allow)
    source = job.source.open()
    done = frozenset(job.done)
    passed: dict[int, int] = {}
    batches = source.numbered(
        lambda number: number % job.shards == job.shard and number not in done,
        lambda number, batch: passed.__setitem__(number, checksum(arrays(batch))),
    )

    def write(collected: Collected) -> None:
        part = Part(collected.statistics, None, tuple(source.skipped), passed)
        write_part(Path(job.part), part, job.identity)

    options = CollectOptions(job.engine, threads=job.threads, host=job.host)
    with PeriodicWriter(write, Cadence(job.every, job.seconds)) as after:
        reported: set[int] = set()

        def report(collected: Collected) -> None:
            after(collected)
            for number in collected.statistics.batches.keys() - reported:
                reported.add(number)
                on_batch(number)

        write(collect(prepared, batches, options, report))


class LocalCollection:
    """Collects shares in processes of this machine, which write their parts themselves."""

    def open(self) -> Callable[[WorkerJob, Callable[[int], None]], None]:
        """Returns the function that collects a share."""
        return run_job

    def describe_end(self, number: int, ending: str, news: int) -> str:
        """Returns the sentence for a process that died; see `qtrace.workers.Job`."""
        return f"worker {number} {ending} after {news} batches."

    def describe_failure(self, number: int, line: str) -> str:
        """Returns the sentence for a share that failed on a cluster; see `qtrace.workers.Job`."""
        return f"worker {number} of the Ray cluster failed: {line}"


@dataclass(frozen=True)
class RemotePart:
    """The statistics of a share that another machine collected.

    Attributes:
        path: the file of this machine that they belong into.
        data: its content; empty if no batch was observed.
        ended: how the collection ended.
    """

    path: str
    data: bytes
    ended: Outcome

    def store(self) -> None:
        """Writes the part.

        Raises:
            QtraceError: when the collection failed; the part then holds the batches up to there.
        """
        if self.data:
            Path(self.path).write_bytes(self.data)
        self.ended.get()


class RemoteCollection(LocalCollection):
    """Collects shares on machines without the files of this one: the model travels there, the part back.

    Args:
        model: the file of the prepared model, which is read when this object is pickled.
    """

    def __init__(self, model: Path) -> None:
        self._model, self._content = model, b""

    def __getstate__(self) -> dict[str, Any]:
        return {"_content": self._model.read_bytes()}

    def open(self) -> Callable[[WorkerJob, Callable[[int], None]], Any]:
        """Returns the function that collects a share and gives its `RemotePart`."""
        return self._collect

    def _collect(self, job: WorkerJob, on_batch: Callable[[int], None]) -> RemotePart:
        with tempfile.TemporaryDirectory() as folder:
            model, part = Path(folder) / "prepared.mge", Path(folder) / "part.npz"
            model.write_bytes(self._content)
            here = dataclasses.replace(job, model=str(model), part=str(part))
            ended = attempt(lambda: run_job(here, on_batch))
            return RemotePart(job.part, part.read_bytes() if part.exists() else b"", ended)


class PeriodicWriter:
    """Writes the statistics at a cadence, and when the block ends early.

    Args:
        write: a function that writes the statistics.
        cadence: the batches or seconds between two writes.
    """

    def __init__(self, write: Callable[[Collected], None], cadence: Cadence) -> None:
        self._write, self._cadence = write, cadence
        self._unwritten: Collected | None = None

    def __enter__(self) -> Callable[[Collected], None]:
        return self._after

    def _after(self, collected: Collected) -> None:
        self._unwritten = collected
        if self._cadence.due():
            self._write(collected)
            self._unwritten = None

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and self._unwritten is not None:
            self._write(self._unwritten)
