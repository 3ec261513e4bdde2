"""What the post-training algorithms did: a few lines each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from qtrace.explanation._index import few

__all__ = ["told"]


def told(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines for reports of algorithms.

    Args:
        reports: as the record of a model holds them.
    """
    return [line for report in reports for line in _lines(report)]


def _lines(report: Mapping[str, Any]) -> list[str]:
    options = ", ".join(f"{key} {value}" for key, value in report["options"].items())
    parts = [f"{len(report['changed'])} changed", f"{len(report['left'])} left"]
    name = f"{report['algorithm']}{f' ({options})' if options else ''}"
    lines = [f"{name}: {', '.join(parts)}{_errors(report['errors'])}"]
    reasons: dict[str, list[str]] = {}
    for line in report["left"]:
        site, colon, reason = line.partition(": ")
        reasons.setdefault(reason if colon else line, []).extend([site] if colon else [])
    for reason, sites in reasons.items():
        lines.append(f"  left {few(sites)}: {reason}" if sites else f"  left: {reason}")
    return lines


def _errors(errors: list[dict[str, Any]]) -> str:
    """The SQNR before and after, in the middle and at the worst site."""
    both = [e for e in errors if e["before"] is not None and e["after"] is not None]
    if not both:
        return ""
    middle = (median(e[key] for e in both) for key in ("before", "after"))
    worst = min(both, key=lambda e: float(e["after"]))
    return (
        "; SQNR {:.1f} -> {:.1f} dB in the middle".format(*middle)
        + f", {worst['before']:.1f} -> {worst['after']:.1f} dB at {worst['site']}"
    )
