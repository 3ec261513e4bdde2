"""Results of matching a pattern: a match, a partial match, and the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qtrace.graph.types import Expr, TensorNode

if TYPE_CHECKING:
    from qtrace.graph.pattern import Pattern

__all__ = ["UNSET", "Mismatch", "PartialMatch", "PatternMatch"]

UNSET = object()
"""The value of a pattern that is not bound."""


@dataclass(frozen=True)
class PatternMatch:
    """The node that a pattern matches, the calls (the first produces ``node``), and the named values."""

    node: TensorNode
    exprs: tuple[Expr, ...]
    bound: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns what is bound to ``name``, or ``default``."""
        return self.bound.get(name, default)

    def expr(self, name: str) -> Expr:
        """Returns the expr that produces the node bound to ``name``."""
        return self.bound[name].expr


@dataclass(frozen=True)
class Mismatch:
    """The reason why the attempt with the most matched calls is no match; false as a condition."""

    where: str
    reason: str
    matched: int

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class PartialMatch:
    """An immutable partial match, so that another order of inputs can start from it again."""

    bound: tuple[tuple[Pattern, Any], ...] = ()
    exprs: tuple[Expr, ...] = ()

    def bind(self, pattern: Pattern, value: Any, *exprs: Expr) -> PartialMatch:
        """Returns this match with ``pattern`` bound to ``value``, and with ``exprs`` that were matched."""
        return PartialMatch((*self.bound, (pattern, value)), (*self.exprs, *exprs))

    def value(self, pattern: Pattern) -> Any:
        """Returns what ``pattern`` is bound to, or UNSET."""
        return next((v for p, v in self.bound if p.key == pattern.key), UNSET)
