"""The report of verify as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.graph.table import format_table
from qtrace.verification.closeness import sum_up

if TYPE_CHECKING:
    from qtrace.verification.report import VerifyReport

__all__ = ["format_sites", "summarize"]

_SHOWN_STEPS = 6


def format_sites(report: VerifyReport, max_width: int = 140) -> str:
    """Returns a text table: a row for each site, then the totals; the totals of a float file alone."""
    if not report.sites["op_by_op"]:
        return summarize(report)
    headers = ("site", "values", "equal", "worst LSB", "end to end", "deployed")
    rows = []
    for node, tally in report.sites["op_by_op"].items():
        others = [report.sites[m].get(node) for m in ("end_to_end", "deployed")]
        cells = ["" if t is None else f"{t.equal / t.values:.2%} / {t.worst}" for t in others]
        rows.append((node, str(tally.values), f"{tally.equal / tally.values:.3%}", str(tally.worst), *cells))
    return f"{format_table(headers, rows, max_width=max_width)}\n{summarize(report)}"


def summarize(report: VerifyReport) -> str:
    """Returns the totals and the verdict, in a few lines."""
    ratios = ", ".join(_ratio(report, mode) for mode in report.end_modes())
    count = len(report.sites["op_by_op"])
    lines = [
        f"op by op: worst {report.worst_lsb()} LSB, {report.equal_share():.4%} equal "
        f"over {count} sites{_differences(report)}"
        if count
        else "a float file: its outputs are compared",
        f"outputs: {ratios}; same prediction {report.agreement():.2%}",
        *_closeness(report),
        *(report.kernels.describe() if report.kernels is not None else ()),
        "passed" if report.passed else "FAILED: " + "; ".join(report.problems()),
        *report.remarks(),
    ]
    return "\n".join(lines)


def _ratio(report: VerifyReport, mode: str) -> str:
    if not report.outputs[mode]:
        return f"{mode} not compared"
    total, (name, weakest) = report.sqnr_db(mode), report.weakest_output(mode)
    lowest = f" ({name} alone {weakest:.1f})" if f"{weakest:.1f}" != f"{total:.1f}" else ""
    return f"{mode} {total:.1f} dB{lowest}"


def _closeness(report: VerifyReport) -> list[str]:
    """Says how far both sides are from float, and how many of their predictions are float's."""
    if not report.float_source:
        return []
    totals = {mode: sum_up(sums.values()) for mode, sums in report.closeness.items() if sums}
    if not totals:
        return ["float: no output can be compared with it, so the ops alone decide"]
    first = next(iter(totals.values()))
    lines = []
    if first.signal:
        ratios = ", ".join(f"{mode} {total.runtime_db:.1f} dB" for mode, total in totals.items())
        lines.append(f"to float ({report.float_source}): graph {first.graph_db:.1f} dB, runtime {ratios}")
    if first.predictions:
        graph = first.graph_agreeing / first.predictions
        shares = (
            f"{mode} {total.runtime_agreeing / total.predictions:.2%}" for mode, total in totals.items()
        )
        lines.append(f"float's predictions: graph {graph:.2%}, runtime {', '.join(shares)}")
    return lines


def _differences(report: VerifyReport) -> str:
    """Lists the most frequent differences."""
    steps = sorted(report.histogram().items(), key=lambda item: -item[1])
    shown = ", ".join(f"{step:+d} LSB x {count}" for step, count in steps[:_SHOWN_STEPS])
    more = f" and {len(steps) - _SHOWN_STEPS} more" if len(steps) > _SHOWN_STEPS else ""
    return f" ({shown}{more})" if steps else ""
