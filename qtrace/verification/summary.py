"""The report of verify as text."""

from __future__ import annotations

import math

from qtrace.display import format_table
from qtrace.outputs.replay import LEAST_SHARE
from qtrace.runtimes.host import describe_side
from qtrace.verification.closeness import sum_up
from qtrace.verification.remarks import remarks
from qtrace.verification.tallies import Tallies

__all__ = ["format_sites", "summarize"]

_SHOWN_STEPS = 6


def format_sites(tallies: Tallies, max_width: int = 140) -> str:
    """Returns a text table: a row for each site, then the totals; only the totals of a float file."""
    if not tallies.sites["op_by_op"]:
        return summarize(tallies)
    headers = ("site", "values", "equal", "worst LSB", "end to end", "deployed")
    rows = []
    for node, tally in tallies.sites["op_by_op"].items():
        others = [tallies.sites[m].get(node) for m in ("end_to_end", "deployed")]
        cells = ["" if t is None else f"{t.equal / t.values:.2%} / {t.worst}" for t in others]
        rows.append((node, str(tally.values), f"{tally.equal / tally.values:.3%}", str(tally.worst), *cells))
    return f"{format_table(headers, rows, max_width=max_width)}\n{summarize(tallies)}"


def summarize(tallies: Tallies) -> str:
    """Returns the totals and the verdict, in a few lines."""
    ratios = ", ".join(_ratio(tallies, mode) for mode in tallies.end_modes())
    count = len(tallies.sites["op_by_op"])
    lines = [
        f"op by op: worst {tallies.worst_lsb()} LSB, {tallies.equal_share():.4%} equal "
        f"over {count} sites{_differences(tallies)}"
        if count
        else "a float file: its outputs are compared",
        *(
            [f"float16: {tallies.float16} ops of the file, as the graph rounds them"]
            if tallies.float16
            else ()
        ),
        f"outputs: {ratios}; same prediction {tallies.agreement():.2%}",
        *_closeness(tallies),
        *(tallies.kernels.describe() if tallies.kernels is not None else ()),
        *([f"in {tallies.runtime}"] if tallies.runtime else ()),
        *([f"runtime: {describe_side(tallies.side)}"] if tallies.side else ()),
        _outcome(tallies),
        *remarks(tallies),
    ]
    return "\n".join(lines)


def _ratio(tallies: Tallies, mode: str) -> str:
    if not tallies.outputs[mode]:
        return f"{mode} not compared"
    name, weakest = tallies.weakest_output(mode)
    place = f" at {name}" if len(tallies.outputs[mode]) > 1 and math.isfinite(weakest) else ""
    return f"{mode} {weakest:.1f} dB{place}"


def _closeness(tallies: Tallies) -> list[str]:
    """Says how far both sides are from float, and how many of their predictions are float's."""
    if not tallies.float_source:
        return []
    totals = {mode: sum_up(sums.values()) for mode, sums in tallies.closeness.items() if sums}
    lines = []
    if tallies.selected is not None and (share := tallies.selected.worst()) is not None:
        lines.append(f"float's rows: {share:.2%} of those that the graph selects; equal rows are compared")
    if not totals:
        return [*lines, "float: no output can be compared with it, so the ops alone decide"]
    measured = {n for sums in tallies.closeness.values() for n, s in sums.items() if s.signal}
    for name in _farthest(tallies, measured):
        sums = {mode: sums[name] for mode, sums in tallies.closeness.items() if name in sums}
        first = next(iter(sums.values()))
        ratios = ", ".join(f"{mode} {s.runtime_db:.1f} dB" for mode, s in sums.items())
        place = f" at {name}" if len(measured) > 1 else ""
        source = f"to float ({tallies.float_source})"
        lines.append(f"{source}: graph {first.graph_db:.1f} dB, runtime {ratios}{place}")
    first = next(iter(totals.values()))
    if first.predictions:
        graph = first.graph_agreeing / first.predictions
        shares = (
            f"{mode} {total.runtime_agreeing / total.predictions:.2%}" for mode, total in totals.items()
        )
        lines.append(f"float's predictions: graph {graph:.2%}, runtime {', '.join(shares)}")
    return lines


def _farthest(tallies: Tallies, names: set[str]) -> list[str]:
    """Returns the column group that is farthest from float in the runtime; [] without one."""
    ratios = {n: s.runtime_db for sums in tallies.closeness.values() for n, s in sums.items() if n in names}
    return sorted(ratios, key=lambda name: ratios[name])[:1]


def _outcome(tallies: Tallies) -> str:
    """Returns the verdict; a file of a graph that has itself lost column groups is broken, not passed."""
    outcome = [] if tallies.passed else ["FAILED: " + "; ".join(tallies.problems())]
    lost = tallies.lost_groups()
    share = None if tallies.selected is None else tallies.selected.worst()
    if share is not None and share < LEAST_SHARE:
        equal = "the file computes what the graph computes, but " if tallies.passed else ""
        outcome.append(
            f"broken: {equal}the graph itself selects {share:.1%} of float's rows: keep what leads to the "
            "selection in float (quantize: false), or prepare with placement: balanced"
        )
    if not lost:
        return "\n".join(outcome) or "passed"
    name = min(lost, key=lambda n: lost[n])
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    ratio = round(lost[name], 1) + 0.0  # no minus before 0
    equal = "the file computes what the graph computes, but " if tallies.passed else ""
    outcome.append(
        f"broken: {equal}{name}{others} carries no information in the graph itself, {ratio:.1f} dB to float: "
        "qtrace.compare shows where it is lost"
    )
    return "\n".join(outcome)


def _differences(tallies: Tallies) -> str:
    """Lists the most frequent differences."""
    steps = sorted(tallies.histogram().items(), key=lambda item: -item[1])
    shown = ", ".join(f"{step:+d} LSB x {count}" for step, count in steps[:_SHOWN_STEPS])
    more = f" and {len(steps) - _SHOWN_STEPS} more" if len(steps) > _SHOWN_STEPS else ""
    return f" ({shown}{more})" if steps else ""
