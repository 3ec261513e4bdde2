"""The placement decided by measurement: labellings are exported, timed in turns, and their noise measured.

A cost table predicts the time of a labelling, and single roundings its noise; both are off now and then. A
few labellings between the fastest and float are therefore calibrated by plain ranges on a few samples and run
in the runtime. The predicted choice stays unless another one is better beyond what the measurement may be off
by. The algorithms of the config then run on the chosen labelling alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.benchmarking.fitting import ProcessorFit, fit_processor
from qtrace.benchmarking.machine import describe_machine
from qtrace.benchmarking.runners import RunnerSettings, find_package, open_file
from qtrace.benchmarking.turns import FEWEST_RUNS, LEAST_RUNS, Speed, compare_files
from qtrace.calibration.calibrate import calibrate
from qtrace.calibration.known_ranges import from_ranges, measure_ranges
from qtrace.config import QConfig, backends
from qtrace.costs import CostTable
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
from qtrace.onnxfile.saturation import SAFE_BITS
from qtrace.outputs.selections import reaching
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.placement.frontier import price
from qtrace.preparation.prepare import FloatSource, SearchOutcome, prepare_placed, read_request
from qtrace.preparation.record import fake_quants, read_record, write_record
from qtrace.process.thread import on_engine_thread
from qtrace.process.together import Together
from qtrace.quantizing.card import TIMED
from qtrace.quantizing.delivering import Timer, rounds_for_speed_by_default, timed_settings
from qtrace.quantizing.file_runs import FileRuns, input_values, open_runs, run_batch
from qtrace.quantizing.labellings import (
    EVERYTHING,
    FLOAT,
    choose_labelling,
    describe_labellings,
    find_competitor,
    find_labellings,
    is_doubtful,
    is_noisy,
    is_settled,
    name_with_bits,
    predict,
    with_everything,
)
from qtrace.quantizing.output_noise import Outputs, measure_noise, measure_row_noise, output_groups
from qtrace.quantizing.reporting import Reporter
from qtrace.quantizing.structure import hash_structure, is_in_float
from qtrace.quantizing.suffixes import suffix_of
from qtrace.quantizing.times import MeasuredLabelling, Times
from qtrace.quantizing.weight_bits import with_fewer_bits
from qtrace.runtimes.child import MissingPackageError
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.cache import read_cached, write_cached

__all__ = [
    "Extent",
    "TimingPlan",
    "fit_costs",
    "limit_measurement",
    "limit_seconds",
    "prepare_measured",
]

_LEAST_SECONDS, _MOST_SECONDS = 5.0, 30.0  # of the measurement: small networks decide, too
_SHARE = 1 / 3  # of the time that the calibration is expected to take
_RUNS_OF_A_SAMPLE = 2.0  # in a calibration, beside what takes as long as the search for a placement
_TIMING_SECONDS = 1.2  # of two files
_TIMED_RUNS = 3
# The backends whose runtimes the labellings are measured in, and those among them whose whole networks may be
# faster rounded everywhere than by the times of single kernels.
_MEASURED = ("onnxruntime", "openvino", "tflite", "ncnn")
_MEASURED_WHOLE = ("openvino", "tflite", "ncnn")
_TURNS = 3  # the way in which files take turns: times that were measured otherwise are not remembered
_UNTIMED = Speed(0.0, 1.0, 1.0, 1.0, 0)
_RANGE_BATCHES = 2  # where the ranges of the search are not enough
_MOST_CENTRED = 3  # labellings that are measured without zero points, too
_MOST_IN_DOUBT = 4  # labellings that are measured, whatever time it takes
_LEAST_SAMPLES, _MOST_SAMPLES = 4, 16  # of those held back, two to eight in each half


@dataclass(frozen=True)
class TimingPlan:
    """How labellings are measured.

    Attributes:
        times: takes what is measured, or holds times that are taken instead.
        timer: measures files in turns; None for `compare_files`.
        in_float: whether float may be chosen: for a file, and not for a graph to train on.
        host: the interpreter or machine that has the runtime; None for this one.
        keep: whether a file with integers is asked for, however slow it is.
    """

    times: Times
    timer: Timer | None = None
    in_float: bool = True
    host: RuntimeHost | None = None
    keep: bool = False

    @property
    def may_be_float(self) -> bool:
        """Whether float may be chosen."""
        return self.in_float and not self.keep


@on_engine_thread
def prepare_measured(
    traced: TracedModule,
    config: QConfig,
    samples: Iterable[Any],
    held_back: Callable[[], Sequence[Any]],
    measurement: TimingPlan | None,
    reporter: Reporter,
) -> TracedModule:
    """Prepares a network by the labelling that is best by measured time and noise.

    Args:
        traced: the float network.
        config: the config.
        samples: batches, as for `prepare`.
        held_back: reads the batches on which the noise is measured.
        measurement: how to measure; None for the predicted choice.
        reporter: takes the notes.

    Raises:
        MissingPackageError: when the host of the measurement lacks the runtime.
    """
    asked = read_request(traced, config, samples=samples)
    config, everything = _search_configs(asked, measurement)
    if measurement is not None:
        measurement.times.bind(traced, asked)
        try:
            remote = measurement.host is not None and measurement.host.runner
            if not measurement.times.fixed and not remote:  # kernels are timed on this machine
                measurement.times.fit = fit_costs(config)
        except (QtraceError, ImportError) as error:  # the runtime is not here
            reporter.note(f"placement: by predicted times, as none can be measured here: {error}")
            measurement = None
    if measurement is None:
        return prepare_placed(traced, asked, samples, asked, progress=reporter.progress)[0]
    start = time.process_time()
    source = FloatSource(traced, config, samples)
    placer = _Placer(traced, samples, source, measurement, reporter, everything)
    first = placer.search(config, quiet=config is not asked)
    if first.outcome is None:
        return first.prepared if config is asked else placer.round_everything()
    times = measurement.times
    searches = {first.outcome.weight_bits: first}
    if _may_have_fewer_bits(measurement, config) and (fewer := with_fewer_bits(config)) is not None:
        searches[SAFE_BITS] = placer.search(fewer)
    if not times.fixed and (labellings := _labellings(config, searches, everything, config is not asked)):
        seconds = time.process_time() - start
        bench = _Bench(placer, searches, held_back, seconds)
        times.labellings, times.left_out = bench.measure(labellings)
    chosen = choose_labelling(times.labellings, measurement.may_be_float) if times.labellings else 0
    if config is not asked and not times.labellings:
        return placer.round_everything()
    if not times.fixed:
        taken = times.labellings[chosen] if times.labellings else None
        predicted = _predicted(config, searches)
        times.integers = _integers(predicted) if taken is None else taken.integers
        times.weight_bits = predicted.weight_bits if taken is None else taken.weight_bits
    if times.integers is None:  # the given times are those of files alone
        return first.prepared
    return placer.take(times, chosen, searches, first)


@dataclass(frozen=True)
class _Searched:
    """A search for a labelling under a config.

    Attributes:
        config: the config.
        fitted: the cost table.
        prepared: the graph with the labelling that was found.
        outcome: the labellings in question; None without a choice.
    """

    config: QConfig
    fitted: CostTable | None
    prepared: TracedModule
    outcome: SearchOutcome | None


@dataclass(frozen=True)
class _Placer:
    """Searches for labellings, and prepares the one that is taken.

    Attributes:
        traced: the float network.
        samples: the batches to calibrate on.
        source: the float graph, which all searches share.
        measurement: how to measure.
        reporter: takes the notes.
        everything: the config that rounds everything, if that is in question.
    """

    traced: TracedModule
    samples: Iterable[Any]
    source: FloatSource
    measurement: TimingPlan
    reporter: Reporter
    everything: QConfig | None = None

    def search(self, config: QConfig, quiet: bool = False) -> _Searched:
        """Searches under a config, with the times of kernels for weights of its bits.

        Args:
            config: the config.
            quiet: whether nothing is said of the result, as the config is not the one that was asked for.
        """
        fit = self.measurement.times.fit
        fitted = None if fit is None else fit.table(config.weight_bits)
        prepared, outcome = prepare_placed(
            self.traced,
            config,
            self.samples,
            config,
            fitted=fitted,
            progress=self.reporter.progress,
            source=self.source,
            quiet=quiet,
        )
        return _Searched(config, fitted, prepared, outcome)

    def round_everything(self) -> TracedModule:
        """Returns the graph of the config that rounds everything."""
        assert self.everything is not None
        config = self.everything
        return prepare_placed(self.traced, config, self.samples, config, source=self.source)[0]

    def take(
        self, times: Times, chosen: int, searches: Mapping[int, _Searched], first: _Searched
    ) -> TracedModule:
        """Returns the graph with the labelling of the times that is chosen.

        Args:
            times: the measured times.
            chosen: the number of a measured labelling; 0 if none was measured.
            searches: bits of weights -> the search with them.
            first: the search under the given config.
        """
        text = "the ops are those of the given times"
        # A file that may be in float and a graph to train on take other labellings of the same times.
        integers, bits, centred = times.integers or (), times.weight_bits, False
        if times.labellings:
            text = describe_labellings(times.labellings, chosen, times.left_out)
            self.reporter.note(f"placement: {text}")
            taken = times.labellings[chosen]
            if taken.name == EVERYTHING and self.everything is not None:
                return self.round_everything()
            integers, bits, centred = taken.integers, taken.weight_bits, taken.centred
        search = searches.get(bits, first)
        prepared, outcome = search.prepared, search.outcome
        assert outcome is not None
        labels = {name: name in integers or fixed for name, fixed in outcome.float_labels.items()}
        if centred or labels != dict(outcome.point.labels):
            prepared, _ = prepare_placed(
                self.traced,
                search.config,
                self.samples,
                search.config,
                replace(outcome.instead(labels, text), centred=centred),
                search.fitted,
                source=self.source,
            )
        if search is not first and any(labels.values()):
            self.reporter.note(
                f"weights have {bits} bits: onnxruntime's fast products of uint8 and int8 are exact with "
                "them on this processor, and saturate with 8; `weight: {bits: 8}` in the recipe keeps 8"
            )
        if times.labellings:
            _write_measured(prepared, text)
        return prepared


def _search_configs(asked: QConfig, measurement: TimingPlan | None) -> tuple[QConfig, QConfig | None]:
    """Returns the config to search under, and the one that rounds everything if that is in question.

    A packaged recipe that rounds everything for speed is searched as if it were balanced, and its own
    placement stays unless another one is measured to be better.
    """
    mixed = any(rule.placement for rule in asked.rules)
    if measurement is None or mixed or asked.backend not in _MEASURED_WHOLE:
        return asked, None
    if measurement.may_be_float and rounds_for_speed_by_default(asked):
        elsewhere = measurement.host is not None or measurement.times.fixed
        package = find_package(_runtime_of(asked.backend))
        if elsewhere or importlib.util.find_spec(package) is not None:
            return asked.model_copy(update={"placement": "balanced"}), asked
    elif asked.effective_placement == "balanced":
        return asked, asked.model_copy(update={"placement": "everything"})
    return asked, None


def _runtime_of(backend: str) -> str:
    """Returns the name of the runtime that files of a backend are for."""
    return backends.get(backend).runtime or TIMED[suffix_of(backend)][0]


def _may_have_fewer_bits(measurement: TimingPlan, config: QConfig) -> bool:
    """Whether weights of fewer bits are in question: for a file, where they take kernels of their own."""
    times = measurement.times
    if times.fixed:
        return SAFE_BITS in (times.weight_bits, *(labelling.weight_bits for labelling in times.labellings))
    gains = times.fit is not None and times.fit.gains_by_fewer_bits
    return measurement.in_float and gains and config.effective_placement in ("balanced", "fastest")


def _predicted(config: QConfig, searches: Mapping[int, _Searched]) -> SearchOutcome:
    """Returns what is taken without a measurement: by the bits of the config, or by the least time alone."""
    outcomes = [search.outcome for search in searches.values() if search.outcome is not None]
    if config.effective_placement == "fastest":
        return min(outcomes, key=lambda outcome: outcome.point.energy.seconds)
    return outcomes[0]


def _labellings(
    config: QConfig, searches: Mapping[int, _Searched], everything: QConfig | None, by_default: bool
) -> dict[str, SearchOutcome]:
    """Returns the labellings that can be measured, those of the bits with the better prediction first.

    Args:
        config: the config of the search.
        searches: bits of weights -> the search with them.
        everything: the config that rounds everything, if that is in question.
        by_default: whether rounding everything stays unless another labelling is better.
    """
    found = [search.outcome for search in searches.values() if search.outcome is not None]
    outcomes = [o for o in found if _is_measurable(config, o) or (by_default and config.backend in _MEASURED)]
    if not outcomes:
        return {}
    outcomes.sort(key=lambda o: price(o.point.energy.seconds, o.point.energy.noise))
    labellings = find_labellings(*outcomes)
    if everything is None or not labellings:
        return labellings
    return with_everything(labellings, outcomes[0], by_default)


def _write_measured(prepared: TracedModule, text: str) -> None:
    """Writes into the record of a prepared graph how its placement was chosen."""
    record = read_record(prepared)
    note = record.annotation.placement
    if note is not None:
        annotation = replace(record.annotation, placement=replace(note, measured=text))
        write_record(prepared, replace(record, annotation=annotation))


def _integers(outcome: SearchOutcome) -> tuple[str, ...]:
    return tuple(name for name, on_integers in outcome.point.labels.items() if on_integers)


def fit_costs(config: QConfig) -> ProcessorFit | None:
    """Returns the fit of the packaged table to this processor, if the config places by it; else None.

    Raises:
        ExportError: when the runtime is not installed.
    """
    packaged = backends.get(config.backend).cost_table == "onnxruntime" and config.cost_table is None
    if not packaged or config.effective_placement == "everything":
        return None
    return fit_processor()


def _is_measurable(config: QConfig, outcome: SearchOutcome) -> bool:
    """Whether the runtime of the config runs here, and there is a choice to be made by time and noise."""
    return config.backend in _MEASURED and outcome.mode == "balanced" and len(outcome.frontier) > 1


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


class _Bench:
    """Exports labellings and measures them, each beside the predicted choice.

    Args:
        placer: has made the searches.
        searches: bits of weights -> the search with them.
        held_back: reads the batches on which the noise is measured.
        seconds: how long the searches took.
    """

    def __init__(
        self,
        placer: _Placer,
        searches: Mapping[int, _Searched],
        held_back: Callable[[], Sequence[Any]],
        seconds: float,
    ) -> None:
        self.source, self.search = placer.source, seconds
        self.traced, self.samples, self.held_back = placer.traced, placer.samples, held_back
        self.timer, self.reporter = placer.measurement.timer or compare_files, placer.reporter
        self.in_float, self.host = placer.measurement.may_be_float, placer.measurement.host
        self.remembers = self.timer is compare_files and self.host is None  # the cache is of this machine
        self.backend = backend = next(iter(searches.values())).config.backend
        self.runtime, self.suffix = _runtime_of(backend), suffix_of(backend)
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
        with tempfile.TemporaryDirectory(prefix="qtrace-labellings-") as folder:
            try:
                self.feeds = [
                    input_values(self.traced, batch, number) for number, batch in enumerate(self.held_back())
                ]
                if not self.feeds:
                    self._note("no samples are held back")
                    return (), ""
                return self._measure(labellings, Path(folder))
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
                _integers(outcome),
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
            graphs = (self.selecting[name] for name in files)
            return [measure_row_noise(self.selecting[FLOAT], graph, batches) for graph in graphs]
        self._run_files((FLOAT, *files), samples)
        exact = self.outputs[FLOAT]
        groups = output_groups(self.traced, exact)
        return [measure_noise(groups, exact, self.outputs[name]) for name in files]

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
        results = []
        for values in self.feeds:
            rows = _rows(session, values)
            if samples > 0:
                inputs = [value[:samples] for value in values] if rows > samples else values
                results.append(run_batch(session, inputs))
            samples -= rows or 1
        return results


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
