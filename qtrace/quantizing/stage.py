"""Calibration as a whole: prepare, calibrate, judge, and a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtrace.calibration.calibrate import calibrate
from qtrace.calibration.running import Result, RunSettings, Source, collect_all
from qtrace.config import QConfig
from qtrace.config.recipe import config_or_default, importable
from qtrace.data import Batch, DataSource
from qtrace.data.base import SampleRecord
from qtrace.data.opening import Recut, SampleRange
from qtrace.display import Displayed
from qtrace.errors import CalibrationError, QtraceError
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import explain
from qtrace.inspection.twin import float_twin
from qtrace.plugins.options import check_arguments
from qtrace.preparation.annotation import Preference
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.choosing import copy_with_weights
from qtrace.preparation.prepare import prepare
from qtrace.process import on_engine_thread
from qtrace.quantizing.call_data import DataOpener, estimate_samples
from qtrace.quantizing.figures import note_graph
from qtrace.quantizing.judging import Acceptance, Judgement, conclude, copy_float
from qtrace.quantizing.options import DataReading, FolderOptions
from qtrace.quantizing.reporting import CURE, FILES, VERDICT, LogReporter, Reporter, write_folder
from qtrace.storage.outputs import resumable_folder


@dataclass(frozen=True, repr=False)
class CalibratedFolder(Displayed):
    """The result of `calibrate_to_folder`.

    Attributes:
        folder: the folder.
        prepared: the calibrated graph.
        judgement: the verdict with its causes, and the cure.
        summary: the first entries of report.json: engine, number of batches, skipped images.
        figures: size, MACs and predicted time of the graph.
        more_data: whether the data has more batches than were let through.
        source: the calibration data.
    """

    folder: Path
    prepared: TracedModule = field(repr=False)
    judgement: Judgement
    summary: Mapping[str, Any] = field(repr=False)
    figures: dict[str, Any] = field(repr=False)
    more_data: bool
    source: DataSource = field(repr=False)

    def _text(self, max_width: int | None) -> str:
        diagnosis = self.judgement.diagnosis
        lines = diagnosis.lines() if diagnosis is not None else ["no verdict"]
        return "\n".join([f"{self.folder}: {', '.join(FILES)}", *lines])

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files that every such folder has."""
        return tuple(str(self.folder / name) for name in FILES)


@check_arguments(options=FolderOptions)
@on_engine_thread
def calibrate_to_folder(
    model: TracedModule | Callable[[DataSource], TracedModule],
    data: Any,
    out: str | os.PathLike[str],
    *,
    recipe: QConfig | str | Path | Mapping[str, Any] | None = None,
    reading: DataReading | None = None,
    evaluation: Any = None,
    acceptance: Acceptance | None = None,
    settings: RunSettings | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    **options: Any,
) -> CalibratedFolder:
    """Prepares a network, calibrates it, judges it, and writes a folder, as ``qtrace calibrate`` does.

    The folder appears whole or not at all. It holds prepared.mge (to be trained further), quantized.mge (to
    be exported), report.json (scheme, scale and zero point of every site), explain.txt (why each op is
    quantized or not) and verdict.json. If a recipe cures what the verdict names, it is cure.yaml. An
    interrupted run keeps its checkpoints in the folder.

    Args:
        model: a traced module; or a function that makes one when it gets the data.
        data: what `qtrace.data.open_data` opens: a file of arrays, a folder of images, ``pkg.mod:loader``.
        out: the folder to write.
        recipe: the config, as for ``qtrace.prepare``.
        reading: how ``data`` is read.
        evaluation: data for the verdict; None for what is held back, as in ``qtrace.quantize``.
        acceptance: the user's metric, and the smallest value.
        settings: engine, workers and checkpoints.
        resume: whether to go on where an interrupted calibration stopped.
        force: whether to replace the folder of an earlier calibration.
        progress: whether to show progress bars on stderr.
        **options: more options, the fields of `FolderOptions`.

    Raises:
        QtraceError: when the folder, the data, the recipe or the graph is at fault.
    """
    reporter, reading, given = LogReporter(progress), reading or DataReading(), FolderOptions(**options)
    qconfig, acceptance = config_or_default(recipe), acceptance or Acceptance()
    folder_name, settings = Path(out), settings or RunSettings(progress=progress)
    if not isinstance(data, (str, os.PathLike)) and (settings.workers > 1 or settings.ray is not None):
        raise CalibrationError("workers open the data by its name: give a path, or pkg.mod:loader.")
    opener = DataOpener(None, data, evaluation, reading, qconfig, reporter)
    _ = opener.given  # before the folder is made
    names = (*FILES, CURE, VERDICT)
    work = resumable_folder(folder_name, names=names, force=force, resume=resume, note=reporter.note)
    with work as (folder, checkpoints):
        made = callable(model) and not isinstance(model, TracedModule)
        traced, opened = opener.open(lambda data: model(data) if made else model)
        source, chosen = opened.calibration, opened.evaluation
        record = SampleRecord(source)
        prepared = prepare(traced, qconfig, samples=_Samples(source), progress=reporter.progress)
        label = os.fspath(data) if isinstance(data, (str, os.PathLike)) else source.source
        reporter.note(f"calibrating on {label}")
        run = _Run(source, label, reading, checkpoints, settings)
        result = _collect(prepared, run, reporter)
        twin = copy_float(prepared)
        held_back = itertools.chain.from_iterable(map(chosen.read, (traced,)))  # read if there is a choice
        collection = _finish(prepared, run, result, reporter, given.learning_engine, held_back, given.prefer)
        if twin is not None:
            twin = float_twin(QuantizedModel(copy_with_weights(prepared, twin)))
        summary = {**(given.about or {}), **collection}
        write_folder(folder, prepared, summary)
        figures = note_graph(prepared, reporter)
        samples = estimate_samples(source)
        judgement = conclude(
            prepared,
            chosen,
            acceptance,
            reporter,
            twin=twin,
            samples=samples,
            calibration=source,
            record=record,
            importing=_importable(given.importing or recipe, folder_name),
        )
        judgement.write(folder, figures)
    return CalibratedFolder(folder_name, prepared, judgement, summary, figures, chosen.more_data, source)


