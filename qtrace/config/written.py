"""A merged recipe as it was written: each value and rule with its file, its line and the comment above it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtrace.config.qconfig import QConfig
from qtrace.config.recipe import SCHEMA, WHOLE, read_recipe
from qtrace.config.tree import Tree, dump
from qtrace.plugins.options import Loc, known_keys

__all__ = ["Entry", "Resolved", "entries", "render", "resolve_recipe"]


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
