"""The difference of two configs, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from qtrace.config import QConfig

__all__ = ["ConfigChange", "compare_configs"]

_RULES = "rules"


@dataclass(frozen=True)
class ConfigChange:
    """A key with two values, or a rule that only one config has.

    Attributes:
        key: the dotted key, such as ``observers.activation``; ``rules`` for each rule.
        first: the value of the first config as plain data; None if there is none.
        second: the value of the second config.
    """

    key: str
    first: Any
    second: Any


def compare_configs(first: QConfig, second: QConfig) -> tuple[ConfigChange, ...]:
    """Returns the keys whose values differ, in the order of the first config, and then of the second one.

    Rules are compared in order, since the last one that matches wins: a rule that moved is in the result
    twice, as one that went and one that came.
    """
    a, b = first.to_dict(), second.to_dict()
    rules = _rules(a.pop(_RULES, None) or (), b.pop(_RULES, None) or ())
    return (*_changes("", a, b), *rules)


def _changes(key: str, first: Any, second: Any) -> Iterator[ConfigChange]:
    """Yields the differing values below ``key``, as deep as both sides are mappings."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in dict.fromkeys((*first, *second)):
            yield from _changes(f"{key}.{name}" if key else name, first.get(name), second.get(name))
    elif first != second:
        yield ConfigChange(key, first, second)


def _rules(first: Sequence[Any], second: Sequence[Any]) -> Iterator[ConfigChange]:
    a, b = ([json.dumps(rule, sort_keys=True) for rule in rules] for rules in (first, second))
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from (ConfigChange(_RULES, rule, None) for rule in first[i:j])
            yield from (ConfigChange(_RULES, None, rule) for rule in second[k:m])
