"""Which file is delivered: the chosen one, or another if it is slower than what the user has.

The file of a calibrated graph is written and verified, judged, and measured next to the user's own, or float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qtrace.benchmarking.files import Speed, are_clear, compare_files
from qtrace.benchmarking.runners import RunnerSettings, can_time
from qtrace.config import QConfig, backends
from qtrace.errors import QtraceError
from qtrace.export import export
from qtrace.graph.interface import list_inputs
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.placement.labelling import LEAST_GAIN
from qtrace.quantizing.calibrator import CalibratedGraph, Calibrator
from qtrace.quantizing.file_runs import FloatFile
from qtrace.quantizing.judging import batch_of_file, open_for_verdict, verify_written
from qtrace.quantizing.targets import format_of
from qtrace.runtimes.child import MissingPackageError
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis.verdict import BROKEN_BELOW_DB
from qtrace.storage.files import naming
from qtrace.verification.report import VerifyReport

Timer = Callable[..., list[Speed]]
"""Measures files in turns, as `qtrace.benchmarking.files.compare_files` does."""


@dataclass(frozen=True)
class Delivery:
    """What was measured of a file next to another one, and which is delivered.

    Attributes:
        speed: the speed of the file; None if it was not measured.
        untimed: why it was not measured; "" if it was.
        prepared: the graph in float that is delivered instead; None for the file that was measured.
        reference: what the speed is measured against: "your file" or "float".
        reference_seconds: the median time of a run of the reference.
        host: the interpreter or command by which the files were measured; "" for this interpreter.
        slow_row: the row whose file was too slow, so that fastest is written; "" for none.
        growth: by how much the file is larger than the user's own, and why; "" if it is not.
    """

    speed: Speed | None = None
    untimed: str = ""
    prepared: TracedModule | None = None
    reference: str = "float"
    reference_seconds: float = 0.0
    host: str = ""
    slow_row: str = ""
    growth: str = ""

    @property
    def in_float(self) -> bool:
        """Whether the quantized file was measured to be too slow, and float is delivered."""
        return self.prepared is not None

    def sentence(self) -> str:
        """Says what was measured and delivered; "" if nothing was measured."""
        if self.speed is None:
            return f"speed: not measured, {self.untimed}" if self.untimed else ""
        times = f"{1e3 * self.speed.seconds:.3g} ms, {1e3 * self.reference_seconds:.3g} ms"
        text = f"speed: {self.speed.describe()}: {times} by {self.reference}, one thread"
        text += f", by {self.host}" if self.host else ""
        if self.in_float:
            text += (
                f"; the quantized file is slower than {self.reference} here, so the file is in float: "
                "`placement: small` in the recipe writes the quantized one for its size"
            )
        elif self.slow_row:
            text += f"; {self.slow_row} is slower than {self.reference} here, so fastest is written"
        elif self.speed.slower:
            text += f"; the file is slower than {self.reference} here"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures, for JSON."""
        facts: dict[str, Any] = {"speed": None, "not_timed": self.untimed}
        if self.speed is not None:
            seconds = {"reference_seconds": self.reference_seconds, "reference": self.reference}
            facts["speed"] = {**self.speed.to_dict(), **seconds}
        facts["delivered"] = "float" if self.in_float else "quantized"
        return {**facts, "measured_by": self.host} if self.host else facts


def timed_settings(
    traced: TracedModule, suffix: str = ".onnx", host: RuntimeHost | None = None
) -> RunnerSettings:
    """Returns how a file of a network is run to be timed: one thread, and the traced sizes for open axes.

    Args:
        traced: the network.
        suffix: the suffix of the file. A ``.param`` does not name shapes, and a ``.tflite`` is fixed to the
            traced ones, in another order of axes.
        host: the interpreter or machine that has the runtime; None for this one.
    """
    record = read_open_axes(traced)
    is_open = suffix == ".onnx" and record is not None and not record.only_batch()
    shapes = {name: tuple(int(n) for n in shape) for name, shape in list_inputs(traced)}
    return RunnerSettings(1, 1, shapes if is_open or suffix == ".param" else {}, host)


