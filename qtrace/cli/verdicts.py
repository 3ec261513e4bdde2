"""The verdict at the end of a command, what it was measured on, and the limits of a recipe's ``expect``."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qtrace.cli.console import Console
from qtrace.cli.models import chosen_words
from qtrace.cli.options import grouped
from qtrace.display import Displayed, format_table, megabytes
from qtrace.errors import ConfigError, QtraceError
from qtrace.quantizing.reporting import CURE

if TYPE_CHECKING:
    from qtrace.config import Expect
    from qtrace.data import DataSource
    from qtrace.sensitivity.diagnosis import Diagnosis
    from qtrace.sensitivity.diagnosis.verdict import Verdict


@dataclass(frozen=True)
class Expectation:
    """One limit of ``expect``.

    Attributes:
        name: the key, such as ``min_sqnr``.
        limit: the limit in the unit of the key.
        value: what was measured or predicted, in the same unit; None if it was not.
        passed: whether the limit is kept; None if that cannot be said here.
        source: where the value is from, in words.
    """

    name: str
    limit: float
    value: float | None
    passed: bool | None
    source: str


@dataclass(frozen=True, repr=False)
class Expectations(Displayed):
    """All limits of ``expect``.

    Attributes:
        checks: one for each limit of the config.
        subject: what was checked, such as the name of a file; "" where that is clear.
    """

    checks: tuple[Expectation, ...] = ()
    subject: str = ""

    @property
    def passed(self) -> bool:
        """Whether no limit is broken."""
        return all(check.passed is not False for check in self.checks)

    def table(self) -> str:
        """Returns a text table of the limits; "" without any."""
        if not self.checks:
            return ""
        rows = [(c.name, f"{c.limit:g}", _show(c.value), _WORDS[c.passed], c.source) for c in self.checks]
        title = f"expected of {self.subject}\n" if self.subject else ""
        return title + format_table(("expect", "limit", "is", "", "from"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        checks = [asdict(check) for check in self.checks]
        return {"subject": self.subject, "passed": self.passed, "checks": checks}


_WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def check_expectations(
    expect: Expect | None,
    *,
    sqnr: float | None = None,
    drop: float | None = None,
    size: int | None = None,
    seconds: float | None = None,
    sources: dict[str, str] | None = None,
    subject: str = "",
) -> Expectations:
    """Compares measured or predicted figures with the limits of a config.

    Args:
        expect: the limits; None for none.
        sqnr: the SQNR of the worst column group of the outputs in dB, None if it is not known here.
        drop: how far the metric that ``expect`` names is below float's.
        size: the bytes of the parameters or of the file.
        seconds: the time of one run.
        sources: key of ``expect`` -> where its value is from, or why there is none.
        subject: what is checked.
    """
    if expect is None:
        return Expectations((), subject)
    values = {
        "max_drop": drop,
        "min_sqnr": sqnr,
        "max_megabytes": None if size is None else megabytes(size),
        "max_milliseconds": None if seconds is None else seconds * 1e3,
    }
    return Expectations(tuple(_checks(expect, values, sources or {})), subject)


def _checks(
    expect: Expect, values: dict[str, float | None], sources: dict[str, str]
) -> Iterator[Expectation]:
    for name, value in values.items():
        limit = getattr(expect, name)
        if limit is None:
            continue
        passed = None
        if value is not None:
            holds = value >= limit if name.startswith("min_") else value <= limit
            passed = holds and not math.isnan(value)
        shown = value if value is None or math.isfinite(value) else None
        yield Expectation(name, limit, shown, passed, sources.get(name, ""))


FAKE_QUANTS = "graph with fake quants"
"""What computes the figures that are no runtime's."""


class SampleCounter:
    """Batches whose samples are counted while they are read.

    Attributes:
        samples: the number of samples that were read.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        """Counts the samples of ``batches``, dicts or tuples of arrays."""
        self.samples = 0
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches."""
        from qtrace.data.base import batch_length

        for batch in self._batches:
            self.samples += batch_length(batch)
            yield batch


def samples_of(samples: int, option: str, max_batches: int | None) -> str:
    """Says which samples of the data of ``option`` were used, as the verdict of a command says it.

    Args:
        samples: the number of samples.
        option: the option that named the data, such as ``--data``.
        max_batches: the value of --max-batches; None for all batches.
    """
    if max_batches is None:
        return f"{samples} samples, all of {option}"
    return f"{samples} samples at the beginning of {option} (--max-batches)"


_PREDICTED = "predicted in one thread"
_NOT_PREDICTED = "the target lacks a cost table: see `qtrace bench`"


