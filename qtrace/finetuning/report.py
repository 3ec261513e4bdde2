"""What a fine-tuning did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.finetuning._watching import Frozen
from qtrace.finetuning.settings import Settings
from qtrace.graph.table import format_table

__all__ = ["FineTuned", "Output"]


@dataclass(frozen=True)
class Output:
    """One output of the graph, against that of the float graph on data that was not learned from.

    Attributes:
        index: its number.
        shape: of a sample.
        before: signal to quantization noise ratio before, in dB.
        after: the same afterwards.
        agreement_before: share of samples whose largest value has the same index; None unless it is (N, C).
        agreement_after: the same afterwards.
    """

    index: int
    shape: tuple[int, ...]
    before: float
    after: float
    agreement_before: float | None = None
    agreement_after: float | None = None


@dataclass(frozen=True)
class FineTuned:
    """The result of ``qtrace.finetune``; the module itself was changed in place.

    Attributes:
        settings: how.
        samples: how many samples (or batches, where these cannot be taken apart) were learned from.
        measured: how many were measured on.
        measured_on: ``held back``, ``given``, or ``learned from`` where there was too little data.
        left_out: batches that did not fit into memory.
        parameters: how many parameters learned, those of ranges included.
        ranges: how many of these are ranges; with the fake quant ``fixed`` none.
        outputs: the outputs that were compared.
        blocks: the nodes that were compared besides.
        left: a line with the reason for every output that was not compared.
        loss: the loss of each step.
        parts: part of the loss -> that part of each step.
        frozen: what was frozen, and when.
        moving: how many ranges and statistics were not frozen up to the end; they took their averages.
        resumed: at which step it went on; None if it was not interrupted.
        jit: whether steps ran under ``jit.trace``.
    """

    settings: Settings
    samples: int
    measured: int
    measured_on: str
    left_out: int
    parameters: int
    ranges: int
    outputs: tuple[Output, ...]
    blocks: tuple[str, ...]
    left: tuple[str, ...]
    loss: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]
    frozen: tuple[Frozen, ...]
    moving: int
    resumed: int | None
    jit: bool

    @property
    def improved(self) -> bool:
        """Whether no output has become worse, and one better."""
        gains = [o.after - o.before for o in self.outputs]
        return bool(gains) and min(gains) >= 0 and max(gains) > 0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; an SQNR without noise is None."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found.update(
            settings=dataclasses.asdict(self.settings),
            outputs=[_finite(dataclasses.asdict(o)) for o in self.outputs],
            frozen=[dataclasses.asdict(f) for f in self.frozen],
            improved=self.improved,
        )
        return found

    def table(self) -> str:
        """What there is to know, for a terminal."""
        count = f"{self.parameters - self.ranges} parameters and {self.ranges} of ranges"
        lines = [f"learned: {count}, from {self.samples} samples in {len(self.loss)} steps"]
        if self.ranges == 0:
            lines.append("ranges stay as calibrated: prepare with fakequant: lsq for ranges that learn")
        if self.left_out:
            lines.append(f"{self.left_out} batches were not used: they did not fit into settings.memory")
        lines.append("compared besides the outputs: " + (", ".join(self.blocks) or "nothing"))
        lines += [f"left: {line}" for line in self.left]
        lines += ["", format_table(("steps", "loss", *self.parts), self._curve()), ""]
        shown = [_row(o) for o in self.outputs]
        headers = ("output", "SQNR before", "after", "same class before", "after")
        lines.append(format_table(headers, shown))
        lines.append(f"on {self.measured} samples, {self.measured_on}")
        for frozen in self.frozen:
            lines.append(
                f"frozen after step {frozen.step}: {frozen.sort} {frozen.name}, {frozen.drift:.1e} a step"
            )
        if self.moving:
            lines.append(f"{self.moving} ranges or statistics moved up to the end and took their averages")
        return "\n".join(lines)

    def _curve(self) -> list[Sequence[str]]:
        """Means of up to ten parts of the run."""
        rows = []
        for part in np.array_split(np.arange(len(self.loss)), min(10, len(self.loss))):
            values = [np.mean([curve[i] for i in part]) for curve in (self.loss, *self.parts.values())]
            rows.append((f"{part[0] + 1}..{part[-1] + 1}", *(f"{v:.4g}" for v in values)))
        return list(rows)


def _finite(given: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in given.items()}


def _row(o: Output) -> tuple[str, ...]:
    same = [f"{100 * a:.1f} %" if a is not None else "" for a in (o.agreement_before, o.agreement_after)]
    return str(o.index), f"{o.before:.2f} dB", f"{o.after:.2f} dB", *same