def measure_file(
    path: Path,
    prepared: TracedModule,
    twin: FloatFile,
    *,
    own: Path | None = None,
    keep: bool = False,
    timer: Timer | None = None,
    host: RuntimeHost | None = None,
) -> Delivery:
    """Measures a file next to the user's own one, or else next to float, and says what is to be delivered.

    Args:
        path: the file.
        prepared: the graph that it was exported from, before `convert`.
        twin: the float file of the network, which is written if it is needed.
        own: the user's own file; None if the network was no file.
        keep: whether the quantized file is delivered, however slow it is.
        timer: measures files in turns; None for `compare_files`.
        host: the interpreter or machine that has the runtime; None for this one.

    Raises:
        MissingPackageError: when the host lacks the runtime.
    """
    config = twin.config
    backend = backends.get(config.backend)
    quantized = any(fake_quants(prepared))
    is_own = own is not None and own.suffix == path.suffix
    if not quantized and not is_own:
        return Delivery(untimed="the file is in float")
    if backend.device or not can_time(path):
        return Delivery(untimed=f"no runtime here runs it as {backend.device or 'its target'} does")
    name = "" if host is None else str(host)
    try:
        settings = timed_settings(twin.traced, path.suffix, host)
        reference = own if is_own and own is not None else twin.path
        with naming(twin.folder):
            first, speed = (timer or compare_files)(
                [reference, path], runtime=backend.runtime or None, settings=settings, settled=are_clear
            )
    except QtraceError as error:
        if host is not None and isinstance(error, MissingPackageError):
            raise
        return Delivery(untimed=str(error).rstrip("."))
    # Here, CPUs are measured: a file in float16 is for other processors.
    replaceable = quantized and not keep and config.effective_float == "fp32" and rounds_for_speed(config)
    instead = twin.prepared if replaceable and is_too_slow(speed) else None
    return Delivery(speed, "", instead, "your file" if is_own else "float", first.seconds, name)


def is_too_slow(speed: Speed) -> bool:
    """Returns whether a file is slower by more than 5 % beyond doubt, which a busy machine adds to."""
    return speed.high * LEAST_GAIN < 1


