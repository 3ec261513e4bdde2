"""The verdict at the end of ``qtrace calibrate`` and at the beginning of ``qtrace compare``."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli import models
from qtrace.cli.console import Console
from qtrace.errors import ConfigError, QtraceError

if TYPE_CHECKING:
    from qtrace.data import DataSource
    from qtrace.sensitivity.diagnosis import Diagnosis
    from qtrace.sensitivity.diagnosis.verdict import Verdict

__all__ = ["CURE", "VERDICT", "Judging", "Outcome", "judge_comparison", "judging", "text_of"]

CURE = "cure.yaml"
"""The recipe that cures what the verdict found, in the folder of `qtrace calibrate`."""
VERDICT = "verdict.json"
"""The verdict, its causes and the figures, in the same folder."""

_BATCHES = 2
_SAMPLES = 8  # of a batch
_MOST_BATCHES = 8
_ENOUGH_SAMPLES = 128  # to calibrate on
_LEAST_BATCHES = 8  # from which one is held back
_MANY_BATCHES = 16  # from which two are held back
_INPUT_SAMPLES = 32
_SUFFIXES = {"tflite": ".tflite", "ncnn": ".param", "megengine": ".mge"}


def judging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --evaluation, --metric and --at-least; the command gets them as the dict ``judged``."""
    names = ("evaluation", "metric", "at_least")

    @functools.wraps(function)
    def command(**arguments: Any) -> Any:
        return function(judged={name: arguments.pop(name) for name in names}, **arguments)

    added = (
        click.option(
            "--evaluation",
            "-e",
            metavar="E",
            help="Data for the verdict, as --data; default: held-back batches.",
        ),
        click.option(
            "--metric",
            metavar="PKG.MOD:F",
            help="A function of the graph that returns a number, more is better.",
        ),
        click.option(
            "--at-least", type=float, help="Exit with 1 if the metric, or the SQNR in dB, is below this."
        ),
    )
    for option in reversed(added):
        command = option(command)
    return command


