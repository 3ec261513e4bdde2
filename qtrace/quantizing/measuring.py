"""The placement decided by measurement: labellings are exported, timed in turns, and their noise measured.

A cost table predicts the time of a labelling, and single roundings its noise; both are off now and then. A
few labellings between the fastest and float are therefore calibrated by plain ranges on a few samples and run
in the runtime. The predicted choice stays unless another one is better beyond what the measurement may be off
by. The algorithms of the config then run on the chosen labelling alone.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.benchmarking.fitting import ProcessorFit, fit_processor
from qtrace.benchmarking.machine import describe_machine
from qtrace.benchmarking.runners import RunnerSettings, open_file
from qtrace.benchmarking.turns import FEWEST_RUNS, LEAST_RUNS, Speed, compare_files
from qtrace.calibration.calibrate import calibrate
from qtrace.calibration.known_ranges import from_ranges, measure_ranges
from qtrace.config import QConfig, backends
from qtrace.data.batches import as_arguments
from qtrace.errors import QtraceError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.open_axes import SharedAxes
from qtrace.export.onnx.exporter import OnnxOptions, files_with
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import late_algorithms
from qtrace.onnxfile.sessions import OrtSession, SessionSettings, dtype_of, open_session
from qtrace.outputs.selections import reaching
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.placement.frontier import Point, price
from qtrace.preparation.prepare import FloatSource, SearchOutcome, prepare_placed, read_request
from qtrace.preparation.record import fake_quants, read_record, write_record
from qtrace.process.thread import on_engine_thread
from qtrace.quantizing.delivering import Timer, timed_settings
from qtrace.quantizing.output_noise import measure_noise, measure_row_noise, output_groups
from qtrace.quantizing.reporting import Reporter
from qtrace.quantizing.times import MeasuredLabelling, Times
from qtrace.storage.cache import read_cached, write_cached

__all__ = [
    "Extent",
    "TimingPlan",
    "choose_labelling",
    "find_labellings",
    "fit_costs",
    "limit_measurement",
    "prepare_measured",
]

_FLOAT = "float"  # the labelling with every op in float
_BETWEEN = "between"
_SHARES = (0.25, 0.5)  # of the way from the fastest predicted time to that of float
_MARGIN = 0.01  # of the price: what is worth less is no reason to leave the predicted choice
_SPOILED = 0.1  # noise of the worst group of columns, relative to it
_INCOMPARABLE = 1.0  # the noise of a predicted choice that has none, as others are priced beside it
_LEAST_SECONDS, _MOST_SECONDS = 2.0, 30.0
_TIMING_SECONDS = 3.0
_ONE_THREAD = SessionSettings(threads=1)
_LEAST_SAMPLES = 4  # of those held back, two in each half
_SMALL = 64  # elements of an initializer that may be the sizes, scales or axes of a node
_TRAINED = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DequantizeLinear": (0,),
    "Gemm": (1, 2),
    "MatMul": (1,),
}
"""Op -> the inputs on whose values its time does not depend, if they are stored."""
_SCALED = {"QuantizeLinear": (1,), "DequantizeLinear": (1,)}
"""Op -> the inputs of whose values only matters which are equal."""


@dataclass(frozen=True)
class TimingPlan:
    """How labellings are measured.

    Attributes:
        times: takes what is measured, or holds times that are taken instead.
        timer: measures files in turns; None for `compare_files`.
        in_float: whether float may be chosen: for a file, and not for a graph to train on.
    """

    times: Times
    timer: Timer | None = None
    in_float: bool = True


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
    """
    config = read_request(traced, config, samples=samples)
    fitted = None
    if measurement is not None:
        measurement.times.bind(traced, config)
        try:
            if not measurement.times.fixed:
                measurement.times.fit = fit_costs(config)
            fitted = measurement.times.fit.table() if measurement.times.fit else None
        except (QtraceError, ImportError) as error:  # the runtime is not here
            reporter.note(f"placement: by predicted times, as none can be measured here: {error}")
            measurement = None
    if measurement is None:
        return prepare_placed(traced, config, samples, config, progress=reporter.progress)[0]
    start = time.perf_counter()
    source = FloatSource(traced, config, samples)
    request = (traced, config, samples, config)
    prepared, outcome = prepare_placed(*request, fitted=fitted, progress=reporter.progress, source=source)
    if outcome is None:
        return prepared
    times = measurement.times
    if not times.fixed and _is_measurable(config, outcome):
        budget = min(max(time.perf_counter() - start, _LEAST_SECONDS), _MOST_SECONDS)
        bench = _Bench(traced, config, samples, held_back, measurement, reporter, budget, source)
        times.labellings = bench.measure(find_labellings(outcome))
    chosen = choose_labelling(times.labellings, measurement.in_float) if times.labellings else 0
    if not times.fixed:
        integers = times.labellings[chosen].integers if times.labellings else _integers(outcome)
        times.integers = tuple(integers)
    if times.integers is None:  # the given times are those of files alone
        return prepared
    text = _describe(times.labellings, chosen) if times.labellings else "the ops are those of the given times"
    if times.labellings:
        reporter.note(f"placement: {text}")
    # A file that may be in float and a graph to train on take other labellings of the same times.
    integers = times.labellings[chosen].integers if times.labellings else times.integers
    labels = {name: name in integers or fixed for name, fixed in outcome.float_labels.items()}
    if labels != dict(outcome.point.labels):
        prepared, _ = prepare_placed(*request, outcome.instead(labels, text), fitted, source=source)
    if times.labellings:
        _write_measured(prepared, text)
    return prepared


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
    return config.backend == "onnxruntime" and outcome.mode == "balanced" and len(outcome.frontier) > 1


