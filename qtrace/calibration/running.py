"""A collection with checkpoints, in this process or in workers."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtrace.calibration.algorithms import Cadence, Part, StoredParts, fingerprint, write_part
from qtrace.calibration.base import check_sites
from qtrace.calibration.choice import Chosen
from qtrace.calibration.collecting import Collected, CollectOptions, arrays, checksum, collect
from qtrace.config import Preprocess
from qtrace.data import DataSource, SizedSource, open_data
from qtrace.data.opening import SampleRange, recut
from qtrace.display import progress_bar
from qtrace.errors import CalibrationError
from qtrace.graph.files.serialize import load, save
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.runtimes.host import RuntimeHost
from qtrace.workers import Outcome, Pool, Processes, RayTasks, attempt

# The jobs of the workers of a collection: how they are made, and what a worker does with one.


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
        identity: the fingerprint of the calibration; see `qtrace.calibration.algorithms.fingerprint`.
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


# A collection with checkpoints: new or resumed, in this process or in workers.


@dataclass(frozen=True)
class Result:
    """The result of `collect_all`.

    Attributes:
        collected: the statistics and the engine.
        resumed: number of batches that came from checkpoints.
        skipped: the unreadable images that were skipped.
    """

    collected: Collected
    resumed: int
    skipped: tuple[str, ...]


def collect_all(
    prepared: TracedModule,
    source: DataSource,
    described: Source,
    folder: Path,
    settings: RunSettings,
    note: Callable[[str], None] = lambda text: None,
) -> Result:
    """Collects the statistics of all batches of a source; batches in checkpoints do not run again.

    After an interruption, ``folder`` holds the batches that were observed. The result is the same, bit for
    bit, for any number of workers and interruptions.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        source: the data.
        described: the same data, in a form that any process can open.
        folder: the folder of the checkpoints.
        settings: engine, workers and checkpoints.
        note: a function that is called with messages for the user.

    Raises:
        CalibrationError: when the graph is without sites, a batch does not fit, or the checkpoints belong to
            another calibration.
        QtraceError: when the data is at fault, or a worker dies.
    """
    model = QuantizedModel(prepared, "prepared")
    check_sites(model)
    identity = fingerprint(
        model,
        source.identity(),
        described.batch_size,
        described.max_batches,
        settings.engine if settings.runtime_host is None else f"{settings.engine} by {settings.runtime_host}",
        settings.threads,
    )
    parts = StoredParts(folder, model, identity)
    whole = parts.gather()
    resumed = len(whole.statistics.batches)
    if resumed:
        note(f"{resumed} batches were observed before")
    run = _CollectionRun(model, source, described, parts, settings)
    if settings.workers == 1 and settings.ray is None:
        whole = run.collect_here(whole)
    else:
        with _pool(settings, run.model_file) as pool:
            whole = run.choose_engine(whole)
            whole = run.collect_in_workers(whole, pool)
    if whole.chosen is None or not whole.statistics.batches:
        raise CalibrationError(f"{source.source} gives no batch: calibration needs at least one.")
    return Result(Collected(whole.statistics, whole.chosen), resumed, whole.skipped)


def _pool(settings: RunSettings, model: Path) -> Pool:
    if settings.ray is None:
        return Processes(LocalCollection(), settings.workers, saves=True)
    return RayTasks(RemoteCollection(model), settings.workers, settings.ray)


class _CollectionRun:
    """The steps of `collect_all`; each takes the statistics so far and returns them with more batches."""

    def __init__(
        self,
        prepared: QuantizedModel,
        source: DataSource,
        described: Source,
        parts: StoredParts,
        settings: RunSettings,
    ) -> None:
        self.prepared, self.source, self.described = prepared, source, described
        self.parts, self.settings = parts, settings
        self.model_file = parts.folder / "prepared.mge"
        self.count = len(source) if isinstance(source, SizedSource) else source.max_batches

    def collect_here(self, whole: Part, max_batches: int | None = None) -> Part:
        """Collects in this process, at most ``max_batches`` batches."""
        settings = self.settings
        passed = dict(whole.passed)
        batches = self.source.numbered(
            lambda number: number not in whole.statistics.batches,
            lambda number, batch: _check_batch(number, checksum(arrays(batch)), whole),
        )
        if max_batches is not None:
            batches = (pair for pair, _ in zip(batches, range(max_batches), strict=False))
        latest = whole

        def write(collected: Collected) -> None:
            nonlocal latest
            skipped = tuple(sorted({*whole.skipped, *self.source.skipped}))
            latest = Part(collected.statistics, whole.chosen or collected.chosen, skipped, passed)
            self.parts.write("gathered", latest)

        engine = whole.chosen or settings.engine
        progress = settings.progress and max_batches is None
        options = CollectOptions(engine, self.count, settings.threads, progress, settings.runtime_host)
        with PeriodicWriter(write, Cadence(settings.every, settings.seconds)) as after:
            collected = collect(self.prepared, batches, options, after, whole.statistics)
        if len(collected.statistics.batches) > len(whole.statistics.batches):
            write(collected)
        return latest

    def choose_engine(self, whole: Part) -> Part:
        """Chooses the engine of the workers, if need be by running the first batch in this process."""
        if whole.chosen is not None:
            return whole
        if self.settings.engine == "megengine":
            return Part(whole.statistics, Chosen("megengine", "as asked"), whole.skipped, whole.passed)
        return self.collect_here(whole, max_batches=1)

    def collect_in_workers(self, whole: Part, pool: Pool) -> Part:
        """Collects the remaining batches in workers."""
        if whole.chosen is None:
            return whole
        settings = self.settings
        save(self.prepared.module, self.model_file)
        jobs = make_jobs(self.model_file, self.described, whole, self.parts, settings)
        start = len(whole.statistics.batches)
        with progress_bar(
            total=self.count, initial=start, desc="calibrate", unit="batch", disable=not settings.progress
        ) as bar:
            # A part of another machine is stored as it comes, so that an interruption keeps it.
            outcomes = [_store(outcome) for outcome in pool.run(jobs, lambda number: bar.update())]
        for outcome in outcomes:
            outcome.get()
        gathered = self.parts.gather()
        return Part(gathered.statistics, whole.chosen, gathered.skipped, gathered.passed)


def _store(outcome: Outcome) -> Outcome:
    """Writes a part that came from another machine into the checkpoint of this one."""
    return attempt(outcome.value.store) if isinstance(outcome.value, RemotePart) else outcome


def _check_batch(number: int, value: int, whole: Part) -> None:
    if whole.statistics.batches.get(number, value) != value:
        raise CalibrationError(
            f"batch {number} differs from the batch of the checkpoint: give the loader a fixed seed, or "
            "calibrate anew with --force."
        )
