"""Searches for the best recipe of a network: observers, algorithms, placement and bits of layers.

The first trials are the user's recipe, what its diagnosis suggests, other placements, and the packaged
recipes. A search that changes the best ones follows. The folder of a search keeps every trial, so that a
killed search goes on and ends with the recipe that it would have found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.config import QConfig, backends
from qtrace.config.recipe import load_recipe
from qtrace.data.batches import check_batches
from qtrace.errors import ConfigError, QtraceError
from qtrace.extras.tune.judge import Here, Judge, Metric, RungData, Subject
from qtrace.extras.tune.pareto import certainty, choose
from qtrace.extras.tune.report import Tuning, recipe_text, render_page
from qtrace.extras.tune.search import TuneSettings, find_limits, judged_in_full, search, split
from qtrace.extras.tune.space import as_recipe
from qtrace.extras.tune.trials import BEST, PAGE, SUMMARY, TRIALS, Trial, TrialLog, search_folder, write_text
from qtrace.graph.types import TracedModule
from qtrace.plugins.options import check_arguments
from qtrace.preparation.identity import hash_tensors
from qtrace.workers import Pool, Processes, RayTasks

__all__ = ["tune"]


@check_arguments
def tune(
    traced: TracedModule,
    qconfig: QConfig | str | Path,
    batches: Iterable[Any],
    folder: str | Path,
    settings: TuneSettings | None = None,
    *,
    metric: Metric | None = None,
    evaluation: Callable[[], Iterable[Any]] | None = None,
    about: dict[str, Any] | None = None,
    reasons: Mapping[str, str] | None = None,
    force: bool = False,
    workers: int = 1,
    ray: str | None = None,
    allow: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
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
        about: all else that tells this search from another one, such as the names of model and data.
        reasons: key of ``qconfig``, or ``rules[2]`` -> why it has that value, for the best recipe's comments.
        force: whether to drop the trials of an earlier search in the folder.
        workers: how many trials are judged at the same time, in processes of their own from two on. The
            search depends on the number: trials at the same time do not know each other's results.
            ``metric`` has to be a function of a module then.
        ray: the address of a Ray cluster for the trials, "" for a local one; None for none.
        allow: the user's classes that the network may contain, for the other processes.
        note: called with a line for each trial and on resumption.

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
    _check_limits(settings, qconfig)
    check_batches(batches)
    parts = split(list(batches))
    limits = None if settings.limits is None else [settings.limits.milliseconds, settings.limits.bytes]
    subject = {
        **(about or {}),
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
        pool = _find_pool(judge, parts, allow, workers, ray)
        search(judge, parts, recipe, settings, log, lambda trial: note(_describe(trial, unit)), pool)
        tuning = _conclude(log.trials, len(parts) - 1, settings, unit, noise=metric is None)
        tuning = replace(tuning, reasons=reasons or {})
        if evaluation is not None and tuning.best is not None:
            tuning = _evaluate(tuning, Judge(traced), parts[-1], list(evaluation()))
        _write(path, tuning, note)
    return tuning


def _find_pool(
    judge: Judge, parts: Sequence[RungData], allow: Sequence[str], workers: int, ray: str | None
) -> Pool:
    """Returns who judges the trials."""
    if ray is not None:
        return RayTasks(Subject.of(judge, parts, allow, 1).job(), workers, ray)
    if workers == 1:
        return Here(judge, parts)
    return Processes(Subject.of(judge, parts, allow, workers).job(), workers)


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
