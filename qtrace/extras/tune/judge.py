"""Judges a recipe, in this process or in workers."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from qtrace.calibration.calibrate import calibrate
from qtrace.calibration.choice import choose_segments
from qtrace.comparing.groups import ColumnGroup, find_groups
from qtrace.comparing.runs import outputs_of
from qtrace.comparing.sums import comparable, errors_of
from qtrace.config import QConfig, backends
from qtrace.data.batches import as_arguments, count_samples, evaluating
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError
from qtrace.extras.tune.trials import CostLimits
from qtrace.graph.files.serialize import load, save
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import late_algorithms
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.preparation.phases import in_phase
from qtrace.preparation.prepare import plan, prepare
from qtrace.workers import Outcome

Metric = Callable[[TracedModule], Any]
"""A user's metric: from a graph to a number, or to one for each sample, whose mean counts; more is better."""

_SMALLEST_NOISE = math.ldexp(1.0, -100)  # 301 dB: a graph without noise has a finite value
_LARGEST_NOISE = 1 / _SMALLEST_NOISE


@dataclass(frozen=True)
class RungData:
    """The data of one rung.

    Attributes:
        calibration: the batches to calibrate on.
        held_back: the batches to judge on.
    """

    calibration: tuple[Any, ...]
    held_back: tuple[Any, ...]


@dataclass(frozen=True)
class Judged:
    """What a recipe gives.

    Attributes:
        value: the metric; None if the recipe is refused.
        samples: noise or metric of each sample, as in `trials.Trial`.
        milliseconds: the predicted time; None without measured times of the backend.
        bytes: the size of the parameters.
        problem: why the recipe was refused, or "".
        model: the calibrated graph; None if the recipe is refused.
        twin: the float graph from before algorithms changed weights; None if none does.
    """

    value: float | None
    samples: tuple[float, ...]
    milliseconds: float | None
    bytes: int
    problem: str = ""
    model: TracedModule | None = None
    twin: TracedModule | None = None


def value_of_noise(samples: Sequence[float]) -> float:
    """Returns the SQNR in dB of the noise of samples, relative to the signal of all samples."""
    total = min(float(np.sum(samples)), _LARGEST_NOISE)
    return -10.0 * math.log10(max(total, _SMALLEST_NOISE))


def predict_milliseconds(traced: TracedModule, model: TracedModule, config: QConfig) -> float | None:
    """Returns the predicted time of a prepared graph in one thread; None without measured times.

    A graph whose config leaves no choice lacks a prediction of its own. It is planned once more, with
    everything on integers that can be there.

    Args:
        traced: the network as traced.
        model: the prepared graph.
        config: its config.
    """
    figures = read_figures(model)
    if figures.placement is not None:
        return figures.placement.milliseconds
    if not (config.cost_table or backends.get(config.backend).cost_table):
        return None
    rule = {"match": {}, "placement": "everything", "optional": True}
    data = config.to_dict()
    planned = QConfig.model_validate(
        {**data, "placement": "fastest", "rules": [*data.get("rules", ()), rule]}
    )
    note = plan(traced, planned).placement
    return None if note is None else note.milliseconds


