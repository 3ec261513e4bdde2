"""Searches for the best recipe of a network: observers, algorithms, placement and bits of layers.

The first trials are the user's recipe, what its diagnosis suggests, other placements, and the packaged
recipes. A search that changes the best ones follows. The folder of a search keeps every trial, so that a
killed search goes on and ends with the recipe that it would have found.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qtrace.config import QConfig, backends
from qtrace.config.recipe import SCHEMA, load_recipe
from qtrace.config.tree import dump
from qtrace.data.batches import check_batches
from qtrace.display import Displayed, format_table, megabytes
from qtrace.errors import ConfigError, QtraceError, install
from qtrace.extras.tune.judge import Here, Judge, Metric, RungData, Subject
from qtrace.extras.tune.search import TuneSettings, as_recipe, find_limits, judged_in_full, search, split
from qtrace.extras.tune.trials import (
    BEST,
    PAGE,
    SUMMARY,
    TRIALS,
    Certainty,
    CostLimits,
    Trial,
    TrialLog,
    certainty,
    choose,
    pareto,
    search_folder,
    write_text,
)
from qtrace.graph.types import TracedModule
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import hash_tensors
from qtrace.workers import Pool, Processes, RayTasks

_BEGUN = "as in the recipe that it began with"
_LEFT_OUT = ("name", "description")


@dataclass(frozen=True, repr=False)
class Tuning(Displayed):
    """The result of a search.

    Attributes:
        trials: all trials.
        top: the rung with all data.
        limits: the limits of the best recipe.
        unit: the unit of the metric, ``dB`` for the SQNR, or the name of the user's metric.
        best: the best trial within the limits; None if there is none.
        runner_up: the second best, None if there is none.
        certainty: how sure it is that ``best`` is better than ``runner_up``; None where it is not known.
        evaluation: best, second, first -> SQNR in dB of that recipe on the data of --evaluation.
        reasons: key of the first recipe, or ``rules[2]`` -> why it has that value, as far as that is known.
    """

    trials: tuple[Trial, ...]
    top: int
    limits: CostLimits
    unit: str
    best: Trial | None
    runner_up: Trial | None = None
    certainty: Certainty | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def front(self) -> list[Trial]:
        """The trials on all data that no other one beats."""
        return pareto([trial for trial in self.trials if trial.rung == self.top])

    def table(self, max_width: int | None = None) -> str:
        """Returns the Pareto front as a table, and what was chosen."""
        headers = ("trial", "from", f"metric, {self.unit}", "ms", "MB", "")
        rows = []
        for trial in self.front:
            chosen = "best" if self.best is not None and trial.digest == self.best.digest else ""
            rows.append((trial.number, trial.origin, f"{trial.value:.4g}", *_costs(trial), chosen))
        return f"{format_table(headers, rows, max_width)}\n\n" + "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Returns the choice in words."""
        if self.best is None:
            return [f"no recipe of {len(self.trials)} trials is within the limits ({self._limits()})."]
        first = self.trials[0]
        lines = [
            f"best: trial {self.best.number} of {len(self.trials)} ({self.best.origin}), "
            f"{self.best.value:.4g} {self.unit}; the first recipe: {_value(first)} {self.unit}; "
            f"limits: {self._limits()}"
        ]
        sure = self.certainty
        if self.best.digest == first.digest and len(self.trials) > 1:
            lines.append("the first recipe stays: no other one within the limits is surely better")
        if self.runner_up is not None and sure is not None:
            word = "sure" if sure.low > 0 else "not sure"
            lines.append(
                f"{word}: {sure.difference:+.3g} {self.unit} against trial {self.runner_up.number}, 95 % "
                f"interval {sure.low:+.3g} to {sure.high:+.3g}, better in {sure.probability:.0%} of the draws"
            )
        elif self.runner_up is not None:
            lines.append("how sure the choice is is not known: the metric gives one number for all samples")
        lines += [f"on --evaluation, {name}: {value:.4g} dB" for name, value in self.evaluation.items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        return {
            "trials": len(self.trials),
            "judged": sum(trial.value is not None for trial in self.trials),
            "unit": self.unit,
            "limits": asdict(self.limits),
            "best": _summary(self.best),
            "runner_up": _summary(self.runner_up),
            "first": _summary(self.trials[0]),
            "certainty": None if self.certainty is None else asdict(self.certainty),
            "pareto": [_summary(trial) for trial in self.front],
            "evaluation": self.evaluation,
        }

    def _limits(self) -> str:
        time, size = self.limits.milliseconds, self.limits.bytes
        parts = [] if time is None else [f"{time:.4g} ms"]
        parts += [] if size is None else [f"{megabytes(size):.3g} MB"]
        return " and ".join(parts) or "none"


def _value(trial: Trial) -> str:
    return "not judged" if trial.value is None else f"{trial.value:.4g}"


def _costs(trial: Trial) -> tuple[str, str]:
    time = "" if trial.milliseconds is None else f"{trial.milliseconds:.4g}"
    return time, f"{megabytes(trial.bytes):.3g}"


def _summary(trial: Trial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    keys = ("number", "origin", "digest", "value", "milliseconds", "bytes")
    return {key: getattr(trial, key) for key in keys}


def recipe_text(tuning: Tuning) -> str:
    """Returns the best recipe as a file, with the reason above each line.

    Raises:
        QtraceError: when no recipe is within the limits.
    """
    best = tuning.best
    if best is None:
        raise QtraceError("no recipe is within the limits.")
    reasons = _Reasons(tuning)
    cost = "".join(f", {text} {unit}" for text, unit in zip(_costs(best), ("ms", "MB"), strict=True) if text)
    lines = [
        f"# qtrace tune: trial {best.number} of {len(tuning.trials)}, {best.value:.4g} {tuning.unit}{cost}."
    ]
    lines.append(f"schema: {SCHEMA}")
    for key, value in best.recipe.items():
        if key in _LEFT_OUT or (key == "rules" and not value):
            continue
        if key != "rules":
            text = dump([value], flow=True).strip()[1:-1]
            lines += ["", f"# {reasons.of_key(key)}", f"{key}: {text}"]
            continue
        lines += ["", "rules:"]
        for rule in value:
            lines += [f"  # {reasons.of_rule(rule)}", f"  - {dump(rule, flow=True).strip()}"]
    return "\n".join(lines) + "\n"


class _Reasons:
    """Finds the trial that brought a line of the best recipe."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.line: list[Trial] = []  # from the best recipe to the first one of its line
        number = None if tuning.best is None else tuning.best.number
        while number is not None:
            self.line.append(tuning.trials[number])
            number = self.line[-1].parent
        self.full = {t.digest: t.value for t in tuning.trials if t.rung == tuning.top}

    def of_key(self, key: str) -> str:
        """Returns the reason for the value of ``key``."""
        trial = next((trial for trial in self.line if key in trial.changes), None)
        return self._begun(key) if trial is None else self._because(trial, trial.changes[key])

    def of_rule(self, rule: Any) -> str:
        """Returns the reason for a rule."""
        having = [trial for trial in self.line if rule in trial.recipe.get("rules", ())]
        first = having[-1]
        place = f"rules[{first.recipe['rules'].index(rule)}]"
        return self._because(first, first.changes[place]) if place in first.changes else self._begun(place)

    def _begun(self, key: str) -> str:
        return " ".join(self.tuning.reasons.get(key, "").split()) or _BEGUN

    def _because(self, trial: Trial, text: str) -> str:
        before = None if trial.parent is None else self.tuning.trials[trial.parent]
        old, new = (None if t is None else self.full.get(t.digest) for t in (before, trial))
        gain = "" if old is None or new is None else f"; {old:.4g} -> {new:.4g} {self.tuning.unit}"
        return f"trial {trial.number}, {' '.join(text.split())}{gain}"


def render_page(tuning: Tuning) -> str:
    """Returns a page with the Pareto picture and the table, which needs no other file.

    Raises:
        QtraceError: when the extra ``report`` is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise QtraceError(
            f"the page needs {error.name}, which is not installed: {install('report')}."
        ) from error
    judged = [t for t in tuning.trials if t.rung == tuning.top and t.value is not None]
    timed = all(trial.milliseconds is not None for trial in judged)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qtrace", "font.size": 9}):
        figure = Figure((8.0, 4.6), layout="constrained")
        axes = figure.subplots()
        _draw(axes, judged, tuning.front, tuning.best, timed)
        axes.set_xlabel("predicted time, ms" if timed else "size of the parameters, MB")
        axes.set_ylabel(f"metric, {tuning.unit}")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
    table = html.escape(tuning.table())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>qtrace tune</title></head>\n'
        f"<body>\n<h1>Recipes tried</h1>\n{svg}\n<pre>{table}</pre>\n</body></html>\n"
    )


def _draw(
    axes: Any, judged: Sequence[Trial], front: Sequence[Trial], best: Trial | None, timed: bool
) -> None:
    def points(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
        costs = [t.milliseconds or 0.0 if timed else megabytes(t.bytes) for t in trials]
        return costs, [t.value or 0.0 for t in trials]

    axes.plot(*points(judged), "o", color="#56a3d9", label="judged on all data")
    axes.plot(*points(front), "o-", color="#1b3a5c", label="no other one beats these")
    if best is not None:
        axes.plot(*points([best]), "*", color="#e69f00", markersize=16, label=f"best: trial {best.number}")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False)


@dataclass(frozen=True)
class TuneOptions:
    """The options of ``qtrace.tune`` that few calls need, which are given by name.

    Attributes:
        about: all else that tells this search from another one, such as the names of model and data.
        reasons: key of ``qconfig``, or ``rules[2]`` -> why it has that value, for the best recipe's comments.
        workers: how many trials are judged at the same time, in processes of their own from two on. The
            search depends on the number: trials at the same time do not know each other's results.
            ``metric`` has to be a function of a module then.
        ray: the address of a Ray cluster for the trials, "" for a local one; None for none.
        allow: the user's classes that the network may contain, for the other processes.
        note: called with a line for each trial and on resumption.
    """

    about: Mapping[str, Any] | None = None
    reasons: Mapping[str, str] | None = None
    workers: int = 1
    ray: str | None = None
    allow: Sequence[str] = ()
    note: Callable[[str], None] = lambda text: None

    def pool(self, judge: Judge, parts: Sequence[RungData]) -> Pool:
        """Returns who judges the trials."""
        if self.ray is not None:
            return RayTasks(Subject.of(judge, parts, self.allow, 1).job(), self.workers, self.ray)
        if self.workers == 1:
            return Here(judge, parts)
        return Processes(Subject.of(judge, parts, self.allow, self.workers).job(), self.workers)


@check_arguments(options=TuneOptions)
def tune(
    traced: TracedModule,
    qconfig: QConfig | str | Path,
    batches: Iterable[Any],
    folder: str | Path,
    settings: TuneSettings | None = None,
    *,
    metric: Metric | None = None,
    evaluation: Callable[[], Iterable[Any]] | None = None,
    force: bool = False,
    **options: Any,
) -> Tuning:
    """Searches for the best recipe, and writes it with every trial into a folder.

    If the folder holds trials of the same search, the search goes on after them.

    Args:
        traced: the network as traced.
        qconfig: the recipe to begin with, or its name or file.
        batches: at least two batches; every fourth one is held back to judge on.
        folder: the output folder: ``trials.jsonl``, ``best.yaml``, ``tune.json``, and ``tune.html`` if the
            extra ``report`` is installed.
        settings: number of trials or time, limits, seed.
        metric: gets a calibrated graph, and returns a number or one for each sample; more is better. None for
            the SQNR of the worst column group of the outputs against the float network.
        evaluation: called once at the end for batches that the search does not see, for the report.
        force: whether to drop the trials of an earlier search in the folder.
        **options: more options, the fields of `TuneOptions`.

    Returns:
        The result.

    Raises:
        CalibrationError: for data that do not fit the network, or fewer than two batches.
        ConfigError: for a recipe that does not fit the network, a limit on time without measured times of the
            backend, or a metric that returns no number.
        QtraceError: when the folder is in use, or belongs to another search.
    """
    if not isinstance(traced, TracedModule):
        raise ConfigError(f"tune takes a traced module, not {type(traced).__name__}.")
    qconfig = qconfig if isinstance(qconfig, QConfig) else load_recipe(qconfig)
    settings, recipe, path = settings or TuneSettings(), as_recipe(qconfig), Path(folder)
    more = TuneOptions(**options)
    note = more.note
    _check_limits(settings, qconfig)
    check_batches(batches)
    parts = split(list(batches))
    limits = None if settings.limits is None else [settings.limits.milliseconds, settings.limits.bytes]
    subject = {
        **(more.about or {}),
        "network": hash_tensors("", traced.named_tensors())[:16],
        "recipe": recipe,
        "seed": settings.seed,
        "limits": limits,
    }
    with search_folder(path, subject, force=force, note=note):
        log = TrialLog(path / TRIALS, note)
        if log.trials:
            note(f"going on after {len(log.trials)} trials in {path}")
        judge = Judge(traced, metric)
        unit = "dB" if metric is None else getattr(metric, "__name__", "metric")
        pool = more.pool(judge, parts)
        search(judge, parts, recipe, settings, log, lambda trial: note(_describe(trial, unit)), pool)
        tuning = _conclude(log.trials, len(parts) - 1, settings, unit, noise=metric is None)
        tuning = replace(tuning, reasons=more.reasons or {})
        if evaluation is not None and tuning.best is not None:
            tuning = _evaluate(tuning, Judge(traced), parts[-1], list(evaluation()))
        _write(path, tuning, note)
    return tuning


def _check_limits(settings: TuneSettings, qconfig: QConfig) -> None:
    """Refuses a limit on a time that nothing predicts."""
    if settings.limits is None or settings.limits.milliseconds is None:
        return
    if not (qconfig.cost_table or backends.get(qconfig.backend).cost_table):
        raise ConfigError(
            f"backend {qconfig.backend} lacks measured times, so time cannot be limited: limit the size, or "
            "name a cost_table in the recipe."
        )


def _describe(trial: Trial, unit: str) -> str:
    what = "; ".join(trial.changes.values())
    if trial.origin in ("packaged", "recipe"):
        what = trial.recipe.get("name") or "as given"
    if trial.value is None:
        return f"trial {trial.number}, {trial.origin}: {what}: left out: {trial.problem}"
    time = "" if trial.milliseconds is None else f", {trial.milliseconds:.4g} ms"
    return f"trial {trial.number}, {trial.origin}: {what}: {trial.value:.4g} {unit}{time}"


def _conclude(trials: list[Trial], top: int, settings: TuneSettings, unit: str, *, noise: bool) -> Tuning:
    """Chooses the best trial and says how sure that is."""
    limits = find_limits(settings, trials)
    ranked = judged_in_full(trials, limits, top)
    best = choose(ranked, trials[0], noise=noise, seed=settings.seed) if ranked else None
    others = [t for t in ranked if t is not best]
    # A recipe that gives the very same numbers is no other choice.
    others = [t for t in others if best is not None and t.samples != best.samples] or others
    second = others[0] if others else None
    sure = None
    if best is not None and second is not None:
        sure = certainty(best, second, noise=noise, seed=settings.seed)
    return Tuning(tuple(trials), top, limits, unit, best, second, sure)


def _evaluate(tuning: Tuning, judge: Judge, part: Any, batches: list[Any]) -> Tuning:
    """Measures the best, the second and the first recipe on data that the search never saw."""
    values: dict[str, float] = {}
    chosen = {"best": tuning.best, "second": tuning.runner_up, "first": tuning.trials[0]}
    for name, trial in chosen.items():
        if trial is not None:
            judged = judge.judge(QConfig.model_validate(trial.recipe), part)
            assert judged.model is not None
            values[name] = judge.measure(judged.model, batches)[0]
    return replace(tuning, evaluation=values)


def _write(folder: Path, tuning: Tuning, note: Callable[[str], None]) -> None:
    """Writes the files of a result."""
    if tuning.best is not None:
        write_text(folder / BEST, recipe_text(tuning))
    else:
        (folder / BEST).unlink(missing_ok=True)  # of an earlier run with fewer trials
    write_text(folder / SUMMARY, json.dumps(tuning.to_dict(), indent=2, allow_nan=False) + "\n")
    try:
        page = render_page(tuning)
    except QtraceError as error:
        note(f"there is no picture: {error}")
        return
    write_text(folder / PAGE, page)
