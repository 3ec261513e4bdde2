"""The config of a recipe for a target that the recipe leaves open.

A family by its name is joined with the target's own recipe: ``resnet+tflite``. So is a file that imports a
family: the target's recipe comes after what the file imports, and before what the user's files say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from qtrace.config import backends, recipe
from qtrace.config.checking import SYMMETRIC, check_precision, is_precision, lacks_zero_points
from qtrace.config.qconfig import QConfig
from qtrace.config.recipe import WHOLE, RecipeReader, Sources, config_of, is_own, load_recipe
from qtrace.config.tree import Tree, merge

__all__ = ["config_for_target", "place_of_target"]


def place_of_target(config: QConfig) -> str | None:
    """Returns where a config says its target; None if it leaves the target open.

    The default recipe is for onnxruntime where nobody says another target, so importing it leaves it open.
    """
    if "backend" not in config.model_fields_set:
        return None
    sources: Sources | None = config.sources
    tree = None if sources is None else sources.tree.find(("backend",))
    if sources is None or tree is None or tree.value != config.backend:
        return config.origin
    if is_own(tree):
        return tree.origin
    place = next((place for name, place in sources.named if _says_target(name)), None)
    return place if place is None or sources.name is None else config.origin


def _says_target(name: str) -> bool:
    """Returns whether a packaged recipe is for one target."""
    if name == recipe.DEFAULT_RECIPE or is_precision(name):
        return False
    return "backend" in load_recipe(name).model_fields_set


def config_for_target(config: QConfig, target: str) -> QConfig:
    """Returns a config that leaves its target open for a target.

    A config that was read from packaged recipes takes the target's own recipe, too; what the user's files and
    changes of the config say wins.

    Args:
        config: the config.
        target: the name of a backend.

    Raises:
        ConfigError: when the target lacks the precision of the recipe.
    """
    sources: Sources | None = config.sources
    if sources is None or not sources.named or target not in backends.packaged():
        return config.model_copy(update={"backend": target})
    base, _ = config_of(sources.tree, RecipeReader(), allow_code=True)
    if sources.name is not None:
        joined = load_recipe(f"{sources.name}+{target}")
    else:
        joined = _join(sources, target)
    changed = {name for name in QConfig.model_fields if getattr(config, name) != getattr(base, name)}
    changes = {name: getattr(config, name) for name in changed}
    count = len(base.rules)
    if "rules" in changes and config.rules[:count] == base.rules:
        changes["rules"] = (*joined.rules, *config.rules[count:])
    return joined.model_copy(update=changes) if changes else joined


def _join(sources: Sources, target: str) -> QConfig:
    """Merges a recipe of the user's with a target's."""
    reading, tree = RecipeReader(sources.files), sources.tree
    precisions = [name for name, _ in sources.named if is_precision(name)]
    check_precision(precisions, target)
    tree = _with_part(tree, reading.packaged(f"backend/{target}"), _is_own_or_precision)
    if any(lacks_zero_points(name, target) for name in precisions):
        tree = _with_part(tree, reading.packaged(SYMMETRIC), is_own)
    named = replace(tree, file=f"{sources.tree.file}+{target}", line=sources.tree.line, path="")
    config, tree = config_of(named, reading, allow_code=True)
    return config.with_sources(replace(sources, tree=tree, files=frozenset(reading.files)))


def _is_own_or_precision(tree: Tree) -> bool:
    """Returns whether a value is of the user's files or of a precision, which say more than a target."""
    return is_own(tree) or is_precision(Path(tree.file).stem)


def _with_part(tree: Tree, part: Tree | None, keeps: Callable[[Tree], bool]) -> Tree:
    """Merges a packaged recipe into one of the user's, before the values and rules that stay.

    Args:
        tree: the recipe of the user's with its imports.
        part: the packaged recipe; None for one that was imported already.
        keeps: whether a value or a rule of ``tree`` stays.
    """
    if part is None:
        return tree
    values = {key: child for key, child in part.value.items() if key not in ("name", "description")}
    merged = merge(tree, replace(part, value=values), WHOLE, keeps=keeps)
    known, new = (list(rules.value or ()) if rules else [] for rules in map(_rules, (tree, part)))
    kept = len(list(takewhile(keeps, reversed(known))))
    if known and new:
        first, last = known[: len(known) - kept], known[len(known) - kept :]
        merged.value["rules"] = replace(merged.value["rules"], value=[*first, *new, *last])
    return merged


def _rules(tree: Tree) -> Tree | None:
    return tree.find(("rules",))
