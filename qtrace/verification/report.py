"""The report of verify: what it counts, as text and as plain data.

What the problems of a verified file mean, which side is wrong and what to do, in sentences.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from qtrace.comparing.selections import LEAST_SHARE
from qtrace.comparing.sums import finite_or_none
from qtrace.display import Displayed, format_table
from qtrace.errors import shorten_list
from qtrace.runtimes.host import describe_side
from qtrace.verification.crosscheck import SATURATION, SATURATION_ELSEWHERE, WRONG_PRODUCTS
from qtrace.verification.selections import describe_rows
from qtrace.verification.tallies import MODES, Tallies, sum_up


@dataclass(repr=False)
class VerifyReport(Displayed, Tallies):
    """The outcome of ``qtrace.verify``: `Tallies` has its attributes and what can be asked of it."""

    def table(self, max_width: int = 140) -> str:
        """Returns a text table: a row for each site, then the totals; only the totals of a float file."""
        if not self.sites["op_by_op"]:
            return self.summary()
        headers = ("site", "values", "equal", "worst LSB", "end to end", "deployed")
        rows = []
        for node, tally in self.sites["op_by_op"].items():
            others = [self.sites[m].get(node) for m in ("end_to_end", "deployed")]
            cells = ["" if t is None else f"{t.equal / t.values:.2%} / {t.worst}" for t in others]
            share = f"{tally.equal / tally.values:.3%}"
            rows.append((node, str(tally.values), share, str(tally.worst), *cells))
        return f"{format_table(headers, rows, max_width=max_width)}\n{self.summary()}"

    def summary(self) -> str:
        """Returns the totals and the verdict, in a few lines."""
        ratios = ", ".join(_ratio(self, mode) for mode in self.end_modes())
        count = len(self.sites["op_by_op"])
        lines = [
            f"op by op: worst {self.worst_lsb()} LSB, {self.equal_share():.4%} equal "
            f"over {count} sites{_differences(self)}"
            if count
            else "a float file: its outputs are compared",
            *([f"float16: {self.float16} ops of the file, as the graph rounds them"] if self.float16 else ()),
            f"outputs: {ratios}; same prediction {self.agreement():.2%}",
            *_closeness(self),
            *(self.kernels.describe() if self.kernels is not None else ()),
            *([f"in {self.runtime}"] if self.runtime else ()),
            *([f"runtime: {describe_side(self.side)}"] if self.side else ()),
            _outcome(self),
            *self.remarks(),
        ]
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """Says what the problems mean, which side is wrong and what to do, a sentence each."""
        elsewhere = [SATURATION_ELSEWHERE] if self.unknown_processor else []
        client = [self.client] if self.client else []
        return [*_explain(self), *_order_remarks(self), *elsewhere, *client]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {
            "path": self.path,
            "runtime": self.runtime,
            "runtime_host": dict(self.side) or None,
            "passed": self.passed,
            "problems": self.problems(),
            "remarks": self.remarks(),
            "worst_lsb": {m: self.worst_lsb(m) for m in MODES if self.sites[m]},
            "histogram": {m: self.histogram(m) for m in MODES if self.sites[m]},
            "equal_share": {m: self.equal_share(m) for m in MODES if self.sites[m]},
            "sqnr_db": {m: finite_or_none(self.sqnr_db(m)) for m in self.outputs},
            "outputs": {
                m: {name: finite_or_none(n.sqnr_db) for name, n in noises.items()}
                for m, noises in self.outputs.items()
            },
            "agreement": self.agreement(),
            "to_float": {m: {n: c.to_dict() for n, c in sums.items()} for m, sums in self.closeness.items()},
            "float_source": self.float_source,
            "lost_groups": {name: finite_or_none(ratio) for name, ratio in self.lost_groups().items()},
            "selected_rows": None if self.selected is None else self.selected.worst(),
            **({"float16": self.float16} if self.float16 else {}),
            "unequal_rows": self.unequal,
            "reordered_ties": self.reordered,
            "kernels": None if self.kernels is None else asdict(self.kernels),
            "cross_check": self.cross_check and {"node": self.cross_check[0], **asdict(self.cross_check[1])},
            "optimized": {node: vars(tally) for node, tally in self.optimized.items()},
            "sites": {m: {k: vars(t) for k, t in self.sites[m].items()} for m in MODES},
        }


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
    return f" ({shorten_list(f'{step:+d} LSB x {count}' for step, count in steps)})" if steps else ""


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
