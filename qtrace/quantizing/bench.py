"""Labellings as files: exported, timed in turns and measured for noise, each beside the predicted choice."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.benchmarking.machine import describe_machine
from qtrace.benchmarking.runners import RunnerSettings, find_package, open_file
from qtrace.benchmarking.turns import FEWEST_RUNS, LEAST_RUNS, Speed, compare_files
from qtrace.calibration.calibrate import calibrate
from qtrace.calibration.known_ranges import from_ranges, measure_ranges
from qtrace.config import QConfig, backends
from qtrace.data.base import batch_length
from qtrace.errors import QtraceError
from qtrace.export import export
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.open_axes import SharedAxes
from qtrace.export.onnx.exporter import OnnxOptions
from qtrace.export.onnx.files import files_with
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import late_algorithms
from qtrace.onnxfile.local_session import LocalSession
from qtrace.outputs.selections import reaching
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.placement.frontier import price
from qtrace.preparation.prepare import SearchOutcome, prepare_placed
from qtrace.preparation.record import fake_quants
from qtrace.process.together import Together
from qtrace.quantizing.card import timed_settings
from qtrace.quantizing.file_runs import FileRuns, input_values, open_runs, run_batch
from qtrace.quantizing.labellings import (
    EVERYTHING,
    FLOAT,
    choose_labelling,
    find_competitor,
    is_doubtful,
    is_noisy,
    is_settled,
    name_with_bits,
    predict,
)
from qtrace.quantizing.output_noise import (
    Outputs,
    group_weights,
    measure_noise,
    measure_row_noise,
    output_groups,
)
from qtrace.quantizing.placing import Placer, Searched, integers_of, runtime_of
from qtrace.quantizing.structure import hash_structure, is_in_float
from qtrace.quantizing.suffixes import suffix_of
from qtrace.quantizing.times import MeasuredLabelling
from qtrace.runtimes.child import MissingPackageError
from qtrace.storage.cache import read_cached, write_cached
from qtrace.storage.files import temporary_folder

__all__ = ["Bench", "Extent", "limit_measurement", "limit_seconds"]

_LEAST_SECONDS, _MOST_SECONDS = 5.0, 30.0  # of the measurement: small networks decide, too
_SHARE = 1 / 3  # of the time that the calibration is expected to take
_RUNS_OF_A_SAMPLE = 2.0  # in a calibration, beside what takes as long as the search for a placement
_TIMING_SECONDS = 1.2  # of two files
_TIMED_RUNS = 3
_TURNS = 3  # the way in which files take turns: times that were measured otherwise are not remembered
_UNTIMED = Speed(0.0, 1.0, 1.0, 1.0, 0)
_RANGE_BATCHES = 2  # where the ranges of the search are not enough
_MOST_CENTRED = 3  # labellings that are measured without zero points, too
_MOST_IN_DOUBT = 4  # labellings that are measured, whatever time it takes
_LEAST_SAMPLES, _MOST_SAMPLES = 4, 16  # of those held back, two to eight in each half


@dataclass(frozen=True)
class Extent:
    """What there is time to measure of two files.

    Attributes:
        samples: the number of samples that their noise is measured on.
        seconds: how long the files may be timed together.
    """

    samples: int
    seconds: float


def limit_measurement(samples: int, run: float, budget: float) -> Extent | None:
    """Returns what there is time to measure of two files; None if it is not even the least.

    Samples are left out first, then turns.

    Args:
        samples: the number of samples that are held back.
        run: the seconds of a run of one sample.
        budget: the seconds for all runs.
    """
    least = min(samples, _LEAST_SAMPLES)
    runs = int(budget / (2 * max(run, 1e-9)))  # of each file
    if runs < FEWEST_RUNS + least:
        return None
    samples = min(samples, max(runs - LEAST_RUNS, least), _MOST_SAMPLES)
    return Extent(samples, budget - 2 * samples * run)


def limit_seconds(search: float, samples: int, run: float) -> float:
    """Returns how many seconds labellings may be measured: a third of those that the calibration may take.

    Its algorithms take about as long as the search for a placement took, beside the runs of all samples.

    Args:
        search: the seconds of the search.
        samples: the number of samples to calibrate on, as far as it is known.
        run: the seconds of a run of one sample.
    """
    expected = search + _RUNS_OF_A_SAMPLE * samples * run
    return min(max(_SHARE * expected, _LEAST_SECONDS), _MOST_SECONDS)


class Bench:
    """Exports labellings and measures them, each beside the predicted choice.

    Args:
        placer: has made the searches.
        searches: bits of weights -> the search with them.
        held_back: reads the batches on which the noise is measured.
        seconds: how long the searches took.
    """

    def __init__(
        self,
        placer: Placer,
        searches: Mapping[int, Searched],
        held_back: Callable[[], Sequence[Any]],
        seconds: float,
    ) -> None:
        self.source, self.search = placer.source, seconds
        self.traced, self.samples, self.held_back = placer.traced, placer.samples, held_back
        self.timer, self.reporter = placer.measurement.timer or compare_files, placer.reporter
        self.in_float, self.host = placer.measurement.may_be_float, placer.measurement.host
        self.remembers = self.timer is compare_files and self.host is None  # the cache is of this machine
        self.backend = backend = next(iter(searches.values())).config.backend
        self.runtime, self.suffix = runtime_of(backend), suffix_of(backend)
        self.configs = {bits: _plain(search.config) for bits, search in searches.items()}
        self.everything = None if placer.everything is None else _plain(placer.everything)
        self.may_centre = bool(backends.get(backend).slower_with_zero_point)
        self.axes = SharedAxes()
        self.feeds: list[list[np.ndarray]] = []  # of each batch that is held back
        self.files: dict[str, Path] = {}
        self.structures: dict[str, str] = {}
        self.sessions: dict[str, FileRuns] = {}
        self.outputs: dict[str, Outputs] = {}
        self.selecting: dict[str, TracedModule] = {}  # the graphs of the labellings, if they select

    def measure(self, labellings: dict[str, SearchOutcome]) -> tuple[tuple[MeasuredLabelling, ...], str]:
        """Measures the predicted choice and float, and each other labelling that could be better than both.

        Returns:
            What was measured, () if nothing was; and which labellings were left out.
        """
        if len(labellings) < 2 or FLOAT not in labellings:  # else the prediction is float
            return (), ""
        try:
            with temporary_folder(Path(tempfile.gettempdir()) / "qtrace-labellings") as folder:
                self.feeds = [
                    input_values(self.traced, batch, number) for number, batch in enumerate(self.held_back())
                ]
                if not self.feeds:
                    self._note("no samples are held back")
                    return (), ""
                return self._measure(labellings, folder)
        except QtraceError as error:  # a labelling that cannot be exported or run decides nothing
            if self.host is not None and isinstance(error, MissingPackageError):
                raise
            self._note(str(error))
            return (), ""

    def _measure(
        self, labellings: dict[str, SearchOutcome], folder: Path
    ) -> tuple[tuple[MeasuredLabelling, ...], str]:
        start = time.process_time()
        first = next(iter(labellings))
        for name in (first, FLOAT):
            self._export(name, labellings[name], folder)
        run = _time_run(self.files[first], self.runtime, self._settings())
        limit = limit_seconds(self.search, self._count_samples(), run)
        count = sum(_rows(self._session(first), values) or 1 for values in self.feeds)
        extent = limit_measurement(count, run, limit)
        if extent is None:
            self._note(f"a run takes {run:.3g} s, and {limit:.3g} s are too little to compare")
            return (), ""
        measured = self._compare({name: labellings[name] for name in (first, FLOAT)}, extent)
        left_out = self._measure_others(labellings, measured, extent, folder, (start, limit))
        self._measure_centred(labellings, measured, extent, folder)
        return tuple(measured), left_out

    def _measure_others(
        self,
        labellings: Mapping[str, SearchOutcome],
        measured: list[MeasuredLabelling],
        extent: Extent,
        folder: Path,
        time_limit: tuple[float, float],
    ) -> str:
        """Measures each labelling that could be better than what was measured; says which were left out.

        Args:
            labellings: those in question.
            measured: what was measured, which grows.
            extent: what there is time to measure of two files.
            folder: the folder for the files.
            time_limit: when the measurement began, and the seconds that it may take, of processor time.
        """
        (start, limit), first = time_limit, measured[0].name
        waiting = {name: o for name, o in labellings.items() if name not in self.files}
        while (other := find_competitor(measured, waiting, self.in_float)) is not None:
            spent = time.process_time() - start
            # Float is not what was asked for: a file is in float only if a competitor was measured, too.
            # A predicted choice that is far from its prediction does not stay for want of time, either.
            in_float = choose_labelling(measured, self.in_float) == 1
            in_doubt = (len(measured) == 2 and in_float) or (
                len(measured) < _MOST_IN_DOUBT and is_doubtful(measured, self.in_float)
            )
            if spent * (len(measured) + 1) / len(measured) > limit and not in_doubt:  # with another one
                return _list_left_out(waiting, labellings, "for want of time")
            both = {first: labellings[first], other: waiting.pop(other)}
            try:
                self._export(other, both[other], folder)
                measured.append(self._compare(both, extent, measured)[1])
            except QtraceError as error:
                self.reporter.note(f"placement: {other} could not be measured: {error}")
        return _list_left_out(waiting, labellings, "as they could hardly be better")

    def _measure_centred(
        self,
        labellings: Mapping[str, SearchOutcome],
        measured: list[MeasuredLabelling],
        extent: Extent,
        folder: Path,
    ) -> None:
        """Measures the best labelling without zero points, if layers are slower with them.

        If it wins and is noisy, quieter ones are measured so, too: they are faster then than they were.
        """
        best = measured[choose_labelling(measured, in_float=False)]
        if not self.may_centre or best.name == FLOAT:
            return
        others = [m for m in measured if m.name != FLOAT and max(m.noise) < max(best.noise)]
        others.sort(key=lambda m: price(1 / max(m.speed.low, 1e-9), max(m.noise)))
        for labelling in (best, *others[: _MOST_CENTRED - 1]):
            if not self._measure_one_centred(labelling.name, labellings, measured, extent, folder):
                return
            chosen = measured[choose_labelling(measured, in_float=False)]
            if not chosen.centred or not is_noisy(chosen):
                return

    def _measure_one_centred(
        self,
        centred: str,
        labellings: Mapping[str, SearchOutcome],
        measured: list[MeasuredLabelling],
        extent: Extent,
        folder: Path,
    ) -> bool:
        """Measures a labelling without zero points; returns whether that is another file that runs."""
        first, name = measured[0].name, f"{centred} without zero points"
        both = {first: labellings[first], name: replace(labellings[centred], centred=True)}
        try:
            self._export(name, both[name], folder)
            if self.structures[name] == self.structures[centred]:
                return False
            measured.append(self._compare(both, extent, measured)[1])
        except QtraceError as error:
            self.reporter.note(f"placement: {name} could not be measured: {error}")
            return False
        return True

    def _compare(
        self,
        pair: Mapping[str, SearchOutcome],
        extent: Extent,
        measured: Sequence[MeasuredLabelling] = (),
    ) -> list[MeasuredLabelling]:
        """Measures two labellings, the first of which is the predicted choice.

        Args:
            pair: the labellings.
            extent: what there is time to measure.
            measured: what was measured before.
        """
        files = {name: self.files[name] for name in pair}
        quiet = [
            MeasuredLabelling(
                name,
                integers_of(outcome),
                *predict(outcome.point),
                _UNTIMED,
                noise,
                self._told_structure(name),
                outcome.weight_bits,
                outcome.centred,
            )
            for (name, outcome), noise in zip(pair.items(), self._noises(files, extent.samples), strict=True)
        ]
        first, other = quiet

        def is_enough(speeds: Sequence[Speed]) -> bool:
            known = measured or [replace(first, speed=speeds[0])]
            return is_settled(known, other, speeds[1], self.in_float)

        speeds = self._time(files, extent.seconds, is_enough)
        return [replace(each, speed=speed) for each, speed in zip(quiet, speeds, strict=True)]

    def _told_structure(self, name: str) -> str:
        """Returns the structure of an ONNX file; "" for that of float if rules keep something on integers."""
        if self.suffix != ".onnx":
            return ""
        return self.structures[name] if name != FLOAT or is_in_float(self.files[name]) else ""

    def _settings(self) -> RunnerSettings:
        return timed_settings(self.traced, self.suffix, self.host)

    def _count_samples(self) -> int:
        """Returns the number of samples to calibrate on; 0 if it is not known."""
        batches = len(self.samples) if isinstance(self.samples, Sized) else 0
        return batches * max(batch_length(tuple(values)) for values in self.feeds)

    def _noises(self, files: Mapping[str, Path], samples: int) -> list[tuple[float, ...]]:
        """Returns the noise of each file, on the first samples that were held back."""
        if FLOAT in self.selecting and all(name in self.selecting for name in files):
            counts = [batch_length(tuple(values)) for values in self.feeds]
            batches = [b for i, b in enumerate(self.held_back()) if sum(counts[:i]) < samples]
            counts, graphs = counts[: len(batches)], (self.selecting[name] for name in files)
            return [measure_row_noise(self.selecting[FLOAT], graph, batches, counts) for graph in graphs]
        self._run_files((FLOAT, *files), samples)
        exact = self.outputs[FLOAT]
        counts = [batch_length(tuple(values)) for values in self._inputs(self._session(FLOAT), samples)]
        weights = group_weights(output_groups(self.traced, exact), exact, counts)
        return [measure_noise(weights, exact, self.outputs[name]) for name in files]

    def _note(self, reason: str) -> None:
        self.reporter.note(f"placement: by predicted times, as none could be measured: {reason}")

    def _export(self, name: str, outcome: SearchOutcome, folder: Path) -> None:
        """Writes the file of a labelling, with plain ranges."""
        config = self.configs[outcome.weight_bits]
        labelling: SearchOutcome | None = outcome
        if name == EVERYTHING and self.everything is not None:
            config, labelling = self.everything, None
        prepared, _ = prepare_placed(
            self.traced, config, self.samples, config, labelling, source=self.source, quiet=True
        )
        if any(fake_quants(prepared)):
            self._set_ranges(prepared)
        converted = convert(prepared)
        path = folder / f"{len(self.files)}{self.suffix}"
        if any(reaching(converted)):
            self.selecting[name] = converted
        if self.suffix == ".onnx":
            _write(converted, path, self.axes)
            self.structures[name] = hash_structure(path)
        else:
            export(converted, path)
            self.structures[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            self.sessions[name] = open_runs(path, converted, self.backend, self.host)
        self.files[name] = path

    def _set_ranges(self, prepared: TracedModule) -> None:
        """Calibrates by the ranges that the search has found on its images."""
        facts, calls, statistics = self.source.facts, self.source.calls, None
        if facts is not None and facts.measured is not None and calls is not None:
            ranges = measure_ranges(prepared, facts.measured.ranges, calls, self.axes)
            statistics = from_ranges(prepared, ranges)  # None where the batches must run for them
        batches = [batch for batch, _ in zip(self.samples, range(_RANGE_BATCHES), strict=False)]
        calibrate(prepared, batches, progress=False, statistics=statistics)

    def _time(
        self, files: Mapping[str, Path], most: float, settled: Callable[[Sequence[Speed]], bool]
    ) -> list[Speed]:
        """Returns the speeds of files beside the first one; those of like structure are remembered.

        Speeds that were measured until they decided something else are measured again.
        """
        settings = self._settings()
        key = self._key(files, settings) if self.remembers else {}
        if self.remembers and (stored := read_cached("labellings", key)) is not None:
            speeds = [Speed(**entry) for entry in stored["speeds"]]
            if stored["whole"] or settled(speeds):
                return speeds
        paths, seconds = list(files.values()), min(_TIMING_SECONDS, most)
        speeds = self.timer(
            paths, runtime=self.runtime, settings=settings, seconds=seconds, most=most, settled=settled
        )
        if self.remembers and not any(speed.busy for speed in speeds):
            entries = [speed.to_dict() for speed in speeds]
            write_cached("labellings", key, {"speeds": entries, "whole": not settled(speeds)})
        return speeds

    def _key(self, files: Iterable[str], settings: RunnerSettings) -> dict[str, Any]:
        """Returns what the speeds of files depend on here."""
        machine = describe_machine(self.runtime, find_package(self.runtime), settings.threads)
        return {
            "files": [self.structures[name] for name in files],
            "turns": _TURNS,
            "machine": [
                machine.runtime,
                machine.version,
                machine.processor,
                list(machine.flags),
                settings.threads,
                sorted(settings.shapes.items()),
            ],
        }

    def _run_files(self, names: Iterable[str], samples: int) -> None:
        """Runs files that have not run yet on the first samples that were held back, of each batch.

        Each takes one thread of onnxruntime, so they run beside each other.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self.outputs]
        sessions = [self._session(name) for name in missing]
        local = all(isinstance(session, LocalSession) for session in sessions)
        with Together(None if local else 1) as together:
            outputs = together.map(lambda session: self._run(session, samples), sessions)
        self.outputs.update(zip(missing, outputs, strict=True))

    def _session(self, name: str) -> FileRuns:
        if name not in self.sessions:
            self.sessions[name] = open_runs(self.files[name], None, self.backend, self.host)
        return self.sessions[name]

    def _run(self, session: FileRuns, samples: int) -> list[list[np.ndarray]]:
        return [run_batch(session, inputs) for inputs in self._inputs(session, samples)]

    def _inputs(self, session: FileRuns, samples: int) -> Iterator[list[np.ndarray]]:
        """Yields the inputs of each run of a file on the first samples."""
        for values in self.feeds:
            rows = _rows(session, values)
            if samples > 0:
                yield [value[:samples] for value in values] if rows > samples else values
            samples -= rows or 1


