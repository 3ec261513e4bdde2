"""The report of a fine-tuning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.display import Displayed, format_table
from qtrace.extras.finetune.evaluation import Evaluation, EvaluationFigures
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.training import Retreat
from qtrace.extras.finetune.watching import Frozen

__all__ = ["FineTuned", "OutputChange", "compare_outputs"]


@dataclass(frozen=True)
class OutputChange:
    """An output of the graph, compared with the float graph's on the evaluation data.

    Attributes:
        index: the number of the output.
        shape: the shape of one sample of the output.
        before: the SQNR before the fine-tuning, in dB, of the worst column group.
        after: the SQNR after the fine-tuning, in dB, of the worst column group.
        agreement_before: share of samples whose largest value has the same index in both graphs, before the
            fine-tuning; None unless the output has the shape (N, C).
        agreement_after: the same share after the fine-tuning.
    """

    index: int
    shape: tuple[int, ...]
    before: float
    after: float
    agreement_before: float | None = None
    agreement_after: float | None = None


@dataclass(frozen=True, repr=False)
class FineTuned(Displayed):
    """The result of ``qtrace.finetune``; the module itself was changed in place.

    Attributes:
        settings: the settings of the run, with the number of steps that it planned.
        samples: number of samples that were learned from; of batches, if these cannot be split into samples.
        measured: number of samples, or batches, that the outputs were evaluated on.
        measured_on: where these come from: ``held back``, ``given``, or ``learned from`` if there was too
            little data.
        left_out: number of batches that did not fit into ``settings.memory``.
        parameters: number of parameters that learned, ranges included.
        ranges: number of ranges that learned; 0 with the fake quant ``fixed``.
        outputs: the compared outputs, before and after the run.
        evaluations: the held-back error at the start and at each evaluation.
        best_step: number of steps after which the module's state was reached; 0 if no step was better than
            the start and the module did not change.
        retreats: the returns to the best state after the run diverged.
        stopped: why the run ended before its last step; "" if it did not.
        seconds: how long the call took, since the last resumption.
        blocks: the nodes that were compared besides the outputs.
        left: a line with the reason for every output that was not compared.
        loss: the loss of each step.
        parts: part of the loss -> its value in each step.
        frozen: the ranges and statistics that were frozen up to ``best_step``.
        moving: number of ranges and statistics that were not frozen then; they took their averages.
        resumed: the step at which an interrupted run went on; None if it was not interrupted.
        engine: the engine of the steps, ``megengine`` or ``torch``.
        engine_reason: why this engine was chosen, as a clause.
        jit: whether steps ran under ``jit.trace``.
    """

    settings: FinetuneSettings
    samples: int
    measured: int
    measured_on: str
    left_out: int
    parameters: int
    ranges: int
    outputs: tuple[OutputChange, ...]
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
    engine: str
    engine_reason: str
    jit: bool

    @property
    def improved(self) -> bool:
        """Whether an output improved and none became worse."""
        gains = [o.after - o.before for o in self.outputs]
        return bool(gains) and min(gains) >= 0 and max(gains) > 0

    @property
    def error_before(self) -> float:
        """The held-back error at the start."""
        return self.evaluations[0].error

    @property
    def error_after(self) -> float:
        """The held-back error of the best state, which the module has: the smallest of all evaluations."""
        return min(e.error for e in self.evaluations)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data; numbers that are not finite become None."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data.update(
            settings=dataclasses.asdict(self.settings),
            outputs=[_finite(dataclasses.asdict(o)) for o in self.outputs],
            evaluations=[_finite(dataclasses.asdict(e)) for e in self.evaluations],
            retreats=[dataclasses.asdict(r) for r in self.retreats],
            frozen=[dataclasses.asdict(f) for f in self.frozen],
            error_before=self.error_before,
            error_after=self.error_after,
            improved=self.improved,
        )
        return data

    def table(self) -> str:
        """Formats the report for a terminal."""
        count = f"{self.parameters - self.ranges} parameters and {self.ranges} of ranges"
        lines = [*self._verdict(), f"learned: {count}, from {self.samples} samples in {len(self.loss)} steps"]
        lines.append(f"engine: {self.engine}, {self.engine_reason}")
        if self.ranges == 0:
            lines.append("ranges stay as calibrated: prepare with fakequant: lsq for ranges that learn")
        if self.left_out:
            lines.append(f"{self.left_out} batches were not used: they did not fit into settings.memory")
        lines.append("compared besides the outputs: " + (", ".join(self.blocks) or "nothing"))
        lines += [f"left: {line}" for line in self.left]
        lines += ["", format_table(("steps", "loss", *self.parts), self._curve()), ""]
        rows = [_row(o) for o in self.outputs]
        headers = ("output", "SQNR before", "after", "same class before", "after")
        lines.append(format_table(headers, rows))
        lines.append(f"on {self.measured} samples, {self.measured_on}")
        for frozen in self.frozen:
            lines.append(
                f"frozen after step {frozen.step}: {frozen.sort} {frozen.name}, {frozen.drift:.1e} a step"
            )
        if self.moving:
            lines.append(f"{self.moving} ranges or statistics moved up to the end and took their averages")
        return "\n".join(lines)

    def _verdict(self) -> list[str]:
        """Says how the held-back error changed, where the run retreated, and why it stopped early."""
        evaluated = f"{len(self.evaluations) - 1} evaluations"
        if self.best_step:
            change = f"{self.error_before:.4g} -> {self.error_after:.4g}"
            verdict = f"held-back error {change}: the state after step {self.best_step}, best of {evaluated}"
        else:
            best = min((e.error for e in self.evaluations[1:]), default=self.error_before)
            verdict = (
                "NO STEP WAS BETTER than the start: the model is as it was. "
                f"Held-back error {self.error_before:.4g}, the best of {evaluated} {best:.4g}"
            )
        stopped = [f"ended after step {len(self.loss)}: {self.stopped}"] if self.stopped else []
        return [verdict, *map(str, self.retreats), *stopped]

    def _curve(self) -> list[Sequence[str]]:
        """Returns the mean losses of up to ten parts of the run."""
        rows = []
        for part in np.array_split(np.arange(len(self.loss)), min(10, len(self.loss))):
            values = [np.mean([curve[i] for i in part]) for curve in (self.loss, *self.parts.values())]
            rows.append((f"{part[0] + 1}..{part[-1] + 1}", *(f"{v:.4g}" for v in values)))
        return list(rows)


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


def _row(output: OutputChange) -> tuple[str, ...]:
    shares = (output.agreement_before, output.agreement_after)
    agreement = [f"{100 * share:.1f} %" if share is not None else "" for share in shares]
    return str(output.index), f"{output.before:.2f} dB", f"{output.after:.2f} dB", *agreement


def compare_outputs(before: EvaluationFigures, after: EvaluationFigures) -> tuple[OutputChange, ...]:
    """Compares the outputs at two evaluations."""
    return tuple(
        OutputChange(index, shape, sqnr_db, after.outputs[index][1], agreement, after.outputs[index][2])
        for index, (shape, sqnr_db, agreement) in before.outputs.items()
    )
