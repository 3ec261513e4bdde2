"""The one call: a network and data go in, a verified file comes out, or a sentence and no file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qtrace.calibration.calibrate import calibrate
from qtrace.config import QConfig
from qtrace.config.precision import is_precision
from qtrace.data import Batch, DataSource
from qtrace.data.base import batch_length
from qtrace.data.fingerprints import SampleRecord
from qtrace.data.values import without_labels
from qtrace.data.whole import describe_left_out, filled_batches, whole_batches
from qtrace.display import Displayed
from qtrace.errors import CalibrationError, ConfigError, ExportError
from qtrace.export import export
from qtrace.graph.opaque import find_random
from qtrace.graph.types import TracedModule
from qtrace.importing.onnx import declared_axes
from qtrace.inspection.explanation import Explanation, explain
from qtrace.plugins.arguments import check_arguments
from qtrace.preparation.faithfulness import Faithfulness
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.prepare import prepare
from qtrace.preparation.record import fake_quants
from qtrace.process.garbage import older_objects_spared
from qtrace.process.thread import on_engine_thread
from qtrace.quantizing.card import Card, make_card
from qtrace.quantizing.delivering import Delivery, compare_with_own, fixed_timer, measure_file
from qtrace.quantizing.evaluation import (
    EvaluationData,
    check_values,
    choose_evaluation,
    count_values,
    estimate_samples,
    hold_back_samples,
    shorten,
)
from qtrace.quantizing.float_file import FloatFile
from qtrace.quantizing.judging import Acceptance, Judgement, conclude, copy_float
from qtrace.quantizing.judging_file import judge_file, open_for_verdict
from qtrace.quantizing.labels import labels_of
from qtrace.quantizing.measuring import prepare_measured
from qtrace.quantizing.original import open_original
from qtrace.quantizing.placing import TimingPlan
from qtrace.quantizing.reporting import LogReporter, Reporter
from qtrace.quantizing.sources import fixed_batch, only_batch, own_file, read_network
from qtrace.quantizing.stage import DataReading, note_pixels, open_source
from qtrace.quantizing.stages import StageTimes
from qtrace.quantizing.targets import choose_config, format_of
from qtrace.quantizing.times import Times
from qtrace.runtimes.files import check_host
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.sensitivity.metrics import Outputs
from qtrace.sensitivity.mixed import mixed_precision
from qtrace.sensitivity.searching import Goal
from qtrace.storage.outputs import argument, output_file
from qtrace.verification.report import VerifyReport
from qtrace.verification.runtimes.litert import find_fixed_batch
from qtrace.verification.verify import verify as verify_file

__all__ = ["Quantized", "quantize"]

# How much data a file is verified on: two batches at least, all that the verdict has, and one batch for four
# of the calibration, up to a number of values of the inputs (eight images of a usual classifier). Batches of
# larger images are cut, to two samples at least: the second one shows what the file does with several. Counts
# of batches and samples, not a time: the verdict is the same on a busy machine.
_VERIFIED_VALUES, _LEAST_VERIFIED, _CALIBRATED_PER_VERIFIED = 8 * 3 * 224 * 224, 2, 4
_LEAST_SAMPLES = 2


@dataclass(frozen=True, repr=False)
class Quantized(Displayed):
    """The result of ``qtrace.quantize``.

    Attributes:
        path: the file.
        judgement: the verdict with its causes, and the recipe that cures them.
        verify: the report of the file's run beside the graph; None if it was not run.
        prepared: the calibrated graph, to be trained on.
        converted: the graph that was exported, in float if `delivery` says so.
        raised: the layers that stay in float to keep the metric.
        traced: the float network.
        data: the name of the calibration data.
        delivery: what was measured of the quantized file beside float, and which of both was written: float
            if it is faster here, unless the config asks for the quantized one.
        seconds: name of a stage -> its time in seconds.
        runtime_host: the interpreter or machine that has the runtime; None for this one.
    """

    path: Path
    judgement: Judgement
    verify: VerifyReport | None
    prepared: TracedModule
    converted: TracedModule
    raised: tuple[str, ...] = ()
    traced: TracedModule | None = None
    data: str = ""
    delivery: Delivery = field(default_factory=Delivery)
    seconds: Mapping[str, float] = field(default_factory=dict)
    runtime_host: RuntimeHost | None = None

    @cached_property
    def card(self) -> Card:
        """The card of the file, for people who take it; its time is measured when it is first asked for."""
        assert self.traced is not None
        return make_card(
            self.path,
            self.traced,
            self.converted,
            explain(self.delivery.prepared or self.prepared),
            verdict=None if self.delivery.in_float else self.verdict,
            verify=self.verify,
            data=self.data,
            stages=self.seconds,
            host=self.runtime_host,
        )

    def _text(self, max_width: int | None) -> str:
        return "\n".join(self.summary())

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the calibrated graph; None if it could not be judged.

        If `delivery` says that the file is in float, it is that of the quantized graph, which was left out.
        """
        return self.judgement.verdict

    def explain(self) -> Explanation:
        """Explains what became of each op of the file, as ``qtrace.explain`` does."""
        return explain(self.delivery.prepared or self.prepared)

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict, causes and what was measured, for JSON; apart, those of a graph left out."""
        judged = self.judgement.to_dict()
        if self.delivery.in_float:
            judged = {"quantized_and_not_written": judged}
        return {**judged, **self.delivery.to_dict()}

    def summary(self) -> list[str]:
        """Returns file, verdict with its causes, and what the runtime computed, a line each."""
        diagnosis, sentence = self.judgement.diagnosis, self.delivery.sentence()
        judged = list(diagnosis.lines()) if diagnosis is not None else ["no verdict"]
        if not any(fake_quants(self.prepared)):
            judged.append("no op of the file is on integers: `explain()` says why for each")
        if self.raised:
            judged.append(f"in float to keep the metric: {', '.join(self.raised)}")
        if self.delivery.in_float:
            judged[0] = f"of the quantized file, which was not written: {judged[0]}"
            lines = [f"{self.path}", sentence, *judged]
        else:
            lines = [f"{self.path}", *judged, *([sentence] if sentence else [])]
        if self.verify is None:
            return [*lines, "verify: not run"]
        client = [f"  {self.verify.client}"] if self.verify.client else []
        return [*lines, "verify: the runtime computes what the graph computes", *client]


@dataclass(frozen=True)
class _Data:
    """The data of a call, for calibration, judgement and verification, and the times of its stages."""

    calibration: DataSource
    evaluation: EvaluationData
    batch_size: int
    times: StageTimes

    def with_samples_held_back(self, model: TracedModule) -> _Data:
        """Holds samples back where no batch could be, and checks those of the verdict.

        Raises:
            CalibrationError: when a batch of the verdict does not fit the model, or holds NaN or infinity.
        """
        data = self
        if self.evaluation.seen and (parts := hold_back_samples(self.calibration, model)) is not None:
            data = replace(self, calibration=parts[0], evaluation=parts[1])
        if not data.evaluation.seen:
            data.evaluation.check(model, data.calibration)
        return data


@dataclass(frozen=True)
class _Calibrated:
    """A calibrated graph, its float copy and the samples that it has read, and what was found about it."""

    prepared: TracedModule
    twin: TracedModule | None
    record: SampleRecord
    judgement: Judgement = field(default_factory=Judgement)
    raised: tuple[str, ...] = ()


@check_arguments
@on_engine_thread
@older_objects_spared()
def quantize(
    source: Any,
    data: Any,
    out: str | os.PathLike[str],
    *,
    target: str | None = None,
    recipe: QConfig | str | Path | Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    metric: Callable[[TracedModule], float] | None = None,
    at_least: float | None = None,
    max_drop: float | None = None,
    evaluation: Any = None,
    batch_size: int = 8,
    max_batches: int | None = None,
    skip_bad: bool = False,
    verify: bool = True,
    measure: bool = True,
    keep: bool = False,
    times: str | os.PathLike[str] | None = None,
    allow_broken: bool = False,
    force: bool = False,
    progress: bool = True,
    allow: Sequence[str] = (),
    runtime_host: RuntimeHost | None = None,
    reporter: Reporter | None = None,
    spell: Callable[[str], str] = argument,
) -> Quantized:
    """Quantizes a network to a file for a runtime: imports or traces, calibrates, exports, verifies, judges.

    The file appears only if the verdict is not ``broken``, the limits hold, and the runtime computes what
    the graph computes. Values of a batch behind the inputs that look like labels are left out; the logger
    ``qtrace`` names them.

    Args:
        source: the path of an .onnx file, or of an .mge file of ``qtrace.save``; a Module, which is traced on
            the first batch; a module of torch, which torch exports on it; or a TracedModule.
        data: an array or a dict of arrays, whose first axis counts the samples; a list of batches, an object
            whose ``__iter__`` begins anew (a DataLoader), or a function that returns an iterable; or the path
            of an .npy or .npz file, a folder of images, or ``pkg.mod:loader``.
        out: the file to write. Its suffix says the format: .onnx, .tflite, .param (ncnn), .mge (MegEngine).
        target: the name of a backend, such as ``onnxruntime`` or ``tensorrt``; None for the recipe's, or else
            that of the suffix.
        recipe: the config, as for ``qtrace.prepare``; None for the default of the target.
        shapes: the shapes of inputs that an ONNX file leaves open; None for those of the first batch.
        metric: a function of the graph that returns a number; more is better.
        at_least: the smallest value of ``metric``, or of the SQNR in dB without one.
        max_drop: how far ``metric`` may be below its value in float: layers are raised to float until it
            holds.
        evaluation: other data to judge and verify on; None for a batch that is held back if there are 4 or
            more, or for a quarter of the samples of arrays, 8 at least, else for the first batches.
        batch_size: samples in a batch of arrays, files and images.
        max_batches: the most batches to calibrate on; None for all.
        skip_bad: whether to leave out unreadable images.
        verify: whether to run the file in its runtime beside the graph.
        measure: whether to measure where the runtime runs here: labellings of a ``balanced`` placement before
            one of them is calibrated, and the file beside float. If it is slower beyond the spread, and the
            placement is ``balanced`` or ``fastest``, the file is in float.
        keep: whether to write the quantized file though it is slower than float; a ``recipe`` that is a
            precision, such as ``w8a8``, asks for it, too.
        times: a file of measured times. If it exists, they decide, and nothing is measured, so that another
            machine gives the same file; else what is measured is written there.
        allow_broken: whether to write the file though the verdict is ``broken``, or all values of the data
            are alike.
        force: whether to replace a file that qtrace did not write.
        progress: whether to show progress bars on stderr.
        allow: the user's classes that an .mge file may name.
        runtime_host: the interpreter or machine that has the runtime: placements and the file are measured
            there, and the file is verified there. None for this interpreter.
        reporter: takes notes and warnings; None for the logger ``qtrace``.
        spell: writes the names of options in messages; see `qtrace.storage.outputs.argument`.

    Raises:
        CalibrationError: when the verdict is ``broken``, a limit does not hold, or all values of the data are
            alike.
        ExportError: when the graph has no such form, or the runtime computes something else.
        GraphError: when the float graph computes something else than the network on samples of the data, or
            a call of the network changes the results of the next ones.
        QtraceError: when network, data, recipe or path are at fault.
    """
    reporter, path = reporter or LogReporter(progress), Path(out)
    config = choose_config(target, recipe, path)
    if metric is not None and not callable(metric):
        raise ConfigError(
            f"{spell('metric')} is {metric!r}: give a function of the graph that returns a number."
        )
    if max_drop is not None and metric is None:
        raise ConfigError(f"{spell('max_drop')} limits what a metric loses: give {spell('metric')}, too.")
    if runtime_host is not None:
        check_host(runtime_host, path)
    with output_file(path, force=force) as partial:
        reading = DataReading(batch_size, max_batches, skip_bad)
        opened = _open(source, data, evaluation, reading, config, reporter, spell)
        stages = opened.times
        if not allow_broken:
            check_values(opened.calibration, spell)
        with stages.measure("import"):
            keeps_nodes = path.suffix.lower() == ".onnx"
            traced = read_network(source, opened.calibration, shapes, allow, keeps_nodes)
            size = fixed_batch(traced, next(iter(opened.calibration)))
            if size is not None:
                reading = replace(reading, batch_size=size)
            else:
                size = only_batch(traced, opened.calibration, opened.evaluation.source)
            if size is not None:
                opened = _open(source, data, evaluation, reading, config, reporter, spell, size)
                opened = replace(opened, times=stages)
                shown = "one sample" if size == 1 else f"{size} samples"
                reporter.note(f"a batch has {shown}, as the network takes no others")
            opened = opened.with_samples_held_back(traced)
            original = Faithfulness(open_original(source, traced), traced, opened.calibration)
        acceptance = Acceptance(metric, at_least)
        taken = Times.open(None if times is None else Path(times))
        kept = keep or is_precision(recipe)
        measurement = TimingPlan(taken, host=runtime_host, keep=kept) if measure else None
        result = _calibrate(traced, config, opened, reporter, measurement, original)
        judges_graph = metric is not None or not verify
        if judges_graph:
            result = _judge(result, opened, acceptance, reporter)
        if max_drop is not None:
            with stages.measure("raise layers"):
                result = _keep_metric(
                    traced, config, opened, acceptance, max_drop, reporter, result, original
                )
            if result.raised:
                taken.forget_placement()
                reporter.note("the measured placement is left, as layers were raised to float")
        _check(result, allow_broken, spell)
        with stages.measure("export"):
            converted = convert(result.prepared)
            export(converted, partial, format=format_of(config))
        report = _verify(partial, path, converted, result.prepared, opened, runtime_host) if verify else None
        if not judges_graph:
            run_file = None
            if any(
                fake_quants(result.prepared)
            ):  # a graph in float is exact, and its file but for the order of sums
                size = _batch_of_file(partial)
                run_file = open_for_verdict(partial, converted, config.backend, runtime_host, size)
            result = _judge(result, opened, acceptance, reporter, run_file)
            _check(result, allow_broken, spell)
        with FloatFile(traced, config, path.suffix) as twin:
            delivery = Delivery()
            if measure:
                timer = fixed_timer(taken.files) if taken.fixed else None
                with stages.measure("measure the file"):
                    delivery = measure_file(
                        partial,
                        result.prepared,
                        twin,
                        keep=kept,
                        timer=timer,
                        labellings=taken.labellings,
                        host=runtime_host,
                    )
                taken.files = delivery.files
                taken.write()
            if delivery.prepared is not None:
                converted = convert(delivery.prepared)
                export(converted, partial, format=format_of(config))
                if verify:
                    report = _verify(partial, path, converted, delivery.prepared, opened, runtime_host)
            elif verify and metric is None:
                result = _judge_file(partial, converted, twin, opened, result, runtime_host)
                _check(result, allow_broken, spell)
        own = own_file(source)
        if measure and own is not None and not taken.fixed:
            with stages.measure("measure the file"):
                delivery = compare_with_own(delivery, partial, own, traced, config, runtime_host)
    origin = opened.calibration.source
    return Quantized(
        path,
        result.judgement,
        report,
        result.prepared,
        converted,
        result.raised,
        traced,
        origin,
        delivery,
        stages.seconds,
        runtime_host,
    )


def _open(
    source: Any,
    data: Any,
    evaluation: Any,
    reading: DataReading,
    config: QConfig,
    reporter: Reporter,
    spell: Callable[[str], str],
    size: int | None = None,
) -> _Data:
    """Opens the data without labels, and holds batches back for the verdict.

    With a ``size`` the batches that have another number of samples are left out. Batches of the user's own of
    which already the first one has another one stay, to be refused as they are.
    """
    opened = open_source(data, reporter, config, reading)
    labels = labels_of(source, next(iter(opened)))
    note_pixels(opened, config.preprocess, reporter)
    if labels:
        shown = ", ".join(f"value {label}" if isinstance(label, int) else label for label in labels)
        reporter.warn(f"{opened.source}: taken for labels and left out of each batch: {shown}")

    def reopen(values: Any) -> DataSource:
        return open_source(values, LogReporter(), config, reading.whole)

    calibration = without_labels(opened, labels)
    if size is not None and not calibration.cut and batch_length(next(iter(calibration))) != size:
        size = None
    calibration = _in_whole_batches(calibration, size, reporter)
    other = None
    if evaluation is not None:  # it may have labels where the data have none
        other = reopen(evaluation)
        first = next(iter(other), None)
        other = without_labels(other, () if first is None else labels_of(source, first))
        other = _in_whole_batches(other, size, reporter)

    def whole() -> DataSource:
        return whole_batches(without_labels(reopen(data), labels), size)

    chosen = choose_evaluation(calibration, whole, other, spell)
    calibration.max_batches = chosen.max_batches
    return _Data(calibration, chosen, reading.batch_size, StageTimes())


def _in_whole_batches(source: DataSource, size: int | None, reporter: Reporter) -> DataSource:
    """Leaves out the batches that have other than ``size`` samples, with a note; none if it is None."""
    if words := describe_left_out(source, size):
        reporter.note(f"{source.source}: {words}")
    return whole_batches(source, size)


def _calibrate(
    traced: TracedModule,
    config: QConfig,
    data: _Data,
    reporter: Reporter,
    measurement: TimingPlan | None,
    original: Faithfulness,
) -> _Calibrated:
    """Prepares and calibrates."""
    with data.times.measure("prepare"):
        prepared = prepare_measured(
            traced, config, data.calibration, lambda: data.evaluation.read(traced), measurement, reporter
        )
        original.check(prepared)
    return _calibrate_prepared(prepared, data, reporter)


def _calibrate_prepared(prepared: TracedModule, data: _Data, reporter: Reporter) -> _Calibrated:
    source = data.calibration
    twin, record = copy_float(prepared), SampleRecord(source)
    with data.times.measure("calibrate"):
        calibrate(prepared, source, progress=reporter.progress)
    return _Calibrated(prepared, twin, record)


def _judge(
    result: _Calibrated,
    data: _Data,
    acceptance: Acceptance,
    reporter: Reporter,
    run_file: Callable[[Sequence[Batch]], Outputs] | None = None,
) -> _Calibrated:
    """Judges a calibrated graph, by its file if that is there."""
    with data.times.measure("judge"):
        judgement = conclude(
            result.prepared,
            data.evaluation,
            acceptance,
            reporter,
            twin=result.twin,
            samples=estimate_samples(data.calibration),
            calibration=data.calibration,
            record=result.record,
            run_file=run_file,
        )
    return replace(result, judgement=judgement)


def _keep_metric(
    traced: TracedModule,
    config: QConfig,
    data: _Data,
    acceptance: Acceptance,
    max_drop: float,
    reporter: Reporter,
    result: _Calibrated,
    original: Faithfulness,
) -> _Calibrated:
    """Raises layers to float until the metric is at most ``max_drop`` below its value in float."""
    verdict = result.judgement.verdict
    if verdict is None or verdict.metric is None or verdict.float_metric is None:
        raise CalibrationError(
            "the graph could not be judged, so its metric is not known: nothing was written."
        )
    if verdict.float_metric - verdict.metric <= max_drop:
        return result
    found = mixed_precision(
        traced,
        config,
        data.calibration,
        goal=Goal(max_drop=max_drop),
        evaluation=data.evaluation.read(traced),
        own=acceptance.metric,
        progress=reporter.progress,
    )
    if not found.passed:
        raise CalibrationError(
            f"no choice of layers in float keeps the metric within {max_drop:g} of {found.in_float:.4g}, the "
            f"best has {found.reached:.4g}: nothing was written."
        )
    raised = tuple(layer.name for layer in found.layers)
    prepared = prepare(traced, found.qconfig, samples=data.calibration, progress=reporter.progress)
    if not any(fake_quants(prepared)):
        raise CalibrationError(
            f"the metric is within {max_drop:g} of {found.in_float:.4g} only with every layer in float: "
            "nothing was written."
        )
    original.check(prepared)
    again = _judge(_calibrate_prepared(prepared, data, reporter), data, acceptance, reporter)
    return replace(again, raised=raised)


def _check(result: _Calibrated, allow_broken: bool, spell: Callable[[str], str]) -> None:
    """Refuses a graph that is broken, or that breaks a limit of the user."""
    diagnosis = result.judgement.diagnosis
    if diagnosis is None:
        return
    verdict = diagnosis.verdict
    if verdict.word == "broken" and not allow_broken:
        if name := find_random(result.prepared):
            raise CalibrationError(
                f"nothing was written, as {name} draws random numbers, which count as noise beside those of "
                f"float ({verdict.line()}): make them an input of the network, or write it all the same with "
                f"{spell('allow_broken')}."
            )
        if verdict.lowered:  # the causes are those of a graph that was not found to be broken
            raise CalibrationError(
                f"nothing was written, as the file is useless ({verdict.line()}): calibrate on more samples "
                f"like those that it loses, or write it all the same with {spell('allow_broken')}."
            )
        recipe = diagnosis.recipe()
        cure = f" A recipe that cures it:\n{recipe}" if recipe else ""
        raise CalibrationError(
            f"nothing was written, as the graph is useless ({'; '.join(map(str.strip, diagnosis.lines()))}): "
            f"cure the first cause, or write it all the same with {spell('allow_broken')}.{cure}"
        )
    if not verdict.passed:
        raise CalibrationError(f"nothing was written, as a limit does not hold ({verdict.line()}).")


def _judge_file(
    partial: Path,
    converted: TracedModule,
    twin: FloatFile,
    data: _Data,
    result: _Calibrated,
    host: RuntimeHost | None,
) -> _Calibrated:
    """Judges the file on more samples than the graph; the worse word is that of both."""
    judgement = result.judgement
    if judgement.verdict is None or not any(fake_quants(result.prepared)):
        return result
    with data.times.measure("judge the file"):
        judged = data.evaluation.read(result.prepared)
        batches = itertools.chain(judged, data.evaluation.unread(data.calibration, judged))
        verdict = judge_file(partial, converted, twin, batches, host, _batch_of_file(partial))
    return result if verdict is None else replace(result, judgement=judgement.with_file(verdict))


def _verified_batches(data: _Data, prepared: TracedModule) -> list[Batch]:
    """Returns the batches of the verdict, then those of the calibration, up to the bounds of verification."""
    judged, calibrated = data.evaluation.read(prepared), data.calibration
    share = len(calibrated) // _CALIBRATED_PER_VERIFIED if hasattr(calibrated, "__len__") else 0
    count = max(_LEAST_VERIFIED, len(judged), share)
    chosen, values = list[Batch](), 0
    for index, batch in enumerate(itertools.chain(judged, data.evaluation.unread(calibrated, judged))):
        most = _VERIFIED_VALUES // _LEAST_VERIFIED * batch_length(batch) // max(count_values(batch), 1)
        chosen.append(shorten(batch, prepared, index, max(most, _LEAST_SAMPLES)))
        values += count_values(chosen[-1])
        if len(chosen) >= _LEAST_VERIFIED and (values >= _VERIFIED_VALUES or len(chosen) >= count):
            break
    return chosen


def _batch_of_file(path: Path) -> int | None:
    """Returns the batch that a file takes alone; None if it takes any, or its format runs single samples."""
    if path.suffix.lower() == ".tflite":
        return find_fixed_batch(path)
    if path.suffix.lower() != ".onnx":
        return None
    firsts = {sizes[0] for sizes in declared_axes(path).values() if sizes}
    size = firsts.pop() if len(firsts) == 1 else None
    return size if isinstance(size, int) else None


def _verify(
    partial: Path,
    path: Path,
    converted: TracedModule,
    prepared: TracedModule,
    data: _Data,
    host: RuntimeHost | None,
) -> VerifyReport:
    """Runs the file beside the graph.

    Raises:
        ExportError: when the runtime computes something else.
    """
    with data.times.measure("verify"):
        batches = _verified_batches(data, prepared)
        if (size := _batch_of_file(partial)) is not None:
            batches = [part for batch in batches for part in filled_batches(batch, size)]
        report = verify_file(partial, converted, batches, runtime_host=host)
    if not report.passed and (name := find_random(converted)):
        raise ExportError(
            f"{path.name} was not written, as {name} draws random numbers, of which no two runs have the "
            "same, and the file cannot be compared with the graph: make them an input of the network, or "
            "give verify=False (--no-verify)."
        )
    if not report.passed:
        raise ExportError(
            f"{path.name} was not written, as its runtime computes something else than the graph:\n"
            f"{report.table()}"
        )
    report.path = str(path)
    return report