def find_labellings(outcome: SearchOutcome) -> dict[str, SearchOutcome]:
    """Returns the labellings in question: predicted choice, fastest, two between, and float, by name."""
    in_float = outcome.instead(outcome.float_labels)
    limit = in_float.point.energy.seconds
    usable = [p for p in outcome.frontier if any(p.labels.values()) and p.energy.seconds < limit]
    points: dict[str, Point] = {"predicted": outcome.point}
    if usable:
        fastest = usable[0].energy.seconds
        points["fastest"] = usable[0]
        for share in _SHARES:
            wanted = fastest + share * (limit - fastest)
            near = min(usable, key=lambda point: abs(point.energy.seconds - wanted))
            points[f"{share:.0%} {_BETWEEN}"] = near
    different: dict[str, SearchOutcome] = {}
    for name, point in points.items():
        if all(dict(point.labels) != dict(other.point.labels) for other in different.values()):
            different[name] = outcome.instead(point.labels)
    if any(outcome.point.labels.values()):
        different[_FLOAT] = in_float
    return different


def choose_labelling(measured: Sequence[MeasuredLabelling], in_float: bool = True) -> int:
    """Returns the number of the labelling with the lowest price of time and noise; 0 unless one is better.

    Another one is better if its price is lower at the slow end of its measured range, on both halves of the
    samples, and it spoils no output. Float is taken for its time alone: plain ranges show more noise than the
    algorithms of the recipe leave, and no file in float is what was asked for if integers are faster.
    """
    first, best, lowest = measured[0], 0, -_MARGIN
    for number, other in enumerate(measured[1:], 1):
        if other.name == _FLOAT and (other.speed.low < 1 or not in_float):
            continue
        if max(other.noise) >= _SPOILED:
            continue
        differences = [
            price(1 / max(other.speed.low, 1e-9), theirs) - price(1.0, min(own, _INCOMPARABLE))
            for own, theirs in zip(first.noise, other.noise, strict=True)
        ]
        if max(differences) < lowest:
            best, lowest = number, max(differences)
    return best