@dataclass(frozen=True)
class Outcome:
    """The verdict at the end of ``qtrace calibrate``.

    Attributes:
        diagnosis: the diagnosis; None if the graph could not be judged.
        command: the command to run next.
        cure: the recipe that removes the causes; "" for none.
    """

    diagnosis: Diagnosis | None = None
    command: str = ""
    cure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the user's limit is reached, if there is one."""
        return self.diagnosis is None or self.diagnosis.verdict.passed

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None if the graph could not be judged."""
        return None if self.diagnosis is None else self.diagnosis.verdict

    @property
    def summary(self) -> dict[str, Any]:
        """Verdict, causes and the next command for JSON."""
        if self.diagnosis is None:
            return {}
        causes = [_finite(asdict(cause)) for cause in self.diagnosis.causes]
        return {"verdict": _finite(asdict(self.diagnosis.verdict)), "causes": causes, "next": self.command}

    def write(self, folder: Path, figures: dict[str, Any]) -> None:
        """Writes the verdict with its causes and ``figures``, and the cure, into an unfinished folder."""
        if self.diagnosis is None:
            return
        # The command to run next has the folder's name, and equal runs write equal files.
        facts = {key: value for key, value in self.summary.items() if key != "next"}
        text = json.dumps({**facts, "figures": figures}, indent=2, allow_nan=False)
        (folder / VERDICT).write_text(text + "\n", encoding="utf-8")
        if self.cure:
            (folder / CURE).write_text(self.cure, encoding="utf-8")

    def note(self, console: Console) -> None:
        """Notes the verdict, the causes and the next command."""
        if self.diagnosis is not None:
            for line in (*self.diagnosis.lines(), f"next: {self.command}"):
                console.note(line)


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Replaces numbers that JSON does not know by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


@dataclass
class Judging:
    """Judges the graph that one call of ``qtrace calibrate`` makes.

    Attributes:
        command: the arguments of the command that its next command repeats: model, data, recipe, out ...
        console: prints notes.
        evaluation: the data of --evaluation, or None.
        metric: the name of the user's metric, or None.
        at_least: the limit, or None.
        source: the data of the verdict.
        first: the number of its first batch that is used.
        measured_on: what these batches are, in words.
        more_data: whether the data has more batches than --max-batches lets through.
        twin: the float graph as it was before algorithms of the recipe changed weights; None if none does.
    """

    command: dict[str, Any]
    console: Console
    evaluation: str | None = None
    metric: str | None = None
    at_least: float | None = None
    source: DataSource | None = None
    first: int = 0
    measured_on: str = ""
    more_data: bool = False
    twin: Any = None

    def hold_back(self, source: DataSource, qconfig: Any, reading: dict[str, Any]) -> None:
        """Chooses the batches of the verdict, and takes them from the calibration data if there are enough.

        Args:
            source: the calibration data; its ``max_batches`` may become smaller, and that of ``reading``.
            qconfig: the recipe.
            reading: the options with which ``source`` was opened.
        """
        if self.metric is not None:
            _metric(self.metric)  # refuses a wrong name before the calibration
        unlimited = {**reading, "max_batches": None}
        count = len(source) if hasattr(source, "__len__") else None
        whole = source
        if count is not None:
            quiet = Console(quiet=True)
            whole = models.open_source(self.command["data"], quiet, qconfig=qconfig, **unlimited)
            self.more_data = len(whole) > count  # type: ignore[arg-type]
        if self.evaluation is not None:
            other = models.open_source(self.evaluation, self.console, qconfig=qconfig, **unlimited)
            self._choose(other, 0, "samples of --evaluation")
        elif self.more_data:
            self._choose(whole, count or 0, "samples behind --max-batches")
        elif count is not None and count >= _LEAST_BATCHES:
            held = 2 if count >= _MANY_BATCHES else 1
            reading["max_batches"] = source.max_batches = count - held
            self._choose(whole, count - held, "samples that were held back")
        else:
            self._choose(whole, 0, "samples of the calibration data; --evaluation gives others")

    def _choose(self, source: DataSource, first: int, measured_on: str) -> None:
        """Chooses the samples of ``source`` from the batch ``first`` on; they are read at the end."""
        self.source, self.first, self.measured_on = source, first, measured_on

    def _read(self) -> list[Any]:
        assert self.source is not None
        return _few(batch for _, batch in self.source.numbered(lambda number: number >= self.first))

    def keep_float(self, prepared: Any) -> None:
        """Keeps a copy of the float graph if an algorithm of the recipe is going to change its weights."""
        from qtrace.inspection.twin import float_twin, late_algorithms
        from qtrace.preparation.model import QuantizedModel

        view = QuantizedModel(prepared)
        if late_algorithms(view.config):
            self.twin = float_twin(view)

    def conclude(self, prepared: Any, source: DataSource, batches: int) -> Outcome:
        """Judges the calibrated graph.

        Args:
            prepared: the calibrated graph.
            source: the calibration data.
            batches: the number of batches of the calibration.

        Returns:
            The outcome; one without a diagnosis, after a warning, if the graph cannot be judged.
        """
        from qtrace.preparation.model import QuantizedModel
        from qtrace.sensitivity.diagnosis import Calibrated, diagnose, measure_inputs

        samples = batches * self.command["batch_size"] if hasattr(source, "__len__") else None
        try:
            inputs = () if self.evaluation is None else measure_inputs(_first(source))
            diagnosis = diagnose(
                prepared,
                self._read(),
                twin=self.twin,
                calibrated=Calibrated(samples, inputs),
                metric=None if self.metric is None else _metric(self.metric),
                measured_on=self.measured_on,
                at_least=self.at_least,
                progress=self.console.progress,
            )
        except QtraceError as error:
            if self.at_least is not None:
                raise
            self.console.warn(f"there is no verdict: {error}")
            return Outcome()
        command = self.next_command(diagnosis, QuantizedModel(prepared).annotation.backend)
        return Outcome(diagnosis, command, diagnosis.recipe(self._importable()))

    def next_command(self, diagnosis: Diagnosis, backend: str) -> str:
        """Returns the command to run next."""
        given, out = self.command, self.command["out"]
        if diagnosis.verdict.word == "good" and diagnosis.verdict.passed:
            name = Path(given["model"].rpartition(":")[2]).stem + _SUFFIXES.get(backend, ".onnx")
            return shlex.join(["qtrace", "export", f"{out}/quantized.mge", "-o", name])
        if diagnosis.bad_data:
            return self._calibrate_on_other_data(diagnosis.causes[0].name)
        if diagnosis.recipe():
            return self._calibrate(given["data"], f"{out}/{CURE}", given["max_batches"])
        words = ["qtrace", "sensitivity", given["model"], "--data", given["data"]]
        return shlex.join([*words, "--recipe", given["recipe"]])

    def _calibrate_on_other_data(self, cause: str) -> str:
        given = self.command
        limit = -(-_ENOUGH_SAMPLES // given["batch_size"])
        if cause == "too-few-samples" and self.more_data:
            return self._calibrate(
                given["data"], given["recipe"], max(limit, 2 * (given["max_batches"] or 0))
            )
        return self._calibrate(self.evaluation or "MORE_DATA", given["recipe"], limit)

    def _calibrate(self, data: str, recipe: str, max_batches: int | None) -> str:
        given = self.command
        words = ["qtrace", "calibrate", given["model"], "--data", data, "--recipe", recipe]
        words += ["--batch-size", str(given["batch_size"])] if given["batch_size"] != 8 else []
        words += [] if max_batches is None else ["--max-batches", str(max_batches)]
        words += ["--skip-bad"] if given["skip_bad"] else []
        words += ["--allow-code"] if given["allow_code"] else []
        words += [word for name in given["allow"] for word in ("--allow", name)]
        for flag, value in (("--evaluation", self.evaluation), ("--metric", self.metric)):
            words += [] if value is None or value == data else [flag, value]
        words += [] if self.at_least is None else ["--at-least", f"{self.at_least:g}"]
        return shlex.join([*words, "--out", f"{given['out']}-cured"])

    def _importable(self) -> str:
        recipe = str(self.command["recipe"])
        if not recipe.endswith((".yaml", ".yml")):
            return recipe
        return os.path.relpath(recipe, self.command["out"])


def judge_comparison(model: Any, network: Any, source: DataSource, console: Console) -> Diagnosis | None:
    """Judges the graph that ``qtrace compare`` compares; warns and returns None if it cannot be judged.

    Args:
        model: the quantized module.
        network: the float network, or None.
        source: the data.
        console: prints warnings.
    """
    from qtrace.inspection.twin import float_twin
    from qtrace.preparation.model import QuantizedModel
    from qtrace.sensitivity.diagnosis import diagnose

    batches = _few(source)
    try:
        twin = None if network is None else float_twin(QuantizedModel(model), network)
        return diagnose(model, batches, twin=twin, progress=console.progress)
    except QtraceError as error:
        console.warn(f"there is no verdict: {error}")
        return None


def text_of(diagnosis: Diagnosis | None) -> str:
    """Returns the lines of a diagnosis and the lines that cure it, above a table."""
    if diagnosis is None:
        return ""
    recipe = diagnosis.recipe()
    lines = diagnosis.lines()
    if recipe:
        lines += [
            "  add to the recipe, and calibrate again:",
            *(f"    {line}" for line in recipe.splitlines()),
        ]
    return "\n".join(lines) + "\n\n"


def _few(source: Iterable[Any]) -> list[Any]:
    """Returns the first samples of the data, at most `_SAMPLES` of a batch."""
    batches, samples = [], 0
    for batch in source:
        batches.append(_shortened(batch))
        samples += _length(batches[-1])
        if samples >= _BATCHES * _SAMPLES or len(batches) == _MOST_BATCHES:
            break
    return batches


def _length(batch: Any) -> int:
    value = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(value) if value.ndim else 1


def _shortened(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: value[:_SAMPLES] for key, value in batch.items()}
    return tuple(value[:_SAMPLES] for value in batch)


def _first(source: DataSource) -> list[Any]:
    """Returns the first batches of the data, of about `_INPUT_SAMPLES` samples."""
    batches, samples = [], 0
    for batch in source:
        batches.append(batch)
        samples += _length(batch)
        if samples >= _INPUT_SAMPLES:
            break
    return batches


def _metric(name: str) -> Callable[[Any], float]:
    from qtrace.data import import_object, is_object_name

    function = import_object(name) if is_object_name(name) else None
    if not callable(function):
        raise ConfigError(
            f"--metric {name} is no function: name one that takes the graph, as pkg.mod:function."
        )
    return function
