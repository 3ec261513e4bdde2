"""YAML that knows where it was written: text -> `Tree`, with every mistake at its line.

Scalars follow YAML 1.2: ``yes``, ``on`` and dates are text and ``1e-4`` is a number, unlike in PyYAML. Only
plain data is read; a tag can construct nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from qtrace.errors import ConfigError
from qtrace.plugins.options import Loc, show, spell

_TAG = "tag:yaml.org,2002:"

# A recipe has a few hundred values; aliases could make billions of a few lines.
_MOST_VALUES = 10_000
MOST_LEVELS = 50

_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _LimitError(Exception):
    """A limit of this reader was passed; the text begins with the line."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own tables stay as they are
    level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """PyYAML's, which reads on as deep as it goes, in a time that grows with the square."""
        if self.level > MOST_LEVELS:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise _LimitError(f"{line}: more than {MOST_LEVELS} levels of nesting")
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML writes these line breaks bare into single quotes, and reads them back as spaces.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(f"{_TAG}str", text, style)


_Dumper.add_representer(str, _represent_text)

for _kind, _pattern, _first in _RESOLVERS:
    _expression = re.compile(rf"(?:{_pattern})\Z")
    _letters = [*_first, ""] if _kind == "null" else list(_first)
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", _expression, _letters)
    # In addition to PyYAML's own: text that either reader takes for something else is quoted.
    _Dumper.add_implicit_resolver(f"{_TAG}{_kind}", _expression, _letters)


@dataclass(frozen=True)
class Tree:
    """A value and where it was written.

    Attributes:
        value: a scalar, a dict of trees by key, or a list of trees.
        file: the file, as messages name it.
        line: the line of its key, of its list item, or of itself at the top; 0 if no file has it.
        path: its location within the file, such as ``rules[0].weight``.
    """

    value: Any
    file: str
    line: int
    path: str

    @property
    def origin(self) -> str:
        """``FILE:LINE``; only the name of what stands in no file."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def plain(self) -> Any:
        """The same as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, loc: Loc) -> Tree | None:
        """What stands at ``loc``, or None."""
        tree: Tree | None = self
        for part in loc:
            tree = None if tree is None else _child(tree.value, part)
        return tree

    def place(self, loc: Loc) -> tuple[str, str]:
        """``FILE:LINE: `` and the path of what stands at ``loc``, or of what is nearest around it.

        What stands in no file has only its path.
        """
        tree, path = self, self.path
        for index, part in enumerate(loc):
            child = _child(tree.value, part)
            if child is None:
                path = spell((tree.path, *loc[index:]) if tree.path else loc[index:])
                break
            tree, path = child, child.path
        return f"{tree.origin}: " if tree.line else "", path


def _child(value: Any, part: int | str) -> Tree | None:
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


def plant(value: Any, file: str, path: str = "", level: int = 0) -> Tree:
    """Makes a tree of a value of Python, which stands in no file.

    Args:
        value: the value; mappings, lists and tuples become trees as deep as a file may be.
        file: its name for messages.
        path: its location, as in `Tree`.
        level: how deep it stands.

    Raises:
        ConfigError: for a value that is nested deeper than a file may be.
    """
    if level > MOST_LEVELS:
        raise ConfigError(f"{file}: more than {MOST_LEVELS} levels of nesting.")
    if isinstance(value, Mapping):
        value = {
            key: plant(child, file, f"{path}.{key}".removeprefix("."), level + 1)
            for key, child in value.items()
        }
    elif isinstance(value, (list, tuple)):
        value = [plant(child, file, f"{path}[{i}]", level + 1) for i, child in enumerate(value)]
    return Tree(value, file, 0, path)


def read(text: str, file: str, problems: list[str]) -> Tree | None:
    """Reads one YAML document.

    Args:
        text: the document.
        file: its name for messages.
        problems: receives a sentence for each mistake.

    Returns:
        What could be read, or None when nothing could.
    """
    try:
        node = yaml.compose(text, _Loader)
        if node is None:
            problems.append(f"{file}:1: the file is empty.")
            return None
        return _Reader(file, problems).tree(node, node.start_mark.line + 1, "")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.append(f"{file}:{line}: the character U+{error.character:04X} is not allowed in YAML.")
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax(error, file))
    except (ValueError, OverflowError):  # PyYAML on "\UFFFFFFFF"
        problems.append(f"{file}:1: not valid YAML: an escape or a number in it is impossible.")
    except RecursionError:
        problems.append(f"{file}:1: more than {MOST_LEVELS} levels of nesting.")
    except _LimitError as error:
        problems.append(f"{file}:{error}.")
    return None


