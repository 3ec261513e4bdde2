"""Describes what post-training algorithms did: qtrace's in a few lines, a user's own in all its lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qtrace.config.checking import is_packaged
from qtrace.errors import shorten_list
from qtrace.preparation.passes.base import Left

__all__ = ["describe_algorithms"]

# Ratios that differ by less count as alike.
_CHANGED_DB = 0.05


def describe_algorithms(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describes the reports of algorithms, line by line.

    Args:
        reports: the reports in the record of a model.
    """
    return [line for report in reports for line in _lines(report)]


def _lines(report: Mapping[str, Any]) -> list[str]:
    options = ", ".join(f"{key} {value}" for key, value in report["options"].items())
    parts = [f"{len(report['changed'])} changed", f"{len(report['left'])} left"]
    name = f"{report['algorithm']}{f' ({options})' if options else ''}"
    lines = [f"{name}: {', '.join(parts)}"]
    if outputs := _both(report.get("outputs", ())):
        ratios = shorten_list(f"{e['site']} {_ratios(e)}" for e in outputs)
        lines.append(f"  outputs: {ratios} (SQNR on {report['measured']})")
    lines += _sites(_both(report["errors"]))
    if not is_packaged(report["algorithm"]):
        return [*lines, *_own_lines(report)]
    return [*lines, *_left(report)]


def _own_lines(report: Mapping[str, Any]) -> list[str]:
    """Returns every line of the report of a user's own algorithm: the user knows which of them matter."""
    left = [i if isinstance(i, str) else str(Left(i["site"], i["reason"])) for i in report["left"]]
    return [*(f"  {line}" for line in report["changed"]), *(f"  left {line}" for line in left)]


def _left(report: Mapping[str, Any]) -> list[str]:
    """Says what was not changed, a line for each reason."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for left in report["left"]:
        if isinstance(left, str):  # the report of a model that was saved by an earlier release
            left = {"site": "", "reason": left}
        reasons.setdefault(left["reason"], []).extend([left["site"]] if left["site"] else [])
    for reason, sites in reasons.items():
        lines.append(f"  left {shorten_list(sites)}: {reason}" if sites else f"  left: {reason}")
    return lines


def _both(errors: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the errors that were measured before and after."""
    return [e for e in errors if e["before"] is not None and e["after"] is not None]


def _ratios(error: Mapping[str, Any]) -> str:
    return f"{error['before']:.1f} -> {error['after']:.1f} dB"


def _sites(errors: list[Mapping[str, Any]]) -> list[str]:
    """Says how many sites gained and lost, and which gained and lost most."""
    gains = sorted(errors, key=lambda e: float(e["before"] - e["after"]))
    better = [e for e in gains if e["after"] - e["before"] >= _CHANGED_DB]
    worse = [e for e in reversed(gains) if e["before"] - e["after"] >= _CHANGED_DB]
    same = len(errors) - len(better) - len(worse)
    parts = [
        f"{len(changed)} {word} ({changed[0]['site']} {_ratios(changed[0])}"
        + (" the most)" if len(changed) > 1 else ")")
        for changed, word in ((better, "better"), (worse, "worse"))
        if changed
    ]
    parts += [f"{same} alike"] if same and parts else []
    return [f"  sites, each by itself: {', '.join(parts)}"] if parts else []
