"""A collection with checkpoints: new or resumed, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qtrace.calibration.base import check_sites
from qtrace.calibration.checkpoint import Cadence, Part, StoredParts, fingerprint
from qtrace.calibration.choice import Chosen
from qtrace.calibration.collecting import Collected, CollectOptions, collect
from qtrace.calibration.jobs import (
    LocalCollection,
    PeriodicWriter,
    RemoteCollection,
    RemotePart,
    RunSettings,
    Source,
    make_jobs,
)
from qtrace.calibration.statistics import arrays, checksum
from qtrace.data import DataSource, SizedSource
from qtrace.display import progress_bar
from qtrace.errors import CalibrationError
from qtrace.graph.files.serialize import save
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.workers import Outcome, Pool, Processes, RayTasks, attempt

__all__ = ["Result", "RunSettings", "collect_all"]


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