def _describe(measured: Sequence[MeasuredLabelling], chosen: int) -> str:
    """Says what was measured of each labelling, beside what was predicted."""
    whole = next((m for m in measured if m.name == _FLOAT), None)
    parts = []
    for labelling in measured:
        text = f"{labelling.name} {1e3 * labelling.speed.seconds:.3g} ms"
        if whole is not None and labelling is not whole:
            faster = labelling.speed.ratio / whole.speed.ratio
            predicted = whole.predicted_seconds / labelling.predicted_seconds
            text += f" ({faster:.2f}x, predicted {predicted:.2f}x)"
        noise = sum(labelling.noise) / len(labelling.noise)
        if math.isinf(noise):
            text += " with outputs that cannot be compared"
        elif noise > 0:
            text += f" {-10 * math.log10(noise):.1f} dB (predicted {labelling.predicted_db:.1f})"
        parts.append(text)
    kept = "the predicted choice stays" if chosen == 0 else f"{measured[chosen].name} is chosen"
    return f"measured by plain ranges: {', '.join(parts)}: {kept}"


@dataclass(frozen=True)
class Extent:
    """What there is time to measure.

    Attributes:
        names: the labellings.
        samples: the number of samples that their noise is measured on.
        seconds: how long the files may be timed together.
    """

    names: tuple[str, ...]
    samples: int
    seconds: float


def limit_measurement(names: Sequence[str], samples: int, run: float, budget: float) -> Extent | None:
    """Returns what there is time to measure; None if it is not even the least.

    Labellings between the fastest and float are left out first, then samples, then turns.

    Args:
        names: the labellings.
        samples: the number of samples that are held back.
        run: the seconds of a run of one sample.
        budget: the seconds for all runs.
    """
    kept = list(names)
    least = min(samples, _LEAST_SAMPLES)
    while len(kept) * (LEAST_RUNS + samples) * run > budget:
        between = [name for name in kept if name.endswith(_BETWEEN)]
        if not between:
            break
        kept.remove(between[-1])
    runs = int(budget / (len(kept) * max(run, 1e-9)))  # of each file
    if runs < FEWEST_RUNS + least:
        return None
    samples = min(samples, max(runs - LEAST_RUNS, least))
    return Extent(tuple(kept), samples, budget - len(kept) * samples * run)


