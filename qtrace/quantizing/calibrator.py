"""The calibrated graph of the one call, the verdict on it, and the layers that stay in float for a metric."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qtrace.calibration.calibrate import calibrate
from qtrace.comparing.sums import Outputs
from qtrace.config import QConfig
from qtrace.data import Batch
from qtrace.data.base import SampleRecord
from qtrace.errors import CalibrationError, LimitError
from qtrace.graph.opaque import find_random
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import float_twin
from qtrace.preparation.annotation import Preference
from qtrace.preparation.faithfulness import Faithfulness
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.preparation.passes.choosing import copy_with_weights
from qtrace.preparation.prepare import prepare_config, read_request
from qtrace.quantizing.call_data import CallData, estimate_samples
from qtrace.quantizing.file_runs import FloatFile
from qtrace.quantizing.judging import Acceptance, Judgement, batch_of_file, conclude, copy_float, judge_file
from qtrace.quantizing.reporting import Reporter
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.mixed import Goal, mixed_precision


@dataclass(frozen=True)
class CalibratedGraph:
    """A calibrated graph, its float copy and the samples that it has read, and what is known about it.

    Attributes:
        prepared: the graph.
        twin: its copy in float; None if there is none.
        record: the samples that it was calibrated on.
        judgement: the verdict, as soon as it was judged.
        raised: the layers that stay in float to keep the metric.
    """

    prepared: TracedModule
    twin: TracedModule | None
    record: SampleRecord
    judgement: Judgement = field(default_factory=Judgement)
    raised: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibrator:
    """Calibrates and judges a network.

    Attributes:
        traced: the float network.
        config: the config.
        data: the data.
        acceptance: the metric of the user, and its limit.
        reporter: takes notes and warnings.
        original: the network as it was given, with which each prepared graph is compared.
        prefer: the row that is taken, as for `calibrate`; None for what the config says.
    """

    traced: TracedModule
    config: QConfig
    data: CallData
    acceptance: Acceptance
    reporter: Reporter
    original: Faithfulness
    prefer: Preference | None = None

    def calibrate(self) -> CalibratedGraph:
        """Prepares and calibrates, and switches off what is not worth its noise."""
        return self._calibrate(self._prepare(self.config))

    def _prepare(self, config: QConfig) -> TracedModule:
        with self.data.times.measure("prepare"):
            samples, progress = self.data.calibration, self.reporter.progress
            config = read_request(self.traced, config, samples=samples)
            prepared = prepare_config(self.traced, config, samples, config, progress)
            self.original.check(prepared)
        return prepared

    def _calibrate(self, prepared: TracedModule) -> CalibratedGraph:
        source, progress = self.data.calibration, self.reporter.progress
        twin, record = copy_float(prepared), SampleRecord(source)
        with self.data.times.measure("calibrate"):
            reads = map(self.data.evaluation.read, (self.traced,))
            held_back = itertools.chain.from_iterable(reads)  # read if there is a choice
            calibrate(prepared, source, progress=progress, held_back=held_back, prefer=self.prefer)
        if twin is not None:
            twin = float_twin(QuantizedModel(copy_with_weights(prepared, twin)))
        return CalibratedGraph(prepared, twin, record)

    def judge(
        self, result: CalibratedGraph, run_file: Callable[[Sequence[Batch]], Outputs] | None = None
    ) -> CalibratedGraph:
        """Judges a calibrated graph, by its file if ``run_file`` runs that."""
        with self.data.times.measure("judge"):
            judgement = conclude(
                result.prepared,
                self.data.evaluation,
                self.acceptance,
                self.reporter,
                twin=result.twin,
                samples=estimate_samples(self.data.calibration),
                calibration=self.data.calibration,
                record=result.record,
                run_file=run_file,
            )
        return replace(result, judgement=judgement)

    def judge_file(
        self,
        result: CalibratedGraph,
        path: Path,
        converted: TracedModule,
        twin: FloatFile,
        host: RuntimeHost | None,
    ) -> CalibratedGraph:
        """Judges the file on more samples than the graph; the worse verdict counts.

        Args:
            result: the graph, which was judged.
            path: the file.
            converted: the graph that it was exported from.
            twin: the network in float.
            host: the interpreter or machine that has the runtime; None for this one.
        """
        judgement, evaluation = result.judgement, self.data.evaluation
        if judgement.verdict is None or not any(fake_quants(result.prepared)):
            return result
        with self.data.times.measure("judge the file"):
            judged = evaluation.read(result.prepared)
            batches = itertools.chain(judged, evaluation.unread(self.data.calibration, judged))
            verdict = judge_file(path, converted, twin, batches, host, batch_of_file(path))
        return result if verdict is None else replace(result, judgement=judgement.with_file(verdict))

    def keep_metric(self, result: CalibratedGraph, max_drop: float) -> CalibratedGraph:
        """Raises layers to float until the metric is at most ``max_drop`` below its value in float.

        Raises:
            CalibrationError: when the metric is not known.
            LimitError: when no choice of layers keeps it.
        """
        verdict = result.judgement.verdict
        if verdict is None or verdict.metric is None or verdict.float_metric is None:
            raise CalibrationError(
                "the graph could not be judged, so its metric is not known: nothing was written."
            )
        if verdict.float_metric - verdict.metric <= max_drop:
            return result
        mixed = mixed_precision(
            self.traced,
            self.config,
            self.data.calibration,
            goal=Goal(max_drop=max_drop),
            evaluation=self.data.evaluation.read(self.traced),
            own=self.acceptance.metric,
            progress=self.reporter.progress,
        )
        if not mixed.passed:
            raise LimitError(
                f"no choice of layers in float keeps the metric within {max_drop:g} of {mixed.in_float:.4g}, "
                f"the best has {mixed.reached:.4g}: nothing was written."
            )
        raised = tuple(layer.name for layer in mixed.layers)
        prepared = self._prepare(mixed.qconfig)
        if not any(fake_quants(prepared)):
            raise LimitError(
                f"the metric is within {max_drop:g} of {mixed.in_float:.4g} only with every layer in float: "
                "nothing was written."
            )
        return replace(self.judge(self._calibrate(prepared)), raised=raised)


def refuse_broken(result: CalibratedGraph, allow_broken: bool) -> None:
    """Refuses a graph that is broken, or that breaks a limit of the user.

    Args:
        result: the graph, and the verdict on it if there is one.
        allow_broken: whether to take a graph whose verdict is ``broken``.

    Raises:
        LimitError: when the graph is refused.
    """
    diagnosis = result.judgement.diagnosis
    if diagnosis is None:
        return
    verdict = diagnosis.verdict
    if verdict.word == "broken" and not allow_broken:
        if name := find_random(result.prepared):
            raise LimitError(
                f"nothing was written, as {name} draws random numbers, which count as noise "
                f"({verdict.describe()}): make them an input of the network, or set "
                f"allow_broken=True."
            )
        if verdict.has("file"):  # the causes are those of a graph that was not found to be broken
            raise LimitError(
                f"nothing was written, as the file is useless ({' '.join(verdict.lines())}): follow this, or "
                f"write it all the same with allow_broken=True."
            )
        recipe = diagnosis.recipe()
        cure = f" A recipe that cures it:\n{recipe}" if recipe else ""
        raise LimitError(
            f"nothing was written, as the graph is useless ({'; '.join(map(str.strip, diagnosis.lines()))}): "
            f"cure the first cause, or write it all the same with allow_broken=True.{cure}"
        )
    if not verdict.passed:
        raise LimitError(f"nothing was written, as a limit does not hold ({' '.join(verdict.lines())}).")
