"""The search: which recipe is tried next, and on how much of the data.

The next trial depends on the seed and the finished trials only, never on a clock, so that a search that was
killed goes on as if it had not been. Trials of the search begin on a quarter of the data. The better half of
those on one rung is judged again on the next one, which has twice the data, up to all of it (Li et al. 2020,
"A System for Massively Parallel Hyperparameter Tuning", algorithm 2). Trials that are judged at the same time
are proposed from the same finished ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qtrace.config import QConfig
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError
from qtrace.extras.tune.judge import Here, Judge, Judged, RungData, Task
from qtrace.extras.tune.pareto import CostLimits, rank
from qtrace.extras.tune.space import first_suggestions, mutate, suggest_cures, suggest_float_tail
from qtrace.extras.tune.trials import Layer, Suggestion, Trial, TrialLog, digest_of
from qtrace.preparation.model import QuantizedModel
from qtrace.sensitivity.diagnosis import diagnose
from qtrace.sensitivity.simulation import Simulation
from qtrace.workers import Pool

__all__ = ["TuneSettings", "find_limits", "judged_in_full", "propose", "search", "split"]

_HELD_BACK = 4  # every fourth batch
_FRACTIONS = (0.25, 0.5, 1.0)
_ELITE = 3
_TRIES = 100
_MOST_TOO_DEAR = 8  # recipes that are drawn for one trial
_DIAGNOSED_SAMPLES = 8  # of a batch
_DIAGNOSED_BATCHES = 2


@dataclass(frozen=True)
class TuneSettings:
    """How a search is done.

    Attributes:
        trials: the number of trials, with the trials of an earlier run; None for any.
        seconds: the time for all trials, with the time of an earlier run; None for any.
        limits: the most that the result may cost; None for what the first trial costs.
        seed: the seed of all random choices.
    """

    trials: int | None = 30
    seconds: float | None = None
    limits: CostLimits | None = None
    seed: int = 0


def split(batches: Sequence[Any]) -> tuple[RungData, ...]:
    """Divides batches into those to calibrate on and those to judge on, for each rung.

    Every fourth batch is held back, so that both parts are spread evenly over the data. A rung's batches are
    the first ones of the next rung's.

    Raises:
        CalibrationError: when there are fewer than two batches.
    """
    if len(batches) < 2:
        raise CalibrationError(
            "a search holds batches back to judge on, but there is one batch only: give more data, or a "
            "smaller --batch-size."
        )
    step = min(_HELD_BACK, len(batches))
    held = tuple(batch for index, batch in enumerate(batches) if index % step == step - 1)
    kept = tuple(batch for index, batch in enumerate(batches) if index % step != step - 1)
    parts = [
        RungData(kept[: math.ceil(len(kept) * part)], held[: math.ceil(len(held) * part)])
        for part in _FRACTIONS
    ]
    sizes = [(len(part.calibration), len(part.held_back)) for part in parts]
    return tuple(part for index, part in enumerate(parts) if sizes[index] not in sizes[:index])


def find_limits(settings: TuneSettings, trials: Sequence[Trial]) -> CostLimits:
    """Returns the limits of a search: the given ones, else what the first trial costs."""
    if settings.limits is not None:
        return settings.limits
    return CostLimits(trials[0].milliseconds, trials[0].bytes) if trials else CostLimits()


def judged_in_full(trials: Sequence[Trial], limits: CostLimits, top: int) -> list[Trial]:
    """Returns the trials on all data whose recipe is within the limits, the best first."""
    return rank([t for t in trials if t.rung == top and not limits.exceeded_by(t.milliseconds, t.bytes)])


@dataclass(frozen=True)
class Proposal:
    """The next trial: a recipe and its rung."""

    suggestion: Suggestion
    rung: int


def propose(
    trials: Sequence[Trial],
    recipe: dict[str, Any],
    settings: TuneSettings,
    rungs: int,
    fits: Callable[[dict[str, Any]], bool] = lambda recipe: True,
    pending: Sequence[Proposal] = (),
) -> Proposal | None:
    """Returns the next trial; None if the search finds no recipe that is new.

    Args:
        trials: the finished trials.
        recipe: the user's recipe.
        settings: the settings of the search.
        rungs: the number of rungs.
        fits: whether a recipe is within the limits, as far as that is known without calibrating it.
        pending: the trials after the finished ones that are not judged yet.
    """
    top = rungs - 1
    if not trials:
        return Proposal(Suggestion(recipe, "recipe"), top)
    known = {trial.digest for trial in trials} | {digest_of(p.suggestion.recipe) for p in pending}
    for suggestion in first_suggestions(trials[0]):
        if digest_of(suggestion.recipe) not in known:
            return Proposal(suggestion, top)
    promoted = _promote(trials, top, pending)
    if promoted is not None:
        same = Suggestion(promoted.recipe, promoted.origin, promoted.changes, promoted.parent)
        return Proposal(same, promoted.rung + 1)
    limits = find_limits(settings, trials)
    within = judged_in_full(trials, limits, top)
    parents = within or rank(trials)
    if not parents:
        return None
    rung = 0 if within else top  # the first recipe within the limits is a result
    narrow = settings.limits is not None and settings.limits.bytes is not None
    rng = np.random.default_rng([settings.seed, len(trials) + len(pending)])
    too_dear = []
    for _ in range(_TRIES):
        place = min(int(rng.geometric(0.5)) - 1, _ELITE - 1, len(parents) - 1)
        suggestion = mutate(parents[place], trials[0].layers, rng, narrow=narrow)
        if digest_of(suggestion.recipe) in known:
            continue
        known.add(digest_of(suggestion.recipe))
        if fits(suggestion.recipe):
            return Proposal(suggestion, rung)
        too_dear.append(Proposal(suggestion, rung))
        if len(too_dear) == _MOST_TOO_DEAR:
            break
    return too_dear[0] if too_dear else None


def _promote(trials: Sequence[Trial], top: int, pending: Sequence[Proposal]) -> Trial | None:
    """Returns a trial of the better half of its rung that the next rung did not judge, the highest first."""
    for rung in reversed(range(top)):
        above = {trial.digest for trial in trials if trial.rung > rung}
        above |= {digest_of(p.suggestion.recipe) for p in pending if p.rung > rung}
        ranked = rank([trial for trial in trials if trial.rung == rung])
        for trial in ranked[: len(ranked) // 2]:
            if trial.digest not in above:
                return trial
    return None


@dataclass
class _Search:
    """One run of a search.

    Attributes:
        judge: judges recipes in this process.
        parts: the data of each rung.
        settings: the settings.
        log: the trials.
        finished: called with each new trial.
    """

    judge: Judge
    parts: tuple[RungData, ...]
    settings: TuneSettings
    log: TrialLog
    finished: Callable[[Trial], None]

    def run(self, recipe: dict[str, Any], pool: Pool) -> None:
        """Runs trials until the number or the time is spent, or nothing new is found."""
        if not self.log.trials:
            self._run_first(recipe)
        while not self._spent():
            started = time.monotonic()
            done = len(self.log.trials)
            proposals = self._propose(recipe, pool.count)
            if not proposals:
                return
            results = pool.run([self._task(proposal) for proposal in proposals])
            for number, (proposal, outcome) in enumerate(zip(proposals, results, strict=True), done):
                trial = _trial(number, proposal, outcome.get())
                now = time.monotonic()  # of trials at the same time, each counts what it adds
                self._keep(replace(trial, seconds=now - started))
                started = now

    def _run_first(self, recipe: dict[str, Any]) -> None:
        """Judges and diagnoses the user's recipe, whatever it costs; its faults are raised."""
        started = time.monotonic()
        top = len(self.parts) - 1
        proposal = Proposal(Suggestion(recipe, "recipe"), top)
        judged = self.judge.judge(QConfig.model_validate(recipe), self.parts[top])
        trial = _trial(0, proposal, judged)
        if judged.model is not None:
            trial = self._diagnose(trial, judged, self.parts[top])
        self._keep(replace(trial, seconds=time.monotonic() - started))

    def _propose(self, recipe: dict[str, Any], count: int) -> list[Proposal]:
        """Returns the trials that are judged at the same time, without those that were judged before.

        They come from the trials before all of them, so that a search that was killed among them proposes the
        same again.
        """
        done = len(self.log.trials)
        before = self.log.trials[: 1 + (done - 1) // count * count]
        end = len(before) + count
        if self.settings.trials is not None:
            end = min(end, self.settings.trials)
        proposals: list[Proposal] = []
        while len(before) + len(proposals) < end:
            new = propose(before, recipe, self.settings, len(self.parts), self._fits, proposals)
            if new is None:
                break
            proposals.append(new)
        return proposals[done - len(before) :]

    def _keep(self, trial: Trial) -> None:
        self.log.append(trial)
        self.finished(trial)

    def _fits(self, recipe: dict[str, Any]) -> bool:
        """Whether a recipe is within the limits; a wrong one is, so that its trial tells what is wrong."""
        try:
            cost = self.judge.cost(QConfig.model_validate(recipe), self.parts[0])
        except (ConfigError, GraphError, CalibrationError):
            return True
        return not find_limits(self.settings, self.log.trials).exceeded_by(*cost)

    def _spent(self) -> bool:
        count, seconds = self.settings.trials, self.settings.seconds
        done = self.log.trials
        if count is not None and len(done) >= count:
            return True
        return seconds is not None and sum(trial.seconds for trial in done) >= seconds

    def _task(self, proposal: Proposal) -> Task:
        # Limits that the user did not give come from the choice: the first recipes show what more time or
        # size would bring.
        strict = self.settings.limits is not None or proposal.suggestion.origin == "search"
        limits = find_limits(self.settings, self.log.trials) if strict else None
        return Task(proposal.suggestion.recipe, proposal.rung, limits)

    def _diagnose(self, trial: Trial, judged: Judged, part: RungData) -> Trial:
        """Adds the cures of the first trial's graph, and its layers with their noise."""
        batches = [_shortened(batch) for batch in part.held_back[:_DIAGNOSED_BATCHES]]
        try:
            diagnosis = diagnose(judged.model, batches, twin=judged.twin, progress=False)
            simulation = Simulation(QuantizedModel(judged.model, "prepared"), batches, twin=judged.twin)
        except QtraceError:  # outputs that cannot be compared: the search goes without
            return trial
        layers = tuple(
            Layer(
                layer.name,
                layer.nodes,
                layer.weight_bits,
                layer.activation_bits,
                min(simulation.noise(layer), 1e30),
            )
            for layer in simulation.layers
        )
        tail = suggest_float_tail(self.judge.traced, trial.recipe)
        return replace(trial, layers=layers, suggestions=(*suggest_cures(trial.recipe, diagnosis), *tail))


def _trial(number: int, proposal: Proposal, judged: Judged) -> Trial:
    suggestion = proposal.suggestion
    return Trial(
        number,
        suggestion.recipe,
        suggestion.origin,
        suggestion.changes,
        suggestion.parent,
        digest_of(suggestion.recipe),
        proposal.rung,
        judged.value,
        judged.samples,
        judged.milliseconds,
        judged.bytes,
        problem=judged.problem,
    )


def _shortened(batch: Any) -> Any:
    """Returns the first samples of a batch."""
    if isinstance(batch, dict):
        return {key: value[:_DIAGNOSED_SAMPLES] for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(value[:_DIAGNOSED_SAMPLES] for value in batch)
    return batch[:_DIAGNOSED_SAMPLES]


def search(
    judge: Judge,
    parts: tuple[RungData, ...],
    recipe: dict[str, Any],
    settings: TuneSettings,
    log: TrialLog,
    finished: Callable[[Trial], None] = lambda trial: None,
    pool: Pool | None = None,
) -> None:
    """Runs trials until the number or the time of ``settings`` is spent.

    Args:
        judge: judges recipes.
        parts: the data of each rung, see `split`.
        recipe: the user's recipe, the first trial.
        settings: the settings.
        log: the finished trials, to which new ones are appended.
        finished: called with each new trial.
        pool: judges all trials but the first; None for ``judge``.

    Raises:
        QtraceError: when the user's recipe or data do not fit the network.
    """
    with pool or Here(judge, parts) as entered:
        _Search(judge, parts, settings, log, finished).run(recipe, entered)
