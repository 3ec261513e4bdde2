"""What every pass returns."""

from __future__ import annotations

from dataclasses import dataclass

from qtrace.graph.types import TracedModule

__all__ = ["PassResult"]


@dataclass(frozen=True)
class PassResult:
    """A pass's outcome.

    Attributes:
        model: the traced module after the pass (the one that was given, edited in place).
        changed: one line for everything that was done.
        left: one line, with the reason, for everything that looked like work but was left alone.
    """

    model: TracedModule
    changed: tuple[str, ...]
    left: tuple[str, ...] = ()
