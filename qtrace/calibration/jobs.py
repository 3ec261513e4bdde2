"""A worker's share of a calibration: the job that it gets, and the collection that it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.calibration.checkpoint import Cadence, Part, write_part
from qtrace.calibration.choice import Chosen
from qtrace.calibration.collecting import Collected, Options, collect
from qtrace.calibration.statistics import arrays, checksum
from qtrace.config import Preprocess
from qtrace.data import DataSource, open_data
from qtrace.graph.files.serialize import load

__all__ = ["Job", "Keeping", "Source", "run_job"]


@dataclass(frozen=True)
class Source:
    """Data that any process can open.

    Attributes:
        source: as `qtrace.data.open_data` takes it.
        batch_size: samples a batch.
        max_batches: how many batches at most.
        skip_bad: whether to leave unreadable images out.
        preprocess: the recipe's ``preprocess`` as plain data.
    """

    source: str
    batch_size: int = 8
    max_batches: int | None = None
    skip_bad: bool = False
    preprocess: dict[str, Any] | None = None

    def open(self) -> DataSource:
        """Opens it."""
        how = None if self.preprocess is None else Preprocess.model_validate(self.preprocess)
        return open_data(
            self.source,
            preprocess=how,
            batch_size=self.batch_size,
            max_batches=self.max_batches,
            skip_bad=self.skip_bad,
        )


@dataclass(frozen=True)
class Job:
    """One worker's share: the batches whose number is ``shard`` modulo ``shards``, but for those done.

    Attributes:
        model: the file of the prepared model.
        allow: classes of the user's own that it may use.
        source: the data.
        shard: the number of this worker.
        shards: how many workers there are.
        done: numbers of batches that were seen before.
        engine: the engine, with the shapes at which it was compared with MegEngine.
        threads: how many threads it computes with; None for all cores.
        part: the file to write what was collected to.
        identity: of the calibration; see `qtrace.calibration.checkpoint.fingerprint`.
        every: write ``part`` after so many batches, too.
        seconds: write it after so many seconds, too.
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

    def to_json(self) -> str:
        """The job in a line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        data = json.loads(text)
        data["engine"] = Chosen.from_dict(data["engine"])
        data.update(source=Source(**data["source"]), allow=tuple(data["allow"]), done=tuple(data["done"]))
        return cls(**data)


def run_job(job: Job, on_batch: Callable[[int], None] = lambda number: None) -> None:
    """Does a worker's share and writes what was collected, also when it ends early.

    Args:
        job: the share.
        on_batch: called with the number of each batch that was observed.

    Raises:
        QtraceError: for what is wrong with model or data; what was seen until then is written.
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

    options = Options(job.engine, threads=job.threads)
    with Keeping(write, Cadence(job.every, job.seconds)) as after:
        seen: set[int] = set()

        def each(collected: Collected) -> None:
            after(collected)
            for number in collected.statistics.batches.keys() - seen:
                seen.add(number)
                on_batch(number)

        write(collect(prepared, batches, options, each))


class Keeping:
    """Writes what was collected now and then, and when the block ends early.

    Args:
        write: writes it.
        cadence: when.
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
