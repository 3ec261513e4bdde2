"""The search: which recipe is tried next, and on how much of the data.

The next trial depends on the seed and the finished trials only, never on a clock. So a search that was killed
goes on as if it had not been. Trials of the search begin on a quarter of the data. The better half of one
rung is judged again on the next one, which has twice the data, up to all of it. This is algorithm 2 of Li et
al. 2020, "A System for Massively Parallel Hyperparameter Tuning". Trials that are judged at the same time are
proposed from the same finished ones.

A recipe is plain data, as `QConfig.to_dict` gives it. Each change comes with its reason, by the key of the
recipe that it sets.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from qtrace.config import QConfig, backends
from qtrace.config.recipe import load_recipe
from qtrace.config.written import resolve_recipe
from qtrace.data.batches import ENOUGH_SAMPLES, HELD_EVERY
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError
from qtrace.extras.tune.judge import Here, Judge, Judged, RungData, Task
from qtrace.extras.tune.trials import CostLimits, Layer, Suggestion, Trial, TrialLog, digest_of, rank
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.prepare import plan
from qtrace.sensitivity.diagnosis import Diagnosis, diagnose
from qtrace.sensitivity.simulation import Simulation
from qtrace.workers import Pool

_ACTIVATION_OBSERVERS: tuple[Any, ...] = (
    "mse",
    "minmax",
    "kl",
    "cosine",
    "percentile",
)
_WEIGHT_OBSERVERS = ("minmax", "mse")
_PTQ: tuple[tuple[Any, ...], ...] = (
    ("fuse_bn",),
    ("fuse_bn", "equalize"),
    ("fuse_bn", "bias_correction"),
    ("fuse_bn", "equalize", "bias_correction"),
    ("fuse_bn", {"gptq": {"refit": True}}),
    ("fuse_bn", "equalize", {"gptq": {"refit": True}}),
    ("fuse_bn", "absorb", {"gptq": {"refit": True}}),
)
_PLACEMENTS = ("everything", "balanced", "fastest")
_PACKAGED = ("int8", "onnxruntime")
_SETTINGS_OF_PACKAGED = ("observers", "rules", "ptq", "placement")
_FLOAT_TAIL = {"match": {"position": "tail"}, "quantize": False, "optional": True}


def as_recipe(config: QConfig) -> dict[str, Any]:
    """Returns a config as plain data that is the same after a round trip through JSON."""
    data: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return data


def comments_of(recipe: str, *, allow_code: bool = False) -> dict[str, str]:
    """Returns the comments above the keys of a recipe and above its rules, which are ``rules[0]`` and so on.

    Args:
        recipe: the recipe's name or file.
        allow_code: as for `load_recipe`.
    """
    comments: dict[str, str] = {}
    rules = 0
    for entry in resolve_recipe(recipe, allow_code=allow_code).entries:
        key = entry.keys[0]
        if entry.keys == ("rules",):
            key, rules = f"rules[{rules}]", rules + 1
        if entry.comment and key not in comments:
            comments[key] = " ".join(entry.comment)
    return comments


def suggest_cures(recipe: dict[str, Any], diagnosis: Diagnosis) -> tuple[Suggestion, ...]:
    """Returns the recipe with all cures of a diagnosis, and with each one by itself if there are several."""
    pairs = [(c, cure) for c, cure in zip(diagnosis.causes, diagnosis.cures, strict=True) if cure is not None]
    pairs = [(cause, cure) for cause, cure in pairs if not cure.data]
    chosen = [pairs] if len(pairs) < 2 else [pairs, *([pair] for pair in pairs)]
    suggestions = []
    for group in filter(None, chosen):
        new, changes = copy.deepcopy(recipe), {}
        for cause, cure in group:
            reason = f"{cause.name} at {cause.site or 'the data'}: {cause.text}"
            if cure.ptq is not None:
                new["ptq"], changes["ptq"] = list(cure.ptq), reason
            for key, value in cure.settings.items():
                new[key] = {**new.get(key, {}), **value} if isinstance(value, dict) else value
                changes[key] = reason
            for rule in cure.rules:
                new["rules"] = [*new.get("rules", ()), rule]
                changes[f"rules[{len(new['rules']) - 1}]"] = reason
        suggestions.append(Suggestion(json.loads(json.dumps(new)), "diagnosis", changes, 0))
    return tuple(suggestions)


def suggest_float_tail(traced: TracedModule, recipe: dict[str, Any]) -> tuple[Suggestion, ...]:
    """Returns the recipe with everything after the last layers in float, if something there is rounded.

    Detectors turn their maps into boxes there: exp, means of distributions, strides next to offsets of a
    fraction. It is found by the structure of the graph, whatever the names of its parts.
    """
    new = {**recipe, "rules": [*recipe.get("rules", ()), _FLOAT_TAIL]}
    before, after = (plan(traced, QConfig.model_validate(r)).sites for r in (recipe, new))
    if len(after) >= len(before):
        return ()
    reason = (
        f"the decoding behind the last layers, {len(before) - len(after)} roundings: values of unlike sizes "
        "share a scale there, and it is little of the arithmetic"
    )
    return (
        Suggestion(json.loads(json.dumps(new)), "structure", {f"rules[{len(new['rules']) - 1}]": reason}, 0),
    )


def first_suggestions(first: Trial) -> Iterator[Suggestion]:
    """Yields what is tried before the search: cures, placements, and the packaged recipes.

    Args:
        first: the trial of the user's own recipe.
    """
    yield from first.suggestions
    config = QConfig.model_validate(first.recipe)
    if _has_times(config):
        for placement in _PLACEMENTS:
            if placement != config.effective_placement:
                reason = f"which ops run on integers: {placement} instead of {config.effective_placement}"
                recipe = {**first.recipe, "placement": placement}
                yield Suggestion(recipe, "placement", {"placement": reason}, 0)
    for name in _PACKAGED:
        recipe = _packaged(name, first.recipe)
        comments = comments_of(name)
        keys = [key for key in _SETTINGS_OF_PACKAGED if key in recipe and key != "rules"]
        keys += [f"rules[{index}]" for index in range(len(recipe.get("rules", ())))]
        why = {key: f"recipe {name}: {comments.get(key, 'as it is there')}" for key in keys}
        yield Suggestion(recipe, "packaged", why, None)


def _packaged(name: str, base: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a packaged recipe for the target and the images of ``base``."""
    packaged = as_recipe(load_recipe(name))
    own = {key: value for key, value in base.items() if key not in _SETTINGS_OF_PACKAGED}
    new = {key: packaged[key] for key in _SETTINGS_OF_PACKAGED if key in packaged}
    if not _has_times(QConfig.model_validate(own)):
        new.pop("placement", None)
    return {**own, **new, "name": name}


