"""What a check has found: the violations of a contract, and the ops that run in float."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from qtrace.display import Displayed
from qtrace.extras.contracts.base import FloatOp
from qtrace.extras.contracts.price import RunPrice

__all__ = ["ContractReport", "Finding"]

_SHOWN = 20


@dataclass(frozen=True)
class Finding:
    """A violation, as plain data.

    Attributes:
        rule: the name of the rule.
        source: the document that states the rule.
        node: the name of the node, or its first output; "" for the file as a whole.
        text: the violation and its cure as a sentence.
        fixable: whether a repair is mechanical.
    """

    rule: str
    source: str
    node: str
    text: str
    fixable: bool


@dataclass(frozen=True, repr=False)
class ContractReport(Displayed):
    """The result of a check of one file.

    Attributes:
        target: the name of the target.
        title: the target in words.
        findings: the violations, rule by rule.
        floats: the ops that compute in float.
        measured: the runtime that told `floats`; "" if they are predicted.
        fixed: the sentences of the violations that were repaired before.
        conversions: the number of tensors that are rounded again to integers of another width.
        price: what a run asks of the device; None for a runtime that is here, where times are measured.
    """

    target: str
    title: str
    findings: tuple[Finding, ...]
    floats: tuple[FloatOp, ...]
    measured: str = ""
    fixed: tuple[str, ...] = field(default=())
    conversions: int = 0
    price: RunPrice | None = None

    def _text(self, max_width: int | None) -> str:
        return self.text()

    @property
    def passed(self) -> bool:
        """Whether the file keeps the contract."""
        return not self.findings

    @property
    def fallback(self) -> dict[str, int]:
        """Type of an op -> the number of such ops that leave the device for the CPU, the most first."""
        return dict(Counter(op.op for op in self.floats if op.falls_back).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {
            "target": self.target,
            "passed": self.passed,
            "violations": [vars(finding) for finding in self.findings],
            "float": [op.to_dict() for op in self.floats],
            "float_by": self.measured or "prediction",
            "fallback": self.fallback,
            "conversions": self.conversions,
            "price": None if self.price is None else self.price.to_dict(),
            "fixed": list(self.fixed),
            "device": "" if self.measured else "not run on the device",
        }

    def text(self) -> str:
        """Returns the report in lines."""
        lines = [f"fixed: {sentence}" for sentence in self.fixed]
        rules = dict.fromkeys((finding.rule, finding.source) for finding in self.findings)
        for rule, source in rules:
            found = [finding for finding in self.findings if finding.rule == rule]
            lines.append(f"{rule} ({source}):")
            lines += [f"  {f.text}{' [--fix]' if f.fixable else ''}" for f in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  and {len(found) - _SHOWN} more")
        how = f"in float, as {self.measured} loads the file" if self.measured else "in float, predicted"
        if self.floats:
            lines.append(f"{how}:")
            lines += [_describe(op) for op in self.floats[:_SHOWN]]
            if len(self.floats) > _SHOWN:
                lines.append(f"  and {len(self.floats) - _SHOWN} more")
        else:
            lines.append(f"{how}: no op")
        if self.fallback:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.fallback.items())
            number = sum(self.fallback.values())
            leave = "op leaves" if number == 1 else "ops leave"
            lines.append(
                f"fallback: {number} {leave} the device for the CPU ({kinds}), and their tensors are copied "
                "there and back"
            )
        if self.conversions:
            are = "tensor is" if self.conversions == 1 else "tensors are"
            lines.append(
                f"conversions: {self.conversions} {are} rounded again to integers of another width, each by "
                "an op of its own"
            )
        if self.price is not None:
            lines.append(self.price.text())
        count = len(self.findings)
        verdict = "keeps" if not count else f"breaks at {count} {'places' if count > 1 else 'place'}"
        where = f"run in {self.measured}" if self.measured else "not run on the device"
        lines.append(f"{verdict} the contract of {self.target} ({self.title}); {where}")
        return "\n".join(lines)


def _describe(op: FloatOp) -> str:
    """Returns the line of an op in float."""
    place = f" [runs on {op.runs_on}]" if op.runs_on else ""
    return f"  {op.op} {op.node}: {op.reason}{place}"
