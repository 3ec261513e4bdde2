"""The verdict on a calibrated graph and on its file.

The graph is judged on the few samples that were held back, as its interpreter is slow. Heavy tails, rare
events and a soft-argmax that jumps show on more of them. The samples of the calibration are among those: a
file that has lost something on them has lost it on others, too.

A written file runs next to its graph first, which takes less data.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.comparing.groups import find_groups
from qtrace.comparing.selections import reaching
from qtrace.comparing.sums import Outputs, finite_values
from qtrace.data.base import Batch, DataSource, SampleRecord, batch_length
from qtrace.data.batches import ENOUGH_SAMPLES, MOST_VALUES
from qtrace.data.opening import filled_batches
from qtrace.errors import ExportError, QtraceError, VerifyError
from qtrace.graph.opaque import find_random
from qtrace.graph.types import TracedModule
from qtrace.importing.onnx import declared_axes
from qtrace.inspection.twin import float_twin, late_algorithms
from qtrace.onnxfile.local_session import LocalSession
from qtrace.preparation.model import QuantizedModel
from qtrace.process import Together
from qtrace.quantizing.call_data import (
    CallData,
    EvaluationData,
    count_samples,
    count_values,
    first_batches,
    shorten,
)
from qtrace.quantizing.file_runs import FileRuns, FloatFile, input_values, open_runs, run_batch
from qtrace.quantizing.reporting import CURE, VERDICT, Reporter
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis import (
    Calibrated,
    Diagnosis,
    JudgedOutputs,
    diagnose,
    find_repeated,
    find_single_numbers,
    judge_outputs,
    measure_inputs,
)
from qtrace.sensitivity.diagnosis.verdict import MANY_SAMPLES, Verdict
from qtrace.verification.report import VerifyReport
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.verify import verify as verify_file

# The verdict on a calibrated graph, and what the user asks of it.


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


# The verdict once more, on the finished file compared with the float file, and on more samples.

# How much data a file is verified on: two batches, all that the verdict has, and one batch for four of the
# calibration, up to a number of values of the inputs (two images of a usual classifier). Batches of larger
# images are cut, to two samples at least: the second one shows what the file does with several. Counts of
# batches and samples, not a time: the verdict is the same on a busy machine.
_VERIFIED_VALUES, _LEAST_VERIFIED, _CALIBRATED_PER_VERIFIED = 2 * 3 * 224 * 224, 2, 4


def batch_of_file(path: Path) -> int | None:
    """Returns the only batch that a file takes; None if it takes any, or its format runs single samples."""
    if path.suffix.lower() != ".onnx":
        try:
            find = get_runtime(path).find_fixed_batch
        except ExportError:  # a runtime that is not installed, which is said where the file is run
            return None
        return None if find is None else find(path)
    firsts = {sizes[0] for sizes in declared_axes(path).values() if sizes}
    size = firsts.pop() if len(firsts) == 1 else None
    return size if isinstance(size, int) else None


def verify_written(
    partial: Path,
    path: Path,
    converted: TracedModule,
    prepared: TracedModule,
    data: CallData,
    host: RuntimeHost | None,
) -> VerifyReport:
    """Runs a file next to its graph, on the batches of the verdict and some of the calibration.

    Args:
        partial: the file as it was written.
        path: the path that it gets, for messages and the report.
        converted: the graph that it was exported from.
        prepared: that graph before `convert`.
        data: the data.
        host: the interpreter or machine that has the runtime; None for this one.

    Raises:
        VerifyError: when the runtime computes something else.
    """
    with data.times.measure("verify"):
        batches = _verified_batches(data, prepared)
        if (size := batch_of_file(partial)) is not None:
            batches = [part for batch in batches for part in filled_batches(batch, size)]
        report = verify_file(partial, converted, batches, runtime_host=host)
    if not report.passed and (name := find_random(converted)):
        raise ExportError(
            f"{path.name} was not written, as {name} draws random numbers, so the file cannot be verified: "
            "make them an input, or give verify=False (--no-verify)."
        )
    if not report.passed:
        raise VerifyError(
            f"{path.name} was not written, as its runtime computes something else than the graph:\n"
            f"{report.table()}"
        )
    report.path = str(path)
    return report


def _verified_batches(data: CallData, prepared: TracedModule) -> list[Batch]:
    """Returns the batches of the verdict, then calibration batches, up to the bounds of verification."""
    judged, calibrated = data.evaluation.read(prepared), data.calibration
    share = len(calibrated) // _CALIBRATED_PER_VERIFIED if hasattr(calibrated, "__len__") else 0
    count = max(_LEAST_VERIFIED, len(judged), share)
    chosen, samples, values = list[Batch](), 0, 0
    for index, batch in enumerate(itertools.chain(judged, data.evaluation.unread(calibrated, judged))):
        most = _VERIFIED_VALUES // _LEAST_VERIFIED * batch_length(batch) // max(count_values(batch), 1)
        chosen.append(shorten(batch, prepared, index, max(most, _LEAST_VERIFIED)))
        samples, values = samples + batch_length(chosen[-1]), values + count_values(chosen[-1])
        if samples >= _LEAST_VERIFIED and (values >= _VERIFIED_VALUES or len(chosen) >= count):
            break
    return chosen


# Counts of samples and values, not a time: the verdict is the same on a busy machine.
_MOST_OUTPUTS = 1 << 26  # values of either file, which are kept


def open_for_verdict(
    path: Path,
    converted: TracedModule,
    backend: str,
    host: RuntimeHost | None = None,
    size: int | None = None,
) -> Callable[[Sequence[Batch]], Outputs] | None:
    """Returns what runs a file in the place of its graph for the verdict: it is what users get, and faster.

    Args:
        path: the file, which `verify` has passed.
        converted: the graph that it was exported from.
        backend: the name of the backend that it is for.
        host: the interpreter or machine that has the runtime; None for this one.
        size: the only number of samples that the file takes; None if it takes any.

    Returns:
        A function from batches to the outputs of each; None where onnxruntime does not run the file here,
        where the file takes only one number of samples, and where rows are selected, as it does not tell
        their places.
    """
    if host is not None or size is not None or any(reaching(converted)):
        return None
    try:
        session = open_runs(path, converted, backend)
    except (QtraceError, ImportError):
        return None
    if not isinstance(session, LocalSession):
        return None

    def run(batches: Sequence[Batch]) -> Outputs:
        return [
            run_batch(session, input_values(converted, batch, number)) for number, batch in enumerate(batches)
        ]

    return run


def judge_file(
    path: Path,
    converted: TracedModule,
    twin: FloatFile,
    batches: Iterable[Batch],
    host: RuntimeHost | None = None,
    size: int | None = None,
) -> Verdict | None:
    """Returns the verdict on a file compared with the float file of its network.

    Args:
        path: the file.
        converted: the graph that it was exported from.
        twin: the network in float.
        batches: the samples, those that were held back first; up to 64 are read.
        host: the interpreter or machine that has the runtime; None for this one.
        size: the only number of samples that the file takes; None if it takes any.

    Returns:
        The verdict; None where rows are selected, whose places a file does not tell, and where no runtime
        here runs the file.
    """
    if any(reaching(converted)) or (host is not None and host.runner):
        return None
    try:
        own = open_runs(path, converted, twin.config.backend, host)
        return _judge(own, twin, list(_cut(batches, twin.traced, size)), host)
    except (QtraceError, ImportError):  # `verify` says what is wrong with a file that does not run
        return None


def _judge(
    own: FileRuns, twin: FloatFile, batches: Sequence[Batch], host: RuntimeHost | None
) -> Verdict | None:
    if not batches:
        return None
    traced = twin.traced
    inputs = [input_values(traced, batch, number) for number, batch in enumerate(batches)]
    counts = [batch_length(batch) for batch in batches]
    # A run takes one thread, so runs go beside each other, and beside MegEngine, which writes the float file
    # in this thread; other runtimes may take all cores.
    with Together(None if isinstance(own, LocalSession) else 1) as together:
        calls: list[Callable[[], Any]] = [
            lambda: open_runs(twin.path, twin.converted, twin.config.backend, host),
            lambda: _run_all(own, inputs, counts),
        ]
        exact, outputs = together.run(calls)
        reference = together.map(functools.partial(run_batch, exact), inputs[: len(outputs)])
    batches = batches[: len(reference)]
    compared = JudgedOutputs(
        find_groups(traced, reference),
        reference,
        outputs,
        counts[: len(reference)],
        find_repeated(batches),
        bool(find_single_numbers(batches)),
    )
    return judge_outputs(compared, "samples, those of the calibration too")


def _run_all(
    file: FileRuns, inputs: Sequence[Sequence[np.ndarray]], counts: Sequence[int]
) -> list[list[np.ndarray]]:
    """Returns the outputs of a file for batches, up to a number of values that are kept.

    Args:
        file: the file.
        inputs: the inputs of each batch.
        counts: the number of samples of each batch.
    """
    outputs: list[list[np.ndarray]] = []
    samples = values = 0
    for feeds, count in zip(inputs, counts, strict=True):
        outputs.append(run_batch(file, feeds))
        samples, values = samples + count, values + sum(v.size for v in outputs[-1])
        if values > _MOST_OUTPUTS and samples >= ENOUGH_SAMPLES:
            break
    return outputs


def _cut(batches: Iterable[Batch], traced: TracedModule, size: int | None) -> Iterator[Batch]:
    """Yields batches of `MANY_SAMPLES` samples together, fewer if they are large, of the size of a file."""
    samples = values = 0
    for number, batch in enumerate(batches):
        count = max(batch_length(batch), 1)
        fitting = (MOST_VALUES - values) * count // max(count_values(batch), 1)
        most = min(MANY_SAMPLES - samples, max(fitting, ENOUGH_SAMPLES - samples))
        if most <= 0:
            return
        shortened = shorten(batch, traced, number, most) if count > most else batch
        samples, values = samples + batch_length(shortened), values + count_values(shortened)
        yield from [shortened] if size is None else filled_batches(shortened, size)
