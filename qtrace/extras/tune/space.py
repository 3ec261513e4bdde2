"""The recipes that a search may try: those to begin with, and the changes of one that it makes.

A recipe is plain data, as `QConfig.to_dict` gives it. Each change comes with its reason, by the key of the
recipe that it sets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from qtrace.config import QConfig, backends
from qtrace.config.recipe import load_recipe
from qtrace.config.written import resolve_recipe
from qtrace.extras.tune.trials import Layer, Suggestion, Trial
from qtrace.graph.types import TracedModule
from qtrace.preparation.prepare import plan
from qtrace.sensitivity.diagnosis import Diagnosis

__all__ = ["as_recipe", "comments_of", "first_suggestions", "mutate", "suggest_cures", "suggest_float_tail"]

_ACTIVATION_OBSERVERS: tuple[Any, ...] = (
    "mse",
    "minmax",
    "kl",
    "cosine",
    {"percentile": {"percentile": 99.9}},
    {"percentile": {"percentile": 99.99}},
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
_TRIES = 2  # of one sort of change, if its first outcome changes nothing


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
    kept = {key: value for key, value in base.items() if key not in _SETTINGS_OF_PACKAGED}
    new = {key: packaged[key] for key in _SETTINGS_OF_PACKAGED if key in packaged}
    if not _has_times(QConfig.model_validate(kept)):
        new.pop("placement", None)
    return {**kept, **new, "name": name}


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
    moves: list[_Move] = [_observe_activations, _observe_weights, _run_algorithms]
    moves += [_place] if _has_times(config) else []
    moves += [_Raise(layers, config, narrow)] * 3 if layers else []
    changes: dict[str, str] = {}
    for _ in range(1 + int(rng.random() < 0.3)):
        move = moves[int(rng.integers(len(moves)))]
        for _ in range(_TRIES):
            if move(recipe, rng, changes):
                break
    return Suggestion(recipe, "search", changes, parent.number)


_Move = Callable[[dict[str, Any], np.random.Generator, dict[str, str]], bool]


def _draw(options: Sequence[Any], rng: np.random.Generator) -> Any:
    return copy.deepcopy(options[int(rng.integers(len(options)))])


def _observe(
    recipe: dict[str, Any],
    sort: str,
    options: Sequence[Any],
    changes: dict[str, str],
    rng: np.random.Generator,
) -> bool:
    observers = dict(recipe.get("observers") or {})
    new, old = _draw(options, rng), observers.get(sort)
    if new == old:
        return False
    recipe["observers"] = {**observers, sort: new}
    changes["observers"] = f"observer of {sort}s: {_show(new)} instead of {_show(old)}"
    return True


def _observe_activations(recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> bool:
    return _observe(recipe, "activation", _ACTIVATION_OBSERVERS, changes, rng)


def _observe_weights(recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> bool:
    return _observe(recipe, "weight", _WEIGHT_OBSERVERS, changes, rng)


def _run_algorithms(recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> bool:
    new, old = list(_draw(_PTQ, rng)), recipe.get("ptq")
    if new == old:
        return False
    recipe["ptq"] = new
    changes["ptq"] = f"algorithms: {_show(new)} instead of {_show(old)}"
    return True


def _place(recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> bool:
    new, old = _draw(_PLACEMENTS, rng), recipe.get("placement") or "everything"
    if new == old:
        return False
    recipe["placement"] = new
    changes["placement"] = f"which ops run on integers: {new} instead of {old}"
    return True


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

    def __call__(self, recipe: dict[str, Any], rng: np.random.Generator, changes: dict[str, str]) -> bool:
        """Adds, replaces or removes the rule of one layer."""
        layer = self.layers[int(rng.choice(len(self.layers), p=self.chances))]
        names, rules = list(layer.nodes), list(recipe.get("rules") or ())
        own = [i for i, rule in enumerate(rules) if rule["match"] == {"name": _single(names)}]
        new = _draw(self._options(layer, bool(own)), rng)
        if own and rules[own[0]] == new:
            return False
        if new is None:
            del rules[own[0]]
            recipe["rules"] = rules
            changes["rules"] = f"{layer.name}: without a rule of its own"
            return True
        new = {"match": {"name": _single(names)}, **new, "optional": True}
        if own:
            rules[own[0]] = new
        else:
            rules.append(new)
        recipe["rules"] = rules
        share = f"its rounding alone leaves {-10 * np.log10(max(layer.noise, 1e-30)):.1f} dB at the outputs"
        changes[f"rules[{own[0] if own else len(rules) - 1}]"] = f"{layer.name}: {share}"
        return True

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
