"""The file of a calibrated graph: written and verified, judged, and measured beside float."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from qtrace.errors import LimitError
from qtrace.export import export
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.record import fake_quants
from qtrace.quantizing.calibrator import CalibratedGraph, Calibrator
from qtrace.quantizing.delivering import Delivery, measure_file
from qtrace.quantizing.float_file import FloatFile
from qtrace.quantizing.judging_file import open_for_verdict
from qtrace.quantizing.targets import format_of
from qtrace.quantizing.verifying import batch_of_file, verify_written
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis.verdict import BROKEN_BELOW_DB
from qtrace.verification.report import VerifyReport

__all__ = ["FileWriter", "WrittenFile"]


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written, and what is known about it.

    Attributes:
        result: the calibrated graph, and the verdict.
        converted: the graph that the file was exported from.
        report: the report of its run beside the graph; None if it was not run.
        delivery: what was measured of it beside float, and which of both was written.
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
        verify: whether to run the file beside the graph.
        measure: whether to measure the file beside float.
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
        """Writes the file; if it is too slow and not asked for, that of the row above, or else float.

        Raises:
            LimitError: when the verdict on the file is refused.
            ExportError: when the graph has no such form.
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
        except LimitError:
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
        if any(
            fake_quants(result.prepared)
        ):  # a graph in float is exact, and its file but for the order of sums
            size = batch_of_file(self.partial)
            run_file = open_for_verdict(self.partial, converted, backend, self.host, size)
        result = self.calibrator.judge(result, run_file)
        self.refuse(result)
        return result

    def _measure(self, result: CalibratedGraph, twin: FloatFile) -> Delivery:
        """Measures the file beside the user's own one, or else beside float."""
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
