"""A merged recipe as it was written, and its config for a target that it leaves open.

A family by its name is joined with the target's own recipe: ``resnet+tflite``. So is a file that imports a
family: the target's recipe comes after what the file imports, and before what the user's files say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from qtrace.config import backends, recipe
from qtrace.config.checking import SYMMETRIC, check_precision, is_precision, lacks_zero_points
from qtrace.config.qconfig import QConfig
from qtrace.config.recipe import (
    SCHEMA,
    WHOLE,
    RecipeReader,
    Sources,
    config_of,
    is_own,
    load_recipe,
    read_recipe,
)
from qtrace.config.tree import Tree, dump, merge
from qtrace.plugins.options import Loc, known_keys

# The config of a recipe for a target that the recipe leaves open.


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
    count = len(list(takewhile(keeps, reversed(known))))
    if known and new:
        first, last = known[: len(known) - count], known[len(known) - count :]
        merged.value["rules"] = replace(merged.value["rules"], value=[*first, *new, *last])
    return merged


def _rules(tree: Tree) -> Tree | None:
    return tree.find(("rules",))


# A merged recipe as it was written: each value and rule with its file, its line and the comment above it.


@dataclass(frozen=True)
class Entry:
    """One value of a recipe, or one rule.

    Attributes:
        keys: where it belongs, such as ``("qat", "lr")``; ``("rules",)`` for each rule.
        value: plain data.
        origin: ``FILE:LINE``.
        comment: the lines of the comment right above, without their signs.
    """

    keys: tuple[str, ...]
    value: Any
    origin: str
    comment: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "key": ".".join(self.keys),
            "value": self.value,
            "origin": self.origin,
            "comment": " ".join(self.comment),
        }


@dataclass(frozen=True)
class Resolved:
    """A recipe with its imports merged.

    Attributes:
        config: the config.
        file: the recipe's file, as messages name it.
        entries: every value and rule with its place and its comment.
    """

    config: QConfig
    file: str
    entries: tuple[Entry, ...]

    def text(self) -> str:
        """Writes a recipe file of the config, with the reason and the place of each value as comments."""
        return render(self.entries, SCHEMA)


def resolve_recipe(name_or_path: str | Path, *, allow_code: bool = False) -> Resolved:
    """Reads a recipe as `load_recipe` does, and keeps the place of every value.

    Args:
        name_or_path: the recipe, see `load_recipe`.
        allow_code: whether it may name code, see `load_recipe`.

    Raises:
        ConfigError: with one line for each mistake, ``FILE:LINE: ...``.
    """
    config, tree, texts = read_recipe(name_or_path, allow_code)
    return Resolved(config, tree.file, entries(tree, WHOLE, texts))


def entries(tree: Tree, whole: frozenset[Loc], texts: Mapping[str, str]) -> tuple[Entry, ...]:
    """The values of a recipe in the order of the config's fields.

    Args:
        tree: the recipe with its imports merged.
        whole: locations of mappings that are one value, such as a plugin with its options.
        texts: file -> what it holds, for the comments.
    """
    lines = {file: text.split("\n") for file, text in texts.items()}
    order = {key: index for index, key in enumerate(known_keys(QConfig))}
    keys = sorted(tree.value, key=lambda key: order.get(key, len(order)))
    return tuple(entry for key in keys for entry in _entries(tree.value[key], (key,), whole, lines))


def _entries(
    tree: Tree, keys: tuple[str, ...], whole: frozenset[Loc], lines: Mapping[str, Sequence[str]]
) -> Iterator[Entry]:
    if keys == ("rules",):
        for rule in tree.value or ():
            yield Entry(keys, rule.plain(), rule.origin, _comment(rule, lines))
    elif isinstance(tree.value, dict) and tree.value and keys not in whole:
        above = _comment(tree, lines)
        for key, child in tree.value.items():
            for entry in _entries(child, (*keys, key), whole, lines):
                # The comment above a mapping goes to the first of the values that were written in it.
                own = above if child.file == tree.file else ()
                above = above if child.file != tree.file else ()
                comment = (*own, *entry.comment) if own != entry.comment else own
                yield replace(entry, comment=comment)
    else:
        yield Entry(keys, tree.plain(), tree.origin, _comment(tree, lines))


def _comment(tree: Tree, lines: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The comment right above the line where ``tree`` was written."""
    comment: list[str] = []
    for line in reversed(lines.get(tree.file, ())[: tree.line - 1]):
        text = line.strip()
        if not text.startswith("#"):
            break
        comment.insert(0, text[1:].strip())
    return tuple(comment)


def render(values: Sequence[Entry], schema: str) -> str:
    """A recipe file that says the same, with the comments, and the origin of every value as one.

    Args:
        values: as `entries` gives them.
        schema: what the file begins with.
    """
    lines = [f"schema: {schema}"]
    if ("backend",) not in [entry.keys for entry in values]:
        lines.append(f"# backend: {QConfig().backend}  # the default")
    opened: tuple[str, ...] = ()
    for entry in _once(values):
        parents = entry.keys if entry.keys == ("rules",) else entry.keys[:-1]
        if not parents or entry.comment:
            lines.append("")
        common = _common(opened, parents)
        if len(parents) > common == 0 and lines[-1]:
            lines.append("")
        for depth in range(common, len(parents)):
            lines.append(f"{'  ' * depth}{_flow(parents[depth])}:")
        opened = parents
        lines += _rule(entry) if entry.keys == ("rules",) else _value(entry, len(parents))
    return "\n".join(lines) + "\n"


def _once(values: Sequence[Entry]) -> Iterator[Entry]:
    """The entries; of those on one line of a file only the first keeps the comment above it."""
    last: Entry | None = None
    for entry in values:
        again = last is not None and (last.origin, last.comment) == (entry.origin, entry.comment)
        yield replace(entry, comment=()) if again else entry
        last = entry


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """How many keys two paths begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _value(entry: Entry, depth: int) -> list[str]:
    indent = "  " * depth
    return [
        *(f"{indent}# {line}".rstrip() for line in entry.comment),
        f"{indent}{_flow(entry.keys[-1])}: {_flow(entry.value)}  # {_one_line(entry.origin)}",
    ]


def _rule(entry: Entry) -> list[str]:
    items = [f"{_flow(key)}: {_flow(value)}" for key, value in entry.value.items()]
    return [
        *(f"  # {line}".rstrip() for line in entry.comment),
        f"  # {_one_line(entry.origin)}",
        *(f"  {'- ' if index == 0 else '  '}{item}" for index, item in enumerate(items)),
    ]


def _flow(value: Any) -> str:
    """A value on one line."""
    text = dump([value], flow=True).strip()[1:-1]
    return _quoted(value) if "\n" in text else text


def _quoted(value: Any) -> str:
    """A value as JSON on one line; YAML lacks pairs of surrogates, but an escape for such a sign."""
    return re.sub(
        r"(\\+)u(d[89ab]..)\\u(d[c-f]..)",
        lambda m: m[0] if len(m[1]) % 2 == 0 else f"{m[1]}U{_joined(m[2], m[3]):08x}",
        json.dumps(value),
    )


def _joined(high: str, low: str) -> int:
    """The code point of a pair of surrogates."""
    return 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00


def _one_line(text: str) -> str:
    return " ".join(text.split())
