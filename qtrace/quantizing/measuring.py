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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.benchmarking.costs import CostTable
from qtrace.benchmarking.fitting import fitted_table
from qtrace.benchmarking.machine import describe_machine
from qtrace.benchmarking.turns import Speed, compare_files
from qtrace.calibration.calibrate import calibrate
from qtrace.config import QConfig, backends
from qtrace.data.batches import as_arguments
from qtrace.errors import QtraceError
from qtrace.export import export
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import late_algorithms
from qtrace.onnxfile.sessions import SessionSettings, open_session
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.placement.frontier import Point, price
from qtrace.preparation.prepare import SearchOutcome, prepare_placed, read_request
from qtrace.preparation.record import fake_quants, read_record, write_record
from qtrace.process.thread import on_engine_thread
from qtrace.quantizing.delivering import Timer, timed_settings
from qtrace.quantizing.reporting import Reporter
from qtrace.quantizing.times import MeasuredLabelling, Times
from qtrace.storage.cache import read_cached, write_cached

__all__ = ["TimingPlan", "choose_labelling", "find_labellings", "fit_costs", "prepare_measured"]

_FLOAT = "float"  # the labelling with every op in float
_SHARES = (0.25, 0.5)  # of the way from the fastest predicted time to that of float
_MARGIN = 0.01  # of the price: what is worth less is no reason to leave the predicted choice
_SPOILED = 0.1  # noise at the outputs, relative to them
_LEAST_SECONDS, _MOST_SECONDS = 2.0, 30.0
_TIMING_SECONDS = 3.0


@dataclass(frozen=True)
class TimingPlan:
    """How labellings are measured.

    Attributes:
        times: takes what is measured, or holds times that are taken instead.
        timer: measures files in turns; None for `compare_files`.
    """

    times: Times
    timer: Timer | None = None


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
    times = Times() if measurement is None else measurement.times
    fitted = None if measurement is None or times.fixed else fit_costs(config)
    start = time.perf_counter()
    prepared, outcome = prepare_placed(
        traced, config, samples, config, fitted=fitted, progress=reporter.progress
    )
    if measurement is None or outcome is None:
        return prepared
    budget = min(max(time.perf_counter() - start, _LEAST_SECONDS), _MOST_SECONDS)
    units = outcome.float_labels
    if not times.fixed and _is_measurable(config, outcome):
        end = time.perf_counter() + budget
        bench = _Bench(traced, config, samples, held_back, measurement, reporter, end)
        times.labellings = bench.measure(find_labellings(outcome))
    chosen = choose_labelling(times.labellings) if times.labellings else 0
    if not times.fixed:
        integers = times.labellings[chosen].integers if times.labellings else _integers(outcome)
        times.integers = tuple(integers)
    labels = {name: name in times.integers or fixed for name, fixed in units.items()}
    text = _describe(times.labellings, chosen) if times.labellings else "the ops are those of the given times"
    if times.labellings:
        reporter.note(f"placement: {text}")
    if labels != dict(outcome.point.labels):
        outcome = outcome.instead(labels, text)
        prepared, _ = prepare_placed(traced, config, samples, config, outcome, fitted)
    if not (times.labellings or times.fixed):
        return prepared
    record = read_record(prepared)
    note = record.annotation.placement
    if note is not None:
        annotation = replace(record.annotation, placement=replace(note, measured=text))
        write_record(prepared, replace(record, annotation=annotation))
    return prepared


def _integers(outcome: SearchOutcome) -> tuple[str, ...]:
    return tuple(name for name, on_integers in outcome.point.labels.items() if on_integers)


def fit_costs(config: QConfig) -> CostTable | None:
    """Returns the packaged table fitted to this processor, if the config places by it; else None."""
    packaged = backends.get(config.backend).cost_table == "onnxruntime" and config.cost_table is None
    if not packaged or config.effective_placement == "everything":
        return None
    return fitted_table()


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
            points[f"{share:.0%} between"] = near
    different: dict[str, SearchOutcome] = {}
    for name, point in points.items():
        if all(dict(point.labels) != dict(other.point.labels) for other in different.values()):
            different[name] = outcome.instead(point.labels)
    if any(outcome.point.labels.values()):
        different[_FLOAT] = in_float
    return different


def choose_labelling(measured: Sequence[MeasuredLabelling]) -> int:
    """Returns the number of the labelling with the lowest price of time and noise; 0 unless one is better.

    Another one is better if its price is lower at the slow end of its measured range, on both halves of the
    samples, and it spoils no output. Float is taken for its time alone: plain ranges show more noise than the
    algorithms of the recipe leave, and no file in float is what was asked for if integers are faster.
    """
    first, best, lowest = measured[0], 0, -_MARGIN
    for number, other in enumerate(measured[1:], 1):
        if other.name == _FLOAT and other.speed.low < 1:
            continue
        differences = [
            price(1 / other.speed.low, theirs) - price(1.0, own)
            for own, theirs in zip(first.noise, other.noise, strict=True)
        ]
        if max(other.noise) < _SPOILED and max(differences) < lowest:
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
        if (noise := sum(labelling.noise) / len(labelling.noise)) > 0:
            text += f" {-10 * math.log10(noise):.1f} dB (predicted {labelling.predicted_db:.1f})"
        parts.append(text)
    kept = "the predicted choice stays" if chosen == 0 else f"{measured[chosen].name} is chosen"
    return f"measured by plain ranges: {', '.join(parts)}: {kept}"


