"""What the problems of a verified file mean, which side is wrong and what to do, in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qtrace.verification.selections import describe_rows

if TYPE_CHECKING:
    from qtrace.verification.report import VerifyReport

__all__ = ["remarks"]


def remarks(report: VerifyReport) -> list[str]:
    """Returns the remarks on a report, a sentence each."""
    if report.passed:
        return _row_remarks(report)
    if not report.sites["op_by_op"]:
        return []
    if report.cross_check is not None:
        node, check = report.cross_check
        return [f"at {node}, {check.sentence()}"]
    floats = report.outputs.get("op_by_op", {}).values()
    if report.worst_lsb() > report.max_lsb or any(n.sqnr_db < report.min_sqnr_db for n in floats):
        return []
    if report.unequal and report.optimization_lsb() is None:
        return _row_remarks(report)
    within = f"no op differs from the graph by more than {report.max_lsb} LSB"
    if report.equal_share() < report.min_equal:
        return [f"{within}, but many do: bisect names the first op that rounds in another way"]
    weak = report.failing_modes()
    if weak == ["deployed"] or report.unequal:
        return [
            f"no op is wrong with the runtime's optimizations off: {within}",
            "only the optimized form falls short of the limit: bisect compares that op by op, too",
        ]
    if any(not math.isfinite(report.sqnr_db(mode)) for mode in weak):
        return [f"{within}: an output is not finite on one side, from end to end only"]
    remedy = "what to do: measure the accuracy of the task with the file"
    if report.end_to_end_db is not None:
        remedy += ", and where it holds, call qtrace.verify without min_sqnr_db, which compares both to float"
    return [
        f"no op is wrong: {within} when both read the same integers",
        "from end to end single LSBs (ties, the order of sums) add up, and later layers amplify them",
        remedy,
    ]


def _row_remarks(report: VerifyReport) -> list[str]:
    """Says what it means that graph and runtime select different rows, a sentence each."""
    if not report.unequal:
        return []
    modes = ("op_by_op", "end_to_end", "deployed", "reference")
    mode, tensors = next((m, report.unequal[m]) for m in modes if m in report.unequal)
    tensor, shapes = next(iter(tensors.items()))
    origin = report.selections[tensor.partition(" ")[2]]
    others = f", so have {len(tensors) - 1} more behind it" if len(tensors) > 1 else ""
    remedy = (
        "what to do: measure the accuracy of the task with the file; the layers before the selection can "
        "be verified alone"
    )
    rows = f"{describe_rows(tensor, shapes)}{others}: its rows depend on values, which {origin} selects"
    if not report.sites["op_by_op"]:
        return [
            rows,
            "floats next to a threshold, or ties, are decided otherwise; these rows are not compared",
            f"{remedy} (trace them as a module of their own)",
        ]
    remedy += " (qtrace.prepare with outputs=)"
    within = f"no op that was compared differs by more than {report.max_lsb} LSB op by op"
    if mode == "op_by_op":
        cause = "both read the same integers, but decide values next to a threshold, or ties, otherwise"
    else:
        sites = report.sites["end_to_end"].items()
        first = next((f", first {n} by {t.worst} LSB" for n, t in sites if t.equal < t.values), "")
        cause = f"from end to end integers differ{first}, and one LSB moves values over a threshold"
        remedy = f"this is no fault of the file; {remedy}"
    return [rows, f"{within}; {cause}; these rows are not compared", remedy]
