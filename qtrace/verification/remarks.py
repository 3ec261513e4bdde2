"""What the problems of a verified file mean, which side is wrong and what to do, in sentences."""

from __future__ import annotations

import math

from qtrace.verification.causes import SATURATION, SATURATION_ELSEWHERE, WRONG_PRODUCTS
from qtrace.verification.selections import describe_rows
from qtrace.verification.tallies import Tallies

__all__ = ["remarks"]


def remarks(tallies: Tallies) -> list[str]:
    """Returns the remarks on what verify has counted, a sentence each."""
    elsewhere = [SATURATION_ELSEWHERE] if tallies.unknown_processor else []
    client = [tallies.client] if tallies.client else []
    return [*_explain(tallies), *_order_remarks(tallies), *elsewhere, *client]


def _explain(tallies: Tallies) -> list[str]:
    """Says what the problems mean, and what it means that rows differ."""
    if tallies.passed:
        return _row_remarks(tallies)
    if tallies.cross_check is not None:
        node, check = tallies.cross_check
        return [f"at {node}, {check.sentence()}"]
    if not tallies.sites["op_by_op"]:
        return [SATURATION] if tallies.kernels is not None and tallies.kernels.saturates else []
    floats = tallies.outputs.get("op_by_op", {}).values()
    if tallies.worst_lsb() > tallies.max_lsb or any(n.sqnr_db < tallies.min_sqnr_db for n in floats):
        return []
    if tallies.unequal and tallies.optimization_lsb() is None:
        return _row_remarks(tallies)
    within = f"no op differs from the graph by more than {tallies.max_lsb} LSB"
    if tallies.short_shares():
        return [f"{within}, but many do: bisect names the first op that rounds in another way"]
    weak = tallies.failing_modes()
    if weak == ["deployed"] or tallies.unequal:
        right = f"no op is wrong with the runtime's optimizations off: {within}"
        if tallies.kernels is not None and tallies.kernels.saturates:
            return [right, SATURATION]
        if tallies.kernels is not None and tallies.kernels.wrong:
            return [right, WRONG_PRODUCTS]
        return [right, "only the optimized form falls short of the limit: bisect compares that op by op, too"]
    if any(not math.isfinite(tallies.sqnr_db(mode)) for mode in weak):
        return [f"{within}: an output is not finite on one side, from end to end only"]
    remedy = "what to do: measure the accuracy of the task with the file"
    if tallies.end_to_end_db is None:
        remedy += ", or verify more samples: on few, two runs of one network differ in noise by chance"
    else:
        remedy += ", and where it holds, call qtrace.verify without min_sqnr_db, which compares both to float"
    return [
        f"no op is wrong: {within} when both read the same integers",
        "from end to end single LSBs (ties, the order of sums) add up, and later layers amplify them",
        remedy,
    ]


def _order_remarks(tallies: Tallies) -> list[str]:
    """Says which tensors are not compared because equal scores come in another order."""
    tensors = {tensor: n for counts in tallies.reordered.values() for tensor, n in counts.items()}
    if not tensors:
        return []
    tensor, count = next(iter(tensors.items()))
    origin = tallies.rankings[tensor.partition(" ")[2]]
    batches = f"in {count} batch{'' if count == 1 else 'es'}"
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return [
        f"{tensor}{others} is not compared {batches}: {origin} ranks equal scores, and their order is the "
        "runtime's; neither the file nor an op is wrong for that"
    ]


def _row_remarks(tallies: Tallies) -> list[str]:
    """Says what it means that graph and runtime select different rows, a sentence each."""
    if not tallies.unequal:
        return []
    modes = ("op_by_op", "end_to_end", "deployed", "reference")
    mode, tensors = next((m, tallies.unequal[m]) for m in modes if m in tallies.unequal)
    tensor, shapes = next(iter(tensors.items()))
    origin = tallies.selections[tensor.partition(" ")[2]]
    others = f", so have {len(tensors) - 1} more behind it" if len(tensors) > 1 else ""
    remedy = (
        "what to do: measure the accuracy of the task with the file; the layers before the selection can "
        "be verified alone"
    )
    rows = f"{describe_rows(tensor, shapes)}{others}: its rows depend on values, which {origin} selects"
    if not tallies.sites["op_by_op"]:
        return [
            rows,
            "floats next to a threshold, or ties, are decided otherwise; these rows are not compared",
            f"{remedy} (trace them as a module of their own)",
        ]
    remedy += " (qtrace.prepare with outputs=)"
    within = f"no op that was compared differs by more than {tallies.max_lsb} LSB op by op"
    if mode == "op_by_op":
        cause = "both read the same integers, but decide values next to a threshold, or ties, otherwise"
    else:
        sites = tallies.sites["end_to_end"].items()
        first = next((f", first {n} by {t.worst} LSB" for n, t in sites if t.equal < t.values), "")
        cause = f"from end to end integers differ{first}, and one LSB moves values over a threshold"
        remedy = f"this is no fault of the file; {remedy}"
    return [rows, f"{within}; {cause}; these rows are not compared", remedy]