@dataclass
class Judge:
    """Judges recipes on one network and its data.

    Attributes:
        traced: the network as traced.
        metric: the user's metric; None for the SQNR of the worst column group of the outputs.
        threads: threads of onnxruntime; None for all cores.
    """

    traced: TracedModule
    metric: Metric | None = None
    threads: int | None = None
    _references: dict[int, Any] = field(default_factory=dict)

    def judge(
        self, config: QConfig, part: RungData, too_much: Callable[[float | None, int], str] | None = None
    ) -> Judged:
        """Prepares, calibrates and measures.

        Args:
            config: the recipe.
            part: the data.
            too_much: returns why a time in milliseconds and a size in bytes exceed a limit, or ""; a recipe
                that exceeds one is not calibrated. None for no limit.

        Raises:
            QtraceError: when the recipe does not fit the network, or the data do not.
        """
        model, milliseconds, size = self._prepare(config, part)
        if not any(fake_quants(model)):
            return Judged(None, (), milliseconds, size, "the recipe quantizes nothing")
        problem = too_much(milliseconds, size) if too_much is not None else ""
        if problem:
            return Judged(None, (), milliseconds, size, problem)
        twin = flatten(model) if late_algorithms(config) else None
        calibrate(model, part.calibration, progress=False, threads=self.threads)
        value, samples = self.measure(model, part.held_back)
        return Judged(value, samples, milliseconds, size, "", model, twin)

    def cost(self, config: QConfig, part: RungData) -> tuple[float | None, int]:
        """Returns the predicted milliseconds and the bytes of a recipe, without calibrating."""
        return self._prepare(config, part)[1:]

    def _prepare(self, config: QConfig, part: RungData) -> tuple[TracedModule, float | None, int]:
        model = prepare(self.traced, config, samples=part.calibration, progress=False)
        return model, predict_milliseconds(self.traced, model, config), read_figures(model).bytes

    def measure(self, model: TracedModule, batches: Sequence[Any]) -> tuple[float, tuple[float, ...]]:
        """Returns the metric of a calibrated graph and the samples, as in `trials.Trial`."""
        if self.metric is not None:
            with in_phase(model, "quantize"), evaluating(model):
                return read_metric(self.metric, self.metric(model))
        first = as_arguments(batches[0], model, 0)
        engine = choose_segments(QuantizedModel(model), "auto", len(batches), self.threads, first)
        with in_phase(model, "quantize"):
            outputs = outputs_of(model, batches, engine)
        reference = self._reference(batches)
        groups = find_groups(self.traced, reference)
        noise = sample_noise(reference, outputs, self._counts(batches), groups)
        return value_of_noise(noise), noise

    def _counts(self, batches: Sequence[Any]) -> list[int]:
        return [count_samples(as_arguments(b, self.traced, i)) for i, b in enumerate(batches)]

    def _reference(self, batches: Sequence[Any]) -> Any:
        """Returns the float outputs; the outputs of the longest part so far are kept for the shorter ones."""
        key = id(batches[0])
        references = self._references.get(key, [])
        if len(references) < len(batches):
            references = outputs_of(self.traced, batches)
            self._references[key] = references
        return references[: len(batches)]


def read_metric(metric: Metric, result: Any) -> tuple[float, tuple[float, ...]]:
    """Reads what a user's metric returned: a number, or one for each sample.

    Returns:
        The number, and the values of the samples, none for one number.

    Raises:
        ConfigError: when it is neither, or not finite.
    """
    name = getattr(metric, "__name__", "metric")
    try:
        values = np.asarray(result, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"metric {name} returned {type(result).__name__}: return a number.") from None
    if values.ndim > 1 or not values.size or not np.isfinite(values).all():
        raise ConfigError(
            f"metric {name} returned {result!r:.60}: return a finite number, or one per sample."
        )
    samples = tuple(map(float, values)) if values.ndim else ()
    return float(values.mean()), samples


def sample_noise(
    reference: Any, outputs: Any, counts: Sequence[int], groups: Sequence[ColumnGroup] | None = None
) -> tuple[float, ...]:
    """Returns the noise of each sample in the worst column group, relative to the signal of all samples.

    The sum over the samples is the noise of `qtrace.sensitivity.metrics.sqnr`. A batch with an output whose
    first axis is not the batch axis counts as one sample.

    Args:
        reference: for each batch the float outputs.
        outputs: for each batch the outputs to judge.
        counts: the number of samples of each batch.
        groups: the column groups of the outputs; None for those that the values show.
    """
    rows = [
        count if all(value.ndim and len(value) == count for value in exact) else 1
        for exact, count in zip(reference, counts, strict=True)
    ]
    worst = np.zeros(sum(rows))
    for group in find_groups(None, reference) if groups is None else groups:
        exact, test = ([batch[group.output] for batch in values] for values in (reference, outputs))
        noise = _relative_noise(group, exact, test, rows)
        if noise is not None and noise.sum() > worst.sum():
            worst = noise
    return tuple(map(float, worst))


def _relative_noise(
    group: ColumnGroup, exact: Sequence[np.ndarray], test: Sequence[np.ndarray], rows: Sequence[int]
) -> np.ndarray | None:
    """Returns the noise of each sample in one column group; None where the group is 0 in float."""
    signal, noise = 0.0, []
    for reference, values, count in zip(exact, test, rows, strict=True):
        if not comparable(reference, values):
            noise.append(np.zeros(count))
            continue
        f, q = (group.select(v).astype(np.float64).reshape(count, -1) for v in (reference, values))
        noise.append(np.minimum((errors_of(f, q) ** 2).sum(axis=1), _LARGEST_NOISE))
        signal += float((np.where(np.isfinite(f), f, 0.0) ** 2).sum())
    return np.minimum(np.concatenate(noise) / signal, _LARGEST_NOISE) if signal > 0 else None