def rounds_for_speed(config: QConfig) -> bool:
    """Returns whether a config asks for integers only where they are faster, not for their size.

    Some packaged recipes of targets round everything, as that is fastest there.
    """
    backend = backends.get(config.backend)
    stem = config.place("placement").rpartition(".yaml")[0]
    by_default = backend.rounds_for_speed and stem.endswith(f"recipes/backend/{backend.name}")
    return config.effective_placement in ("balanced", "fastest") or by_default


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written, and what is known about it.

    Attributes:
        result: the calibrated graph, and the verdict.
        converted: the graph that the file was exported from.
        report: the report of its run next to the graph; None if it was not run.
        delivery: what was measured of it compared with float, and which of both was written.
    """

    result: CalibratedGraph
    converted: TracedModule
    report: VerifyReport | None
    delivery: Delivery = field(default_factory=Delivery)


@dataclass(frozen=True)
class FileWriter:
    """Writes the file of a calibrated graph.

    Attributes:
        partial: the file.
        path: the path that it gets once all is well.
        calibrator: judges the graph by its file.
        refuse: raises an error if a graph is not to be written.
        verify: whether to run the file next to the graph.
        measure: whether to compare the file's speed with float.
        keep: whether to write the quantized file though it is slower than float.
        own: the user's own file; None if the network is no file.
        host: the interpreter or machine that has the runtime; None for this one.
    """

    partial: Path
    path: Path
    calibrator: Calibrator
    refuse: Callable[[CalibratedGraph], None]
    verify: bool
    measure: bool
    keep: bool
    own: Path | None
    host: RuntimeHost | None

    @property
    def judges_file(self) -> bool:
        """Whether the verdict is on the outputs of the file, not of the graph: a metric takes the graph."""
        return self.verify and self.calibrator.acceptance.metric is None

    def write(self, result: CalibratedGraph) -> WrittenFile:
        """Writes the file; if it is too slow and not asked for, the row above, or else float.

        Raises:
            LimitError: when the verdict on the file is refused.
            ExportError: when the graph lacks such a form.
            VerifyError: when the runtime computes something else.
        """
        with FloatFile(self.calibrator.traced, self.calibrator.config, self.path.suffix) as twin:
            written = self._write(result, twin)
            if written.delivery.in_float and (row := _row_above(result)):
                written = self._write_faster(twin, row) or written
            if (prepared := written.delivery.prepared) is not None:
                converted = self._export(prepared)
                return replace(written, converted=converted, report=self._verify(converted, prepared))
            if self.judges_file:
                result = self.calibrator.judge_file(
                    written.result, self.partial, written.converted, twin, self.host
                )
                self.refuse(result)
                written = replace(written, result=result)
        return written

    def _write(self, result: CalibratedGraph, twin: FloatFile) -> WrittenFile:
        """Writes, verifies, judges and measures the file of a graph."""
        with self.calibrator.data.times.measure("export"):
            converted = self._export(result.prepared)
        report = self._verify(converted, result.prepared)
        if self.judges_file:
            result = self._judge(result, converted)
        delivery = self._measure(result, twin) if self.measure else Delivery()
        return WrittenFile(result, converted, report, delivery)

    def _write_faster(self, twin: FloatFile, row: str) -> WrittenFile | None:
        """Writes the file of the row with all that gains time, in the place of one that was too slow.

        Args:
            twin: the network in float.
            row: the row whose file was too slow.

        Returns:
            The file; None if it is refused, or too slow as well.
        """
        writer = replace(self, calibrator=replace(self.calibrator, prefer="speed"))
        result = writer.calibrator.calibrate()
        try:
            if not self.judges_file:
                result = writer.calibrator.judge(result)
                self.refuse(result)
            written = writer._write(result, twin)
        except QtraceError:  # float is what is left
            return None
        if written.delivery.in_float:
            return None
        return replace(written, delivery=replace(written.delivery, slow_row=row))

    def _export(self, prepared: TracedModule) -> TracedModule:
        """Writes a graph, and returns it as it was written."""
        converted = convert(prepared)
        export(converted, self.partial, format=format_of(self.calibrator.config))
        return converted

    def _verify(self, converted: TracedModule, prepared: TracedModule) -> VerifyReport | None:
        if not self.verify:
            return None
        return verify_written(self.partial, self.path, converted, prepared, self.calibrator.data, self.host)

    def _judge(self, result: CalibratedGraph, converted: TracedModule) -> CalibratedGraph:
        """Judges the graph by its file, where that runs here."""
        run_file, backend = None, self.calibrator.config.backend
        # A graph in float is exact, and its file but for the order of sums.
        if any(fake_quants(result.prepared)):
            size = batch_of_file(self.partial)
            run_file = open_for_verdict(self.partial, converted, backend, self.host, size)
        result = self.calibrator.judge(result, run_file)
        self.refuse(result)
        return result

    def _measure(self, result: CalibratedGraph, twin: FloatFile) -> Delivery:
        """Compares the file's speed with the user's own one, or else with float."""
        with self.calibrator.data.times.measure("measure the file"):
            return measure_file(
                self.partial, result.prepared, twin, own=self.own, keep=self.keep, host=self.host
            )


def _row_above(result: CalibratedGraph) -> str:
    """Returns the row of a file if one above it is predicted to be faster, and not to be broken; else ""."""
    note = QuantizedModel(result.prepared).annotation.placement
    rows = {} if note is None or result.raised else {row.name: row for row in note.rows}
    if note is None or note.chosen not in rows:
        return ""
    above = [row for row in rows.values() if row.speed > rows[note.chosen].speed]
    good = any(row.sqnr is None or row.sqnr >= BROKEN_BELOW_DB for row in above)
    return note.chosen if good else ""
