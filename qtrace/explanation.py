"""explain: every decision of annotate, as a table or as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtrace.config import QConfig
from qtrace.graph.table import format_table
from qtrace.graph.types import TracedModule
from qtrace.passes.annotation import Annotation, ExprNote
from qtrace.passes.record import is_quantized, read_record
from qtrace.preparation import plan

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The decisions for one graph.

    Attributes:
        annotation: a note for every op, and the sites.
    """

    annotation: Annotation

    def table(self, max_width: int = 160) -> str:
        """A text table: one row for each op, and a summary line."""
        headers = ("expr", "op", "state", "in", "out", "scheme", "weight", "rules", "reason")
        rows = [self._row(n) for n in self.annotation.notes]
        return f"{format_table(headers, rows, max_width=max_width)}\n{self.summary()}"

    @staticmethod
    def _row(note: ExprNote) -> tuple[str, ...]:
        reason = f"fused into {note.into}" if note.state == "fused" else note.reason
        rules = ", ".join((note.rule, *note.matched)) if note.rule else ""
        inputs = ", ".join(i or "float" for i in note.inputs) if note.state != "fused" else ""
        return (note.name, note.op, note.state, inputs, note.output, note.scheme, note.weight, rules, reason)

    def summary(self) -> str:
        """How many ops are computed how, and how many sites there are."""
        states = Counter(n.state for n in self.annotation.notes)
        sorts = Counter(s.sort for s in self.annotation.sites)
        ops = ", ".join(f"{states[k]} {k}" for k in ("int", "fused", "carried", "float") if states[k])
        sites = ", ".join(f"{sorts[k]} {k}" for k in ("activation", "weight", "bias") if sorts[k])
        return f"backend {self.annotation.backend}; ops: {ops or 'none'}; sites: {sites or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"summary": self.summary(), **asdict(self.annotation)}


def explain(
    model: TracedModule, qconfig: QConfig | str | Path | Mapping[str, Any] | None = None
) -> Explanation:
    """Tells for every op what is quantized, by which rule, or why it stays float.

    Args:
        model: a traced module (what ``prepare`` would decide), or a prepared or converted one (what it did).
        qconfig: the config, for a traced module; None for the default.
    """
    if is_quantized(model):
        return Explanation(read_record(model).annotation)
    return Explanation(plan(model, qconfig))
