"""The verdict on a calibrated graph, and what the user asks of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qtrace.comparing.sums import Outputs, finite_values
from qtrace.data.base import DataSource, SampleRecord
from qtrace.errors import QtraceError
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import float_twin, late_algorithms
from qtrace.preparation.model import QuantizedModel
from qtrace.quantizing.evaluation import EvaluationData, count_samples, first_batches
from qtrace.quantizing.folder import CURE, VERDICT
from qtrace.quantizing.reporting import Reporter
from qtrace.sensitivity.diagnosis import Calibrated, Diagnosis, diagnose, measure_inputs
from qtrace.sensitivity.diagnosis.verdict import Verdict

__all__ = [
    "Acceptance",
    "Judgement",
    "conclude",
    "copy_float",
]


@dataclass(frozen=True)
class Acceptance:
    """What the user asks of a calibrated graph.

    Attributes:
        metric: a function of the graph that returns a number, more is better; None for none.
        at_least: the smallest value of the metric, or of the SQNR in dB without one; None for none.
    """

    metric: Callable[[Any], float] | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Judgement:
    """What was found about a calibrated graph.

    Attributes:
        diagnosis: the diagnosis; None if the graph could not be judged.
        cure: the recipe that removes the causes; "" for none.
        file: the verdict on the finished file and more samples; None if there is none.
    """

    diagnosis: Diagnosis | None = field(default=None, repr=False)
    cure: str = field(default="", repr=False)
    file: Verdict | None = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        """Whether the graph is not broken, and the user's limit is reached, if there is one."""
        verdict = self.verdict
        return verdict is None or (verdict.word != "broken" and verdict.passed)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None if the graph could not be judged."""
        return None if self.diagnosis is None else self.diagnosis.verdict

    def with_file(self, verdict: Verdict) -> Judgement:
        """Returns the judgement with the verdict on the finished file."""
        if self.diagnosis is None:
            return self
        merged = self.diagnosis.verdict.with_file(verdict)
        return replace(self, diagnosis=replace(self.diagnosis, verdict=merged), file=verdict)

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict and causes as plain data, in which numbers that JSON does not know are None."""
        if self.diagnosis is None:
            return {}
        causes = [asdict(cause) for cause in self.diagnosis.causes]
        file = {} if self.file is None else {"file_verdict": asdict(self.file)}
        plain: dict[str, Any] = finite_values(
            {"verdict": asdict(self.diagnosis.verdict), "causes": causes, **file}
        )
        return plain

    def write(self, folder: Path, figures: dict[str, Any]) -> None:
        """Writes the verdict with its causes and ``figures``, and the cure, into an unfinished folder."""
        if self.diagnosis is None:
            return
        text = json.dumps({**self.to_dict(), "figures": figures}, indent=2, allow_nan=False)
        (folder / VERDICT).write_text(text + "\n", encoding="utf-8")
        if self.cure:
            (folder / CURE).write_text(self.cure, encoding="utf-8")


def copy_float(prepared: TracedModule) -> TracedModule | None:
    """Copies the float graph if an algorithm of the recipe is going to change its weights; else None."""
    view = QuantizedModel(prepared)
    return float_twin(view) if late_algorithms(view.config) else None


def conclude(
    prepared: TracedModule,
    evaluation: EvaluationData,
    acceptance: Acceptance,
    reporter: Reporter,
    *,
    twin: TracedModule | None,
    samples: int | None,
    calibration: DataSource,
    record: SampleRecord | None = None,
    importing: str | None = None,
    run_file: Callable[[Sequence[Any]], Outputs] | None = None,
) -> Judgement:
    """Judges a calibrated graph.

    Args:
        prepared: the calibrated graph.
        evaluation: the samples to judge on.
        acceptance: what the user asks for.
        reporter: takes a warning if the graph cannot be judged.
        twin: the float graph as it was before algorithms of the recipe changed weights, from `copy_float`.
        samples: the number of samples of the calibration; None if it is not known.
        calibration: the data of the calibration.
        record: the samples that the calibration has read; None if they are not known.
        importing: the recipe, as the cure names it; None for a cure that imports none.
        run_file: returns the outputs of the file of the graph for batches; None to judge the graph itself.

    Raises:
        QtraceError: when the graph cannot be judged, and there is a limit.
    """
    try:
        if evaluation.seen:
            samples = count_samples(calibration)
        batches = evaluation.read(prepared)
        words, read = evaluation.measured_on, 1.0
        if not evaluation.seen:
            read = 0.0 if record is None else record.share(batches)
            words += f", {read:.0%} of which the calibration has read" if read else ""
        inputs = measure_inputs(first_batches(calibration)) if evaluation.other_data else ()
        diagnosis = diagnose(
            prepared,
            batches,
            twin=twin,
            calibrated=Calibrated(samples, inputs, read),
            metric=acceptance.metric,
            measured_on=words,
            at_least=acceptance.at_least,
            run_file=run_file,
            progress=reporter.progress,
        )
    except QtraceError as error:
        if acceptance.at_least is not None:
            raise
        reporter.warn(f"there is no verdict: {error}")
        return Judgement()
    return Judgement(diagnosis, diagnosis.recipe(importing))