@dataclass(frozen=True)
class _Samples:
    """The batches of a source up to one that cannot be read, of which the calibration tells."""

    source: DataSource

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Batch]]:
        """Yields the batches with their numbers."""
        with contextlib.suppress(QtraceError):
            yield from self.source.numbered()


@dataclass(frozen=True)
class _Run:
    """The data and the settings of a collection.

    Attributes:
        source: the data.
        data: the name of the data, from which any process can open it.
        reading: how the data is read.
        folder: the folder of checkpoints.
        settings: engine, workers and checkpoints.
    """

    source: DataSource
    data: str
    reading: DataReading
    folder: Path
    settings: RunSettings


def _collect(prepared: TracedModule, run: _Run, reporter: Reporter) -> Result:
    """Collects the statistics of all sites of ``prepared``."""
    preprocess = QuantizedModel(prepared).record.qconfig.get("preprocess")
    part = run.source if isinstance(run.source, SampleRange) else None
    cut, stop = (part.recut, part.stop) if part else (run.source, None)
    assert isinstance(cut, Recut)
    reading = run.reading
    count, limit = (cut.size, None) if cut.cut and cut.size else (reading.batch_size, reading.max_batches)
    described = Source(run.data, count, limit, reading.skip_bad, preprocess, cut.size, cut.whole, stop)
    return collect_all(prepared, run.source, described, run.folder, run.settings, reporter.note)


def _finish(
    prepared: TracedModule,
    run: _Run,
    result: Result,
    reporter: Reporter,
    learning_engine: str,
    held_back: Iterable[Batch],
    prefer: Preference | None,
) -> dict[str, Any]:
    """Sets the ranges of ``prepared`` from the statistics in ``result``, and runs the recipe's algorithms.

    Returns:
        The engine, the number of batches and the images that were skipped, for the report.
    """
    chosen, statistics = result.collected.chosen, result.collected.statistics
    reporter.note(f"engine {chosen.name}: {chosen.reason}")
    calibrate(
        prepared,
        run.source,
        progress=reporter.progress,
        engine=chosen.name if chosen.everywhere else "megengine",
        statistics=statistics,
        state=run.folder,
        threads=run.settings.threads,
        learning_engine=learning_engine,
        held_back=held_back,
        prefer=prefer,
    )
    for line in explain(prepared).algorithms():
        reporter.note(line)
    run.source.skipped[:] = result.skipped
    return {
        "engine": {"name": chosen.name, "reason": chosen.reason},
        "batches": len(statistics.batches),
        "skipped": list(result.skipped),
    }


def _importable(recipe: Any, out: Path) -> str | None:
    """Returns the recipe's name as a file in the folder ``out`` imports it; None for no recipe's name."""
    if not isinstance(recipe, (str, os.PathLike)):
        return None
    return importable(os.fspath(recipe), out)