def _has_times(config: QConfig) -> bool:
    return bool(config.cost_table or backends.get(config.backend).cost_table)


def mutate(parent: Trial, layers: Sequence[Layer], rng: np.random.Generator, *, narrow: bool) -> Suggestion:
    """Returns the recipe of ``parent`` with one or two changes, drawn by ``rng``.

    Args:
        parent: the trial whose recipe is changed.
        layers: the layers whose bits may change.
        rng: the source of randomness.
        narrow: whether weights may get fewer bits, which pays only where the size is limited.
    """
    recipe = copy.deepcopy(parent.recipe)
    config = QConfig.model_validate(recipe)
    observers = {"activation": _ACTIVATION_OBSERVERS, "weight": _WEIGHT_OBSERVERS}
    moves: list[_Move] = [*(partial(_observe, *pair) for pair in observers.items()), _run_algorithms]
    moves += [_place] if _has_times(config) else []
    moves += [_Raise(layers, config, narrow)] * 3 if layers else []
    changes: dict[str, str] = {}
    for _ in range(1 + int(rng.random() < 0.3)):
        move = moves[int(rng.integers(len(moves)))]
        move(recipe, rng, changes)
    return Suggestion(recipe, "search", changes, parent.number)


_Move = Callable[[dict[str, Any], np.random.Generator, dict[str, str]], None]


def _draw(options: Sequence[Any], rng: np.random.Generator) -> Any:
    return copy.deepcopy(options[int(rng.integers(len(options)))])