def check_graph(
    config: Any, verdict: Verdict | None, metric: str | None, figures: dict[str, Any]
) -> Expectations:
    """Checks a calibrated graph.

    Args:
        config: the config of the graph.
        verdict: its verdict; None if it could not be judged.
        metric: the name of the metric that the verdict has, ``pkg.mod:function``; None for none.
        figures: what `qtrace.quantizing.figures.note_graph` returned.
    """
    expect = config.expect
    seconds = figures.get("predicted_seconds")
    where = "no verdict" if verdict is None else f"{verdict.samples} {verdict.measured_on}"
    drop = None
    named = metric is not None and expect is not None and expect.metric == _last(metric)
    if named and verdict is not None and verdict.metric is not None and verdict.float_metric is not None:
        drop = verdict.float_metric - verdict.metric
    name = "" if expect is None else expect.metric
    sources = {
        "max_drop": where if named else f"--metric names no function {name}",
        "min_sqnr": where,
        "max_megabytes": "the parameters",
        "max_milliseconds": _NOT_PREDICTED if seconds is None else _PREDICTED,
    }
    return check_expectations(
        expect,
        sqnr=float("nan") if verdict is None else verdict.counted_db,
        drop=drop,
        size=figures.get("parameter_bytes"),
        seconds=seconds,
        sources=sources,
    )


def check_file(
    config: Any, subject: str, size: int | None, seconds: float | None, *, measured: bool
) -> Expectations:
    """Checks an exported file.

    Args:
        config: the config of the graph that it is from; None for none.
        subject: the file.
        size: its bytes; None if they are not known.
        seconds: the time of one run; None if it is not known.
        measured: whether the time was measured, rather than predicted.
    """
    known = "measured, the median" if measured else _PREDICTED
    elsewhere = "`qtrace calibrate` checks it"
    sources = {
        "max_drop": elsewhere,
        "min_sqnr": elsewhere,
        "max_megabytes": "the file",
        "max_milliseconds": _NOT_PREDICTED if seconds is None else known,
    }
    expect = None if config is None else config.expect
    return check_expectations(expect, size=size, seconds=seconds, sources=sources, subject=subject)


def note_checks(console: Console, *results: Expectations) -> dict[str, Any]:
    """Notes the tables of limits, and returns them for JSON; nothing where no config has a limit."""
    checked = [result for result in results if result.checks]
    for result in checked:
        console.note(result.table())
    return {"expect": [result.to_dict() for result in checked]} if checked else {}


def _last(name: str) -> str:
    """Returns the function's own name."""
    return name.rpartition(":")[2].rpartition(".")[2]


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
        options, out = self.options, self.options["out"]
        if diagnosis.verdict.word == "good" and diagnosis.verdict.passed:
            from qtrace.quantizing.targets import suffix_of

            stem = Path(options["model"].rpartition(":")[2]).stem
            name = f"{stem}-int8{suffix_of(backend)}"
            return shlex.join(["qtrace", "export", f"{out}/quantized.mge", "-o", name])
        if diagnosis.bad_data:
            return self._calibrate_on_other_data(diagnosis.causes[0].name, self.judged["evaluation"])
        if diagnosis.verdict.doubted:
            return self._calibrate_on_other_data("too-few-samples", None)
        if diagnosis.recipe():
            return self._calibrate(options["data"], f"{out}/{CURE}", options["max_batches"])
        words = ["qtrace", "sensitivity", options["model"], "--data", options["data"]]
        return shlex.join([*words, "--recipe", options["recipe"], *chosen_words()])

    def _calibrate_on_other_data(self, cause: str, data: str | None) -> str:
        """Returns the command for other data, or for more of the same after a limit."""
        options = self.options
        limit = -(-_ENOUGH_SAMPLES // options["batch_size"])
        if cause == "too-few-samples" and self.more_data:
            return self._calibrate(
                options["data"], options["recipe"], max(limit, 2 * (options["max_batches"] or 0))
            )
        return self._calibrate(data or "MORE_DATA", options["recipe"], limit)

    def _calibrate(self, data: str, recipe: str, max_batches: int | None) -> str:
        options = self.options
        words = ["qtrace", "calibrate", options["model"], "--data", data, "--recipe", recipe]
        words += ["--batch-size", str(options["batch_size"])] if options["batch_size"] != 8 else []
        words += [] if max_batches is None else ["--max-batches", str(max_batches)]
        words += ["--skip-bad"] if options["skip_bad"] else []
        words += chosen_words()
        words += ["--allow-code"] if options["allow_code"] else []
        words += [word for name in options["allow"] for word in ("--allow", name)]
        for name in ("evaluation", "metric"):
            value = self.judged[name]
            words += [] if value is None or value == data else [f"--{name}", value]
        at_least = self.judged["at_least"]
        words += [] if at_least is None else ["--at-least", f"{at_least:g}"]
        return shlex.join([*words, "--out", f"{options['out']}-cured"])


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
    from qtrace.quantizing.call_data import select_samples
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
