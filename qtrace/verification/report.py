"""The report of verify: what it counts, as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qtrace.display import Displayed
from qtrace.metrics import finite_or_none
from qtrace.verification.remarks import remarks
from qtrace.verification.summary import format_sites, summarize
from qtrace.verification.tallies import MODES, Tallies

__all__ = ["VerifyReport"]


@dataclass(repr=False)
class VerifyReport(Displayed, Tallies):
    """The outcome of ``qtrace.verify``: `Tallies` has its attributes and what can be asked of it."""

    def table(self, max_width: int = 140) -> str:
        """Returns a text table: a row for each site, then the totals; only the totals of a float file."""
        return format_sites(self, max_width)

    def summary(self) -> str:
        """Returns the totals and the verdict, in a few lines."""
        return summarize(self)

    def remarks(self) -> list[str]:
        """Says what the problems mean, which side is wrong and what to do, a sentence each."""
        return remarks(self)

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
