"""A whole collection: begun or resumed, in this process or in workers, with checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qtrace.calibration.base import check_sites
from qtrace.calibration.checkpoint import Cadence, Part, Parts, fingerprint
from qtrace.calibration.choice import Chosen
from qtrace.calibration.collecting import Collected, Options, collect
from qtrace.calibration.executors import Executor, Processes, Ray
from qtrace.calibration.jobs import Job, Keeping, Source
from qtrace.calibration.statistics import arrays, checksum
from qtrace.data import DataSource, SizedSource
from qtrace.errors import CalibrationError
from qtrace.graph.files.serialize import save
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel

__all__ = ["Result", "Settings", "collect_all"]


@dataclass(frozen=True)
class Settings:
    """How to collect from a source.

    Attributes:
        engine: one of `qtrace.calibration.choice.ENGINES`.
        threads: how many threads the engine computes with in each process; None for all cores.
        workers: how many processes.
        ray: the address of a Ray cluster, "" for a local one; None for processes of this machine.
        every: write a checkpoint after so many batches.
        seconds: write one after so many seconds.
        progress: whether to show a progress bar.
        allow: classes of the user's own that workers may load with the model.
    """

    engine: str = "auto"
    threads: int | None = None
    workers: int = 1
    ray: str | None = None
    every: int | None = None
    seconds: float | None = 60.0
    progress: bool = False
    allow: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Result:
    """What was collected from a source.

    Attributes:
        collected: the statistics and the engine.
        resumed: how many of the batches came from checkpoints.
        skipped: images that were left out.
    """

    collected: Collected
    resumed: int
    skipped: tuple[str, ...]


def collect_all(
    prepared: TracedModule,
    source: DataSource,
    described: Source,
    folder: Path,
    settings: Settings,
    note: Callable[[str], None] = lambda text: None,
) -> Result:
    """Collects the statistics of all batches of a source, but for those in the checkpoints in ``folder``.

    However it ends, the batches that were seen are in the folder. The result is the same, bit for bit, for
    any number of workers and any interruptions.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        source: the data.
        described: the same, as any process can open it.
        folder: where checkpoints are.
        settings: how to collect.
        note: is told what happens.

    Raises:
        CalibrationError: when the graph has no site, a batch does not fit, or the checkpoints belong to
            another calibration.
        QtraceError: for what is wrong with the data, or a worker that dies.
    """
    model = QuantizedModel(prepared, "prepared")
    check_sites(model)
    identity = fingerprint(
        model,
        source.identity(),
        described.batch_size,
        described.max_batches,
        settings.engine,
        settings.threads,
    )
    parts = Parts(folder, model, identity)
    whole = parts.gather()
    resumed = len(whole.statistics.batches)
    if resumed:
        note(f"{resumed} batches were observed before")
    run = _Run(model, source, described, parts, settings)
    if settings.workers == 1 and settings.ray is None:
        whole = run.here(whole)
    else:
        with _executor(settings) as executor:
            whole = run.first(whole)
            whole = run.elsewhere(whole, executor)
    if whole.chosen is None or not whole.statistics.batches:
        raise CalibrationError(f"{source.source} gives no batch: calibration needs at least one.")
    return Result(Collected(whole.statistics, whole.chosen), resumed, whole.skipped)


def _executor(settings: Settings) -> Executor:
    return Processes(settings.workers) if settings.ray is None else Ray(settings.ray)


class _Run:
    def __init__(
        self,
        prepared: QuantizedModel,
        source: DataSource,
        described: Source,
        parts: Parts,
        settings: Settings,
    ) -> None:
        self.prepared, self.source, self.described = prepared, source, described
        self.parts, self.settings = parts, settings
        self.count = len(source) if isinstance(source, SizedSource) else source.max_batches

    def here(self, whole: Part, most: int | None = None) -> Part:
        """Collects in this process, at most ``most`` batches."""
        settings = self.settings
        passed = dict(whole.passed)
        batches = self.source.numbered(
            lambda number: number not in whole.statistics.batches,
            lambda number, batch: _compare(number, checksum(arrays(batch)), whole),
        )
        if most is not None:
            batches = (pair for pair, _ in zip(batches, range(most), strict=False))
        latest = whole

        def write(collected: Collected) -> None:
            nonlocal latest
            skipped = tuple(sorted({*whole.skipped, *self.source.skipped}))
            latest = Part(collected.statistics, whole.chosen or collected.chosen, skipped, passed)
            self.parts.write("gathered", latest)

        engine = whole.chosen or settings.engine
        options = Options(engine, self.count, settings.threads, settings.progress and most is None)
        with Keeping(write, Cadence(settings.every, settings.seconds)) as after:
            collected = collect(self.prepared, batches, options, after, whole.statistics)
        if len(collected.statistics.batches) > len(whole.statistics.batches):
            write(collected)
        return latest

    def first(self, whole: Part) -> Part:
        """What the workers need to know of the engine: for that, the first batch runs here."""
        if whole.chosen is not None:
            return whole
        if self.settings.engine == "megengine":
            return Part(whole.statistics, Chosen("megengine", "as asked"), whole.skipped, whole.passed)
        return self.here(whole, most=1)

    def elsewhere(self, whole: Part, executor: Executor) -> Part:
        """Collects in workers."""
        if whole.chosen is None:
            return whole
        settings, shards = self.settings, self.settings.workers
        model = self.parts.folder / "prepared.mge"
        save(self.prepared.module, model)
        jobs = [
            Job(
                str(model),
                settings.allow,
                self.described,
                shard,
                shards,
                tuple(whole.statistics.batches),
                whole.chosen,
                settings.threads,
                str(self.parts.path(f"worker-{shard}")),
                self.parts.identity,
                settings.every,
                settings.seconds,
            )
            for shard in range(shards)
        ]
        done = len(whole.statistics.batches)
        with tqdm(
            total=self.count, initial=done, desc="calibrate", unit="batch", disable=not settings.progress
        ) as bar:
            executor.run(jobs, lambda number: _step(bar))
        gathered = self.parts.gather()
        return Part(gathered.statistics, whole.chosen, gathered.skipped, gathered.passed)


def _step(bar: Any) -> None:
    bar.update()


def _compare(number: int, value: int, whole: Part) -> None:
    if whole.statistics.batches.get(number, value) != value:
        raise CalibrationError(
            f"batch {number} is not what the checkpoint has seen: give the loader a fixed seed, or calibrate "
            "anew with --force."
        )