class _Bench:
    """Exports labellings and measures them until the time is over."""

    def __init__(
        self,
        traced: TracedModule,
        config: QConfig,
        samples: Iterable[Any],
        held_back: Callable[[], Sequence[Any]],
        measurement: TimingPlan,
        reporter: Reporter,
        end: float,
    ) -> None:
        self.traced, self.samples, self.held_back = traced, samples, held_back
        self.timer, self.reporter, self.end = measurement.timer or compare_files, reporter, end
        late = late_algorithms(config)
        early = [s for s in config.to_dict().get("ptq", ["fuse_bn"]) if _name_of(s) not in late]
        observers = {"activation": "minmax", "weight": "minmax"}
        self.config = QConfig.model_validate({**config.to_dict(), "ptq": early, "observers": observers})
        self.batches: Sequence[Any] = ()
        self.ranges: list[Any] = []

    def measure(self, labellings: dict[str, SearchOutcome]) -> tuple[MeasuredLabelling, ...]:
        """Returns what was measured of the labellings that there was time for; () if nothing was."""
        if len(labellings) < 2 or _FLOAT not in labellings:  # else the prediction is float
            return ()
        with tempfile.TemporaryDirectory(prefix="qtrace-labellings-") as folder:
            files: dict[str, Path] = {}
            try:
                self.ranges = [batch for batch, _ in zip(self.samples, range(2), strict=False)]
                for number, (name, outcome) in enumerate(labellings.items()):
                    if number < 2 or time.perf_counter() < self.end:
                        files[name] = self._export(outcome, Path(folder) / f"{number}.onnx")
                self.batches = self.held_back()
                exact = self._run(files[_FLOAT]) if _FLOAT in files else None
                if exact is None:
                    files[_FLOAT] = self._export(labellings[_FLOAT], Path(folder) / f"{_FLOAT}.onnx")
                    exact = self._run(files[_FLOAT])
                speeds = self._time(list(files.values()))
                noises = [_noise(exact, self._run(path)) for path in files.values()]
            except QtraceError as error:  # a labelling that cannot be exported or run decides nothing
                self.reporter.note(f"placement: by predicted times, as none could be measured: {error}")
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

    def _export(self, outcome: SearchOutcome, path: Path) -> Path:
        prepared, _ = prepare_placed(self.traced, self.config, self.samples, self.config, outcome)
        if any(fake_quants(prepared)):
            calibrate(prepared, self.ranges, progress=False)
        export(convert(prepared), path)
        return path

    def _time(self, paths: Sequence[Path]) -> list[Speed]:
        """Returns the speeds of files beside the first one; those of like structure are remembered."""
        settings = timed_settings(self.traced)
        machine = describe_machine("onnxruntime", "onnxruntime", settings.threads)
        key = {
            "files": [_structure(path) for path in paths],
            "machine": [
                machine.version,
                machine.processor,
                settings.threads,
                sorted(settings.shapes.items()),
            ],
        }
        if self.timer is compare_files and (stored := read_cached("labellings", key)) is not None:
            return [Speed(**entry) for entry in stored]
        speeds = self.timer(list(paths), runtime="onnxruntime", settings=settings, seconds=_TIMING_SECONDS)
        if self.timer is compare_files:
            write_cached("labellings", key, [speed.to_dict() for speed in speeds])
        return speeds

    def _run(self, path: Path) -> list[list[np.ndarray]]:
        """Returns the outputs of a file for each batch that was held back."""
        session = open_session(path, SessionSettings(threads=1))
        names = [info.name for info in session.inputs]
        results = []
        for number, batch in enumerate(self.batches):
            args, kwargs = as_arguments(batch, self.traced, number)
            values = Interpreter(self.traced).bind(args, kwargs)[1][1:]
            results.append(session.run(None, dict(zip(names, [v.numpy() for v in values], strict=True))))
        return results


def _name_of(spec: Any) -> str:
    return str(spec if isinstance(spec, str) else spec.get("name", next(iter(spec), "")))


def _noise(exact: Sequence[Sequence[np.ndarray]], own: Sequence[Sequence[np.ndarray]]) -> tuple[float, ...]:
    """Returns for each half of the samples the noise of all outputs, each relative to its own power."""
    totals = [0.0, 0.0]
    for place in range(len(exact[0])):
        sums = [
            part
            for batch, other in zip(exact, own, strict=True)
            for part in _sums(batch[place], other[place])
        ]
        middle = (len(sums) + 1) // 2
        for number, half in enumerate((sums[:middle], sums[middle:] or sums)):
            power, error = (math.fsum(part[i] for part in half) for i in range(2))
            totals[number] += error / power if power > 0 else 0.0
    return tuple(totals)


def _sums(exact: np.ndarray, own: np.ndarray) -> list[tuple[float, float]]:
    """Returns the power and the error of each sample; nothing of integers and of outputs with other rows."""
    if exact.dtype.kind != "f" or exact.shape != own.shape or not exact.size:
        return []
    rows = len(exact) if exact.ndim else 1
    a, b = (v.astype(np.float64).reshape(rows, -1) for v in (exact, own))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    return list(zip(np.square(a).sum(1).tolist(), np.square(b - a).sum(1).tolist(), strict=True))


def _structure(path: Path) -> str:
    """Returns a hash of what the time of a file depends on: its nodes, and the types and shapes it stores."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    digest = hashlib.sha256()
    numbers: dict[str, int] = {}
    for tensor in model.graph.initializer:
        numbers[tensor.name] = len(numbers)
        digest.update(f"{tensor.data_type}{list(tensor.dims)}".encode())
    for value in model.graph.input:
        numbers[value.name] = len(numbers)
        digest.update(value.type.SerializeToString(deterministic=True))
    for node in model.graph.node:
        for name in node.output:
            numbers[name] = len(numbers)
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        ends = [numbers.get(name, -1) for name in (*node.input, *node.output)]
        digest.update(f"{node.op_type}{ends}{attributes}".encode())
    return digest.hexdigest()[:32]