@dataclass(frozen=True)
class Task:
    """A recipe to judge.

    Attributes:
        recipe: the recipe, as plain data.
        rung: how much of the data to use.
        limits: what the recipe may cost to be calibrated; None for anything.
    """

    recipe: dict[str, Any]
    rung: int
    limits: CostLimits | None


def _judge_task(judge: Judge, parts: Sequence[RungData], task: Task) -> Judged:
    """Judges a recipe, without keeping its graph; one that does not fit has a problem instead of a value."""
    try:
        config = QConfig.model_validate(task.recipe)
        too_much = None if task.limits is None else task.limits.exceeded_by
        judged = judge.judge(config, parts[task.rung], too_much)
        return replace(judged, model=None, twin=None)
    except (ConfigError, GraphError, CalibrationError) as error:
        return Judged(None, (), None, 0, " ".join(str(error).split()))


class Here:
    """Judges one recipe after the other, in this process."""

    count = 1

    def __init__(self, judge: Judge, parts: Sequence[RungData]) -> None:
        self._judge, self._parts = judge, parts

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def run(self, tasks: Sequence[Task], news: Any = None) -> Iterator[Outcome]:
        """Judges recipes; see `qtrace.workers.Pool`."""
        return (Outcome(_judge_task(self._judge, self._parts, task)) for task in tasks)


@dataclass(frozen=True)
class Subject:
    """All that another process needs to judge recipes; it is pickled.

    Attributes:
        model: the network as `qtrace.save` writes it.
        allow: the user's classes that the network may contain.
        parts: the data of each rung.
        metric: the user's metric, which is imported by its name.
        threads: threads of onnxruntime in each process.
    """

    model: bytes
    allow: tuple[str, ...]
    parts: tuple[RungData, ...]
    metric: Any
    threads: int

    @classmethod
    def of(cls, judge: Judge, parts: Sequence[RungData], allow: Sequence[str], count: int) -> Subject:
        """Packs the network, the data and the metric; the cores are divided between ``count`` processes."""
        threads = max(1, (os.cpu_count() or 1) // count)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "float.mge"
            save(judge.traced, file)
            return cls(file.read_bytes(), tuple(allow), tuple(parts), judge.metric, threads)

    def judge(self) -> Judge:
        """Unpacks the network."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "float.mge"
            file.write_bytes(self.model)
            return Judge(load(file, allow=self.allow), self.metric, self.threads)

    def job(self) -> TrialJob:
        """Returns the job of workers.

        Raises:
            ConfigError: when the metric lacks a name by which another process could import it.
        """
        name = getattr(self.metric, "__module__", "")
        try:
            if name == "__main__":
                raise AttributeError("it is defined in the script that runs")
            return TrialJob(pickle.dumps(self))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the metric cannot go to other processes ({error}): define it in a module, as a function."
            ) from error


@dataclass(frozen=True)
class TrialJob:
    """Judges recipes in another process.

    Attributes:
        subject: the pickled `Subject`.
    """

    subject: bytes

    def open(self) -> Callable[[Task, Any], Judged]:
        """Unpacks the network, the data and the metric.

        Raises:
            QtraceError: when the metric cannot be imported.
        """
        try:
            subject: Subject = pickle.loads(self.subject)
        except (AttributeError, ImportError) as error:
            raise QtraceError(f"a process that judges recipes cannot import your metric: {error}.") from error
        judge = subject.judge()
        return lambda task, news: _judge_task(judge, subject.parts, task)

    def describe_end(self, number: int, ending: str, news: int) -> str:
        """Returns the sentence for a process that died; see `qtrace.workers.Job`."""
        return (
            f"a process that judged a recipe {ending}: run the command again, which goes on after the "
            "trials that are done; with --workers 1 if memory is short."
        )

    def describe_failure(self, number: int, line: str) -> str:
        """Returns the sentence for a trial that failed on a cluster; see `qtrace.workers.Job`."""
        return f"a trial failed on the Ray cluster: {line}"