class _Bench:
    """Exports labellings and measures them, each as long as the budget says."""

    def __init__(
        self,
        traced: TracedModule,
        config: QConfig,
        samples: Iterable[Any],
        held_back: Callable[[], Sequence[Any]],
        measurement: TimingPlan,
        reporter: Reporter,
        budget: float,
        source: FloatSource,
    ) -> None:
        self.source = source
        self.traced, self.samples, self.held_back = traced, samples, held_back
        self.timer, self.reporter, self.budget = measurement.timer or compare_files, reporter, budget
        late = late_algorithms(config)
        early = [s for s in config.to_dict().get("ptq", ["fuse_bn"]) if _name_of(s) not in late]
        observers = {"activation": "minmax", "weight": "minmax"}
        self.config = QConfig.model_validate({**config.to_dict(), "ptq": early, "observers": observers})
        self.feeds: list[list[np.ndarray]] = []  # of each batch that is held back
        self.ranges: list[Any] = []
        self.selecting: dict[str, TracedModule] = {}  # the graphs of the labellings, if they select

    def measure(self, labellings: dict[str, SearchOutcome]) -> tuple[MeasuredLabelling, ...]:
        """Returns what was measured of the labellings that there was time for; () if nothing was."""
        if len(labellings) < 2 or _FLOAT not in labellings:  # else the prediction is float
            return ()
        with tempfile.TemporaryDirectory(prefix="qtrace-labellings-") as folder:
            try:
                self.feeds = [self._values(batch, number) for number, batch in enumerate(self.held_back())]
                if not self.feeds:
                    self._note("no samples are held back")
                    return ()
                files = self._files(labellings, Path(folder))
                first = open_session(next(iter(files.values())), _ONE_THREAD)
                count = sum(_rows(first, values) or 1 for values in self.feeds)
                run = _time_run(next(iter(files.values())), timed_settings(self.traced))
                extent = limit_measurement(list(files), count, run, self.budget)
                if extent is None:
                    self._note(f"a run takes {run:.3g} s, and {self.budget:.3g} s are too little to compare")
                    return ()
                files = {name: files[name] for name in extent.names}
                noises = self._noises(files, extent.samples)
                speeds = self._time(list(files.values()), extent.seconds)
            except QtraceError as error:  # a labelling that cannot be exported or run decides nothing
                self._note(str(error))
                return ()
        return tuple(
            MeasuredLabelling(
                name,
                tuple(unit for unit, on_integers in labellings[name].point.labels.items() if on_integers),
                labellings[name].point.energy.seconds,
                -10 * math.log10(max(labellings[name].point.energy.noise, 1e-12)),
                speed,
                noise,
            )
            for name, speed, noise in zip(files, speeds, noises, strict=True)
        )

    def _noises(self, files: Mapping[str, Path], samples: int) -> list[tuple[float, ...]]:
        """Returns the noise of each file, on the first samples that were held back."""
        if all(name in self.selecting for name in files):
            counts = [len(values[0]) if values[0].ndim else 1 for values in self.feeds]
            batches = [b for i, b in enumerate(self.held_back()) if sum(counts[:i]) < samples]
            graphs = (self.selecting[name] for name in files)
            return [measure_row_noise(self.selecting[_FLOAT], graph, batches) for graph in graphs]
        exact = self._run(files[_FLOAT], samples)
        groups = output_groups(self.traced, exact)
        outputs = (exact if n == _FLOAT else self._run(path, samples) for n, path in files.items())
        return [measure_noise(groups, exact, own) for own in outputs]

    def _note(self, reason: str) -> None:
        self.reporter.note(f"placement: by predicted times, as none could be measured: {reason}")

    def _files(self, labellings: dict[str, SearchOutcome], folder: Path) -> dict[str, Path]:
        """Exports the first two labellings, float, and the others as long as there is time."""
        self.ranges = [batch for batch, _ in zip(self.samples, range(2), strict=False)]
        end = time.perf_counter() + self.budget

        def is_left_out(number: int, name: str) -> bool:
            return number >= 2 and name != _FLOAT and time.perf_counter() >= end

        graphs = {
            name: self._prepare(outcome)
            for number, (name, outcome) in enumerate(labellings.items())
            if not is_left_out(number, name)
        }
        axes = SharedAxes()
        known = measure_ranges(graphs[_FLOAT], graphs.values(), self.ranges, axes)
        files = {}
        for number, ((name, prepared), ranges) in enumerate(zip(graphs.items(), known, strict=True)):
            if not is_left_out(number, name):
                files[name] = folder / f"{number}.onnx"
                converted = self._convert(prepared, ranges)
                _write(converted, files[name], axes)
                if any(reaching(converted)):
                    self.selecting[name] = converted
        return files

    def _prepare(self, outcome: SearchOutcome) -> TracedModule:
        return prepare_placed(
            self.traced, self.config, self.samples, self.config, outcome, source=self.source
        )[0]

    def _convert(self, prepared: TracedModule, ranges: Mapping[str, tuple[float, float]]) -> TracedModule:
        if any(fake_quants(prepared)):
            statistics = from_ranges(prepared, ranges)  # None where the batches must run for them
            calibrate(prepared, self.ranges, progress=False, statistics=statistics)
        return convert(prepared)

    def _time(self, paths: Sequence[Path], most: float) -> list[Speed]:
        """Returns the speeds of files beside the first one; those of like structure are remembered."""
        settings = timed_settings(self.traced)
        machine = describe_machine("onnxruntime", "onnxruntime", settings.threads)
        key = {
            "files": [_structure(path) for path in paths],
            "machine": [
                machine.version,
                machine.processor,
                list(machine.flags),
                settings.threads,
                sorted(settings.shapes.items()),
            ],
        }
        if self.timer is compare_files and (stored := read_cached("labellings", key)) is not None:
            return [Speed(**entry) for entry in stored]
        seconds = min(_TIMING_SECONDS, most)
        speeds = self.timer(list(paths), runtime="onnxruntime", settings=settings, seconds=seconds, most=most)
        if self.timer is compare_files:
            write_cached("labellings", key, [speed.to_dict() for speed in speeds])
        return speeds

    def _values(self, batch: Any, number: int) -> list[np.ndarray]:
        """Returns the values of a file's inputs for a batch."""
        args, kwargs = as_arguments(batch, self.traced, number)
        return [value.numpy() for value in Interpreter(self.traced).bind(args, kwargs)[1][1:]]

    def _run(self, path: Path, samples: int) -> list[list[np.ndarray]]:
        """Returns the outputs of a file for the first samples that were held back, of each batch."""
        session = open_session(path, _ONE_THREAD)
        names = [info.name for info in session.inputs]
        results = []
        for batch in self.feeds:
            values = [
                value.astype(dtype_of(info.type) or value.dtype)
                for value, info in zip(batch, session.inputs, strict=True)
            ]
            rows = _rows(session, values)
            if samples > 0:
                feeds = [value[:samples] for value in values] if rows > samples else values
                results.append(session.run(None, dict(zip(names, feeds, strict=True))))
            samples -= rows or 1
        return results


