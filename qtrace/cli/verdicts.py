"""The verdict at the end of ``qtrace calibrate`` and at the beginning of ``qtrace compare``."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli.console import Console
from qtrace.cli.images import chosen_words
from qtrace.cli.options import grouped
from qtrace.errors import ConfigError, QtraceError
from qtrace.quantizing.folder import CURE

if TYPE_CHECKING:
    from qtrace.data import DataSource
    from qtrace.sensitivity.diagnosis import Diagnosis

__all__ = ["NextCommand", "import_metric", "judge_comparison", "judging", "text_of"]

_ENOUGH_SAMPLES = 128  # to calibrate on


def judging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --evaluation, --metric and --at-least; the command gets them as the dict ``judged``."""
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
        grouped("judged", "evaluation", "metric", "at_least"),
    )
    return functools.reduce(lambda command, add: add(command), reversed(added), function)


@dataclass(frozen=True)
class NextCommand:
    """The command to run after ``qtrace calibrate``.

    Attributes:
        options: the options of that command, which the next one repeats: model, data, recipe, out ...
        judged: --evaluation, --metric and --at-least.
        more_data: whether the data has more batches than --max-batches lets through.
    """

    options: Mapping[str, Any]
    judged: Mapping[str, Any]
    more_data: bool

    def after(self, diagnosis: Diagnosis, backend: str) -> str:
        """Returns the command to run after a diagnosis of a graph for ``backend``."""
        given, out = self.options, self.options["out"]
        if diagnosis.verdict.word == "good" and diagnosis.verdict.passed:
            from qtrace.quantizing.targets import suffix_of

            stem = Path(given["model"].rpartition(":")[2]).stem
            name = f"{stem}-int8{suffix_of(backend)}"
            return shlex.join(["qtrace", "export", f"{out}/quantized.mge", "-o", name])
        if diagnosis.bad_data:
            return self._calibrate_on_other_data(diagnosis.causes[0].name, self.judged["evaluation"])
        if diagnosis.verdict.doubted:
            return self._calibrate_on_other_data("too-few-samples", None)
        if diagnosis.recipe():
            return self._calibrate(given["data"], f"{out}/{CURE}", given["max_batches"])
        words = ["qtrace", "sensitivity", given["model"], "--data", given["data"]]
        return shlex.join([*words, "--recipe", given["recipe"], *chosen_words()])

    def _calibrate_on_other_data(self, cause: str, data: str | None) -> str:
        """Returns the command for other data, or for more of the same after a limit."""
        given = self.options
        limit = -(-_ENOUGH_SAMPLES // given["batch_size"])
        if cause == "too-few-samples" and self.more_data:
            return self._calibrate(
                given["data"], given["recipe"], max(limit, 2 * (given["max_batches"] or 0))
            )
        return self._calibrate(data or "MORE_DATA", given["recipe"], limit)

    def _calibrate(self, data: str, recipe: str, max_batches: int | None) -> str:
        given = self.options
        words = ["qtrace", "calibrate", given["model"], "--data", data, "--recipe", recipe]
        words += ["--batch-size", str(given["batch_size"])] if given["batch_size"] != 8 else []
        words += [] if max_batches is None else ["--max-batches", str(max_batches)]
        words += ["--skip-bad"] if given["skip_bad"] else []
        words += chosen_words()
        words += ["--allow-code"] if given["allow_code"] else []
        words += [word for name in given["allow"] for word in ("--allow", name)]
        for name in ("evaluation", "metric"):
            value = self.judged[name]
            words += [] if value is None or value == data else [f"--{name}", value]
        at_least = self.judged["at_least"]
        words += [] if at_least is None else ["--at-least", f"{at_least:g}"]
        return shlex.join([*words, "--out", f"{given['out']}-cured"])


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
    from qtrace.quantizing.evaluation import select_samples
    from qtrace.sensitivity.diagnosis import diagnose

    try:
        batches = select_samples(source, model)
        twin = None if network is None else float_twin(QuantizedModel(model), network)
        measured_on = "samples at the beginning of --data"
        return diagnose(model, batches, twin=twin, measured_on=measured_on, progress=console.progress)
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


def import_metric(name: str) -> Callable[[Any], Any]:
    """Imports the user's metric, a function of the graph."""
    from qtrace.data import import_object, is_object_name

    function = import_object(name) if is_object_name(name) else None
    if not callable(function):
        raise ConfigError(
            f"--metric {name} is no function: name one that takes the graph, as pkg.mod:function."
        )
    return function