def _observe(
    sort: str,
    options: Sequence[Any],
    recipe: dict[str, Any],
    rng: np.random.Generator,
    changes: dict[str, str],
) -> None:
    observers = dict(recipe.get("observers") or {})
    new, old = _draw(options, rng), observers.get(sort)
    if new == old:
        return
    recipe["observers"] = {**observers, sort: new}
    changes["observers"] = f"observer of {sort}s: {_show(new)} instead of {_show(old)}"


def _run_algorithms(recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> None:
    new, old = list(_draw(_PTQ, rng)), recipe.get("ptq")
    if new == old:
        return
    recipe["ptq"] = new
    changes["ptq"] = f"algorithms: {_show(new)} instead of {_show(old)}"


def _place(recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> None:
    new, old = _draw(_PLACEMENTS, rng), recipe.get("placement") or "everything"
    if new == old:
        return
    recipe["placement"] = new
    changes["placement"] = f"which ops run on integers: {new} instead of {old}"


class _Raise:
    """Changes the bits of a layer; layers whose own rounding gives much noise are drawn more often."""

    def __init__(self, layers: Sequence[Layer], config: QConfig, narrow: bool) -> None:
        limits = backends.get(config.backend).limits
        self.layers, self.narrow = layers, narrow
        # A table has times of 8 bits; what other widths take is not known.
        wide = () if _has_times(config) else limits["activation"].bits
        self.activation_bits, self.weight_bits = wide, limits["weight"].bits
        noise = np.array([layer.noise for layer in layers], np.float64)
        weights = np.sqrt(noise / max(float(noise.sum()), 1e-30)) + 0.1 / len(layers)
        self.chances = weights / weights.sum()

    def __call__(self, recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> None:
        """Adds, replaces or removes the rule of one layer."""
        layer = self.layers[int(rng.choice(len(self.layers), p=self.chances))]
        names, rules = list(layer.nodes), list(recipe.get("rules") or ())
        own = [i for i, rule in enumerate(rules) if rule["match"] == {"name": _single(names)}]
        new = _draw(self._options(layer, bool(own)), rng)
        if own and rules[own[0]] == new:
            return
        if new is None:
            del rules[own[0]]
            recipe["rules"] = rules
            changes["rules"] = f"{layer.name}: without a rule of its own"
            return
        new = {"match": {"name": _single(names)}, **new, "optional": True}
        if own:
            rules[own[0]] = new
        else:
            rules.append(new)
        recipe["rules"] = rules
        share = f"its rounding alone leaves {-10 * np.log10(max(layer.noise, 1e-30)):.1f} dB at the outputs"
        changes[f"rules[{own[0] if own else len(rules) - 1}]"] = f"{layer.name}: {share}"

    def _options(self, layer: Layer, has_rule: bool) -> list[dict[str, Any] | None]:
        options: list[dict[str, Any] | None] = [{"quantize": False}]
        options += [
            {"activation": {"bits": bits}} for bits in self.activation_bits if bits > layer.activation_bits
        ]
        own = layer.weight_bits
        if own < 32:
            options += [
                {"weight": {"bits": bits}}
                for bits in self.weight_bits
                if bits in (4, 6, 8) and (own < bits or (self.narrow and bits < own))
            ]
        return [*options, None] if has_rule else options


def _single(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _show(value: Any) -> str:
    if value is None:
        return "the default"
    return value if isinstance(value, str) else json.dumps(value)


_FRACTIONS = (0.25, 0.5, 1.0)
_TRIES = 100
_MOST_TOO_DEAR = 8  # recipes that are drawn for one trial


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
    step = min(HELD_EVERY, len(batches))
    held = tuple(batch for index, batch in enumerate(batches) if index % step == step - 1)
    calibration = tuple(batch for index, batch in enumerate(batches) if index % step != step - 1)
    parts = [
        RungData(calibration[: math.ceil(len(calibration) * part)], held[: math.ceil(len(held) * part)])
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
        place = min(int(rng.geometric(0.5)), len(parents)) - 1
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
        batches = [_shortened(batch) for batch in part.held_back[:1]]
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
        return {key: value[:ENOUGH_SAMPLES] for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(value[:ENOUGH_SAMPLES] for value in batch)
    return batch[:ENOUGH_SAMPLES]


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