def _syntax(error: yaml.MarkedYAMLError, file: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    text = ", ".join(t for t in (error.context, error.problem) if t)
    if "'\\t'" in text:
        text += "; indent with spaces"
    elif "alias" in text:
        text += "; quote text that begins with *"
    elif "single document" in text:
        text = "a second document begins; a file holds one"
    return f"{file}:{line}: not valid YAML: {text}."


class _Reader:
    """Turns PyYAML's nodes into trees, counting values so that aliases cannot explode."""

    def __init__(self, file: str, problems: list[str]) -> None:
        self.file, self.problems, self.count = file, problems, 0

    def tree(self, node: yaml.Node, line: int, path: str, level: int = 0) -> Tree:
        self.count += 1
        if self.count > _MOST_VALUES:
            raise _LimitError(f"{line}: more than {_MOST_VALUES} values (an alias counts at each use)")
        if level > MOST_LEVELS:
            raise _LimitError(f"{line}: more than {MOST_LEVELS} levels of nesting")
        if node.tag not in _TAGS:
            self._problem(line, f"the tag {node.tag} is not supported; recipes are plain data")
        if isinstance(node, yaml.MappingNode):
            value: Any = dict(self._items(node, path, level + 1))
        elif isinstance(node, yaml.SequenceNode):
            value = [
                self.tree(item, item.start_mark.line + 1, f"{path}[{i}]", level + 1)
                for i, item in enumerate(node.value)
            ]
        else:
            value = self._scalar(node, line)
        return Tree(value, self.file, line, path)

    def _items(self, node: yaml.MappingNode, path: str, level: int) -> Iterator[tuple[str, Tree]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
                shown = f" {key.value!r}" if isinstance(key, yaml.ScalarNode) else ""
                self._problem(line, f"the key{shown} must be text")
            elif key.value == "<<":
                self._problem(line, "merge keys (<<) are not supported; use imports")
            elif key.value in first:
                self._problem(line, f"duplicate key {key.value!r}, first given in line {first[key.value]}")
            else:
                first[key.value] = line
                yield key.value, self.tree(value, line, f"{path}.{key.value}".removeprefix("."), level)

    def _scalar(self, node: yaml.Node, line: int) -> Any:
        kind = node.tag.removeprefix(_TAG)
        try:
            return _SCALARS.get(kind, str)(node.value)
        except ValueError:
            self._problem(line, f"{show(node.value)} cannot be read as {kind}")
            return node.value

    def _problem(self, line: int, text: str) -> None:
        self.problems.append(f"{self.file}:{line}: {text}.")


def _integer(text: str) -> int:
    prefix = text[:2]
    return int(text, 16 if prefix == "0x" else 8 if prefix == "0o" else 10)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _string(text: str) -> str:
    text.encode("utf-8")  # an escape such as "\ud800" makes what no file and no terminal can hold
    return text


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": _boolean,
    "int": _integer,
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    "str": _string,
}
_TAGS = {f"{_TAG}{kind}" for kind in (*_SCALARS, "map", "seq")}


def merge(
    base: Tree,
    over: Tree,
    whole: frozenset[Loc],
    loc: Loc = (),
    *,
    keeps: Callable[[Tree], bool] = lambda _: False,
) -> Tree:
    """``over`` on top of ``base``: mappings merge by key, anything else is replaced.

    Args:
        base: what is imported.
        over: what wins.
        whole: locations of mappings that are replaced rather than merged.
        loc: where the two stand.
        keeps: whether a value of ``base`` stays as it is.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)) or loc in whole:
        return base if keeps(base) else over
    merged = dict(base.value)
    for key, child in over.value.items():
        known = merged.get(key)
        merged[key] = child if known is None else merge(known, child, whole, (*loc, key), keeps=keeps)
    return replace(over, value=merged)


def dump(data: Any, *, flow: bool | None = False) -> str:
    """Plain data as YAML that `read` gives back, and that YAML 1.1 readers understand alike.

    Args:
        data: the data.
        flow: on one line, with braces, rather than a line for each value; None for that in the innermost
            lists and mappings only.
    """
    width = float("inf") if flow else 100
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=flow
    )