def _plain(config: QConfig) -> QConfig:
    """Returns the config of a labelling that is measured: plain ranges, and no algorithm behind them."""
    late = late_algorithms(config)
    early = [s for s in config.to_dict().get("ptq", ["fuse_bn"]) if _name_of(s) not in late]
    observers = {"activation": "minmax", "weight": "minmax"}
    return QConfig.model_validate({**config.to_dict(), "ptq": early, "observers": observers})


def _list_left_out(names: Iterable[str], labellings: Mapping[str, SearchOutcome], reason: str) -> str:
    """Says which labellings were not measured; "" if all were."""
    seconds, _ = predict(labellings[FLOAT].point)
    parts = []
    for name in names:
        own, decibels = predict(labellings[name].point)
        label = name_with_bits(name, labellings[name].weight_bits)
        parts.append(f"{label} (predicted {seconds / own:.2f}x, {decibels:.1f} dB)")
    return f"not measured, {reason}: {', '.join(parts)}" if parts else ""


def _write(converted: TracedModule, path: Path, axes: SharedAxes) -> None:
    """Writes the ONNX file of a labelling, with the open axes that all labellings share."""
    files = files_with(OnnxOptions(axes=axes), ConvertedGraph(converted), path)
    for file, content in files.items():
        with file.open("wb") as stream:
            stream.writelines([content] if isinstance(content, bytes) else content)


def _rows(session: FileRuns, values: Sequence[np.ndarray]) -> int:
    """Returns the number of samples of a batch that a file can compute apart; 0 if it takes all at once."""
    counts = {len(value) if value.ndim else 0 for value in values}
    is_open = all(info.shape and not isinstance(info.shape[0], int) for info in session.inputs)
    return counts.pop() if is_open and len(counts) == 1 else 0


def _time_run(path: Path, runtime: str, settings: RunnerSettings) -> float:
    """Returns the seconds of one run of a file, the shortest of a few: other programs slow some."""
    runner = open_file(path, runtime, settings)
    return min(runner.run() for _ in range(_TIMED_RUNS))


def _name_of(spec: Any) -> str:
    return str(spec if isinstance(spec, str) else spec.get("name", next(iter(spec), "")))
