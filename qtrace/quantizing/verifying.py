"""The run of a written file beside its graph, and how much data that takes."""

from __future__ import annotations

import itertools
from pathlib import Path

from qtrace.data import Batch
from qtrace.data.base import batch_length
from qtrace.data.whole import filled_batches
from qtrace.errors import ExportError, VerifyError
from qtrace.graph.opaque import find_random
from qtrace.graph.types import TracedModule
from qtrace.importing.onnx import declared_axes
from qtrace.quantizing.call_data import CallData
from qtrace.quantizing.evaluation import count_values, shorten
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.report import VerifyReport
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.verify import verify as verify_file

__all__ = ["batch_of_file", "verify_written"]

# How much data a file is verified on: two batches at least, all that the verdict has, and one batch for four
# of the calibration, up to a number of values of the inputs (two images of a usual classifier). Batches of
# larger images are cut, to two samples at least: the second one shows what the file does with several. Counts
# of batches and samples, not a time: the verdict is the same on a busy machine.
_VERIFIED_VALUES, _LEAST_VERIFIED, _CALIBRATED_PER_VERIFIED = 2 * 3 * 224 * 224, 2, 4
_LEAST_SAMPLES = 2


def batch_of_file(path: Path) -> int | None:
    """Returns the batch that a file takes alone; None if it takes any, or its format runs single samples."""
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
    """Runs a file beside its graph, on the batches of the verdict and some of the calibration.

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
            f"{path.name} was not written, as {name} draws random numbers, of which no two runs have the "
            "same, and the file cannot be compared with the graph: make them an input of the network, or "
            "give verify=False (--no-verify)."
        )
    if not report.passed:
        raise VerifyError(
            f"{path.name} was not written, as its runtime computes something else than the graph:\n"
            f"{report.table()}"
        )
    report.path = str(path)
    return report


def _verified_batches(data: CallData, prepared: TracedModule) -> list[Batch]:
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
