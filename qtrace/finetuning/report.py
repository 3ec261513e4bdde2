"""What a fine-tuning did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.finetuning._evaluating import Evaluation, Figures
from qtrace.finetuning._retreating import Retreat
from qtrace.finetuning._watching import Frozen
from qtrace.finetuning.settings import Settings
from qtrace.graph.table import format_table

__all__ = ["FineTuned", "Output", "outputs_of"]


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
        outputs: the outputs that were compared, at the start and as the module is now.
        evaluations: the held-back error at the start and at each evaluation.
        best_step: after how many steps the module's state was reached; 0 where no step was better than the
            start and the module is as it was.
        retreats: when the run diverged and returned to its best state.
        stopped: why the run ended before its last step; "" where it did not.
        seconds: how long it took, without reading the data; since the last resumption.
        blocks: the nodes that were compared besides.
        left: a line with the reason for every output that was not compared.
        loss: the loss of each step.
        parts: part of the loss -> that part of each step.
        frozen: what was frozen up to ``best_step``, and when.
        moving: how many ranges and statistics were not frozen then; they took their averages.
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
    evaluations: tuple[Evaluation, ...]
    best_step: int
    retreats: tuple[Retreat, ...]
    stopped: str
    seconds: float
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

    @property
    def error_before(self) -> float:
        """The held-back error at the start."""
        return self.evaluations[0].error

    @property
    def error_after(self) -> float:
        """The held-back error of the module as it is now, the smallest of all evaluations."""
        return min(e.error for e in self.evaluations)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; an SQNR without noise is None."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found.update(
            settings=dataclasses.asdict(self.settings),
            outputs=[_finite(dataclasses.asdict(o)) for o in self.outputs],
            evaluations=[_finite(dataclasses.asdict(e)) for e in self.evaluations],
            retreats=[dataclasses.asdict(r) for r in self.retreats],
            frozen=[dataclasses.asdict(f) for f in self.frozen],
            error_before=self.error_before,
            error_after=self.error_after,
            improved=self.improved,
        )
        return found

    def table(self) -> str:
        """What there is to know, for a terminal."""
        count = f"{self.parameters - self.ranges} parameters and {self.ranges} of ranges"
        lines = [*self._verdict(), f"learned: {count}, from {self.samples} samples in {len(self.loss)} steps"]
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

    def _verdict(self) -> list[str]:
        """What the run came to, and what went wrong on the way."""
        evaluated = f"{len(self.evaluations) - 1} evaluations"
        if self.best_step:
            change = f"{self.error_before:.4g} -> {self.error_after:.4g}"
            verdict = f"held-back error {change}: the state after step {self.best_step}, best of {evaluated}"
        else:
            tried = min((e.error for e in self.evaluations[1:]), default=self.error_before)
            verdict = (
                "NO STEP WAS BETTER than the start: the model is as it was. "
                f"Held-back error {self.error_before:.4g}, the best of {evaluated} {tried:.4g}"
            )
        stopped = [f"ended after step {len(self.loss)}: {self.stopped}"] if self.stopped else []
        return [verdict, *map(str, self.retreats), *stopped]

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


def outputs_of(before: Figures, after: Figures) -> tuple[Output, ...]:
    """The outputs at two evaluations."""
    return tuple(
        Output(index, shape, db, after.outputs[index][1], same, after.outputs[index][2])
        for index, (shape, db, same) in before.outputs.items()
    )