def _write(converted: TracedModule, path: Path, axes: SharedAxes) -> None:
    """Writes the ONNX file of a labelling, with the open axes that all labellings share."""
    files = files_with(OnnxOptions(axes=axes), ConvertedGraph(converted), path)
    for file, content in files.items():
        with file.open("wb") as stream:
            stream.writelines([content] if isinstance(content, bytes) else content)


def _rows(session: OrtSession, values: Sequence[np.ndarray]) -> int:
    """Returns the number of samples of a batch that a file can compute apart; 0 if it takes all at once."""
    counts = {len(value) if value.ndim else 0 for value in values}
    is_open = all(info.shape and not isinstance(info.shape[0], int) for info in session.inputs)
    return counts.pop() if is_open and len(counts) == 1 else 0


def _time_run(path: Path, settings: RunnerSettings) -> float:
    """Returns the seconds of one run of a file."""
    return open_file(path, "onnxruntime", settings).run()


def _name_of(spec: Any) -> str:
    return str(spec if isinstance(spec, str) else spec.get("name", next(iter(spec), "")))


def _structure(path: Path) -> str:
    """Returns a hash of what the time of a file depends on: its nodes, types, shapes, and stored arguments.

    The values of weights, biases and scales do not count: a network trained anew has the same hash. Of
    scales counts which are equal, as a rounding to the scale that a tensor has is no work.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    digest = hashlib.sha256()
    digest.update(repr(sorted((entry.domain, entry.version) for entry in model.opset_import)).encode())
    arguments, scales = _stored_arguments(model.graph)
    numbers: dict[str, int] = {}
    equal: dict[bytes, int] = {}
    for tensor in model.graph.initializer:
        numbers[tensor.name] = len(numbers)
        digest.update(f"{tensor.data_type}{list(tensor.dims)}".encode())
        if tensor.name in arguments | scales and (
            math.prod(tensor.dims) <= _SMALL
            or tensor.data_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
        ):
            content = onnx.numpy_helper.to_array(tensor, str(path.parent)).tobytes()
            is_scale = tensor.name not in arguments
            digest.update(str(equal.setdefault(content, len(equal))).encode() if is_scale else content)
    for value in model.graph.input:
        numbers[value.name] = len(numbers)
        digest.update(value.type.SerializeToString(deterministic=True))
    for node in model.graph.node:
        for name in node.output:
            numbers[name] = len(numbers)
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        ends = [numbers.get(name, -1) for name in (*node.input, *node.output)]
        digest.update(f"{node.domain}:{node.op_type}{ends}{attributes}".encode())
    digest.update(repr([numbers.get(value.name, -1) for value in model.graph.output]).encode())
    return digest.hexdigest()[:32]


def _stored_arguments(graph: Any) -> tuple[set[str], set[str]]:
    """Returns the values that are an argument of a node, not trained, and those that are scales."""
    arguments, scales = set(), set()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if place in _SCALED.get(node.op_type, ()):
                scales.add(name)
            elif place not in _TRAINED.get(node.op_type, ()):
                arguments.add(name)
    return arguments, scales
