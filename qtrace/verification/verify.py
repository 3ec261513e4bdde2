"""verify: runs an exported file in its real runtime and compares its integers with the graph's.

Two comparisons. *Op by op*: the graph computes every site from the integers that the runtime had for the
sites before it, so an error is seen at the op that makes it. *End to end*: both run from the same input.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qtrace.data.batches import evaluating
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.process.thread import on_engine_thread
from qtrace.verification.crosscheck import cross_check
from qtrace.verification.report import VerifyReport
from qtrace.verification.runs import File, OpByOp
from qtrace.verification.runtimes import get as get_runtime

__all__ = ["verify"]


@on_engine_thread
def verify(
    path: str | os.PathLike[str],
    converted: TracedModule,
    batches: Iterable[Any],
    *,
    runtime: str | None = None,
    optimized: bool = True,
    max_lsb: int = 1,
    min_equal: float = 0.999,
    min_sqnr_db: float = 35.0,
) -> VerifyReport:
    """Runs ``path`` in its runtime beside ``converted`` and compares integer by integer.

    Args:
        path: a file written by ``qtrace.export`` from ``converted``.
        converted: the converted module.
        batches: inputs as for ``qtrace.calibrate``.
        runtime: the name of the runtime; None for the one that the file is meant for.
        optimized: whether to also run the file with all graph optimizations, as it will be deployed.
        max_lsb: largest difference allowed at any site, op by op.
        min_equal: smallest share of equal values allowed over all sites, op by op.
        min_sqnr_db: smallest signal-to-noise ratio allowed at the outputs: at all of them together, end to
            end, and at each one computed from the runtime's own integers.

    Returns:
        A report; its ``passed`` says whether the tolerances hold.

    Raises:
        ExportError: when the file cannot be run or is not an export of ``converted``.
        CalibrationError: when there are no batches, or one does not fit the model or holds NaN.
    """
    chosen = get_runtime(Path(path), runtime)
    model = QuantizedModel(converted, "converted")
    file = File(Path(path), model, chosen.open(Path(path), False))
    deployed = chosen.open(Path(path), True) if optimized else None
    report = file.report(max_lsb, min_equal, min_sqnr_db)
    if optimized and chosen.kernels is not None:
        report.kernels = chosen.kernels(Path(path))
    count = 0
    with evaluating(converted):
        for run in file.run(batches, lambda file, integers: OpByOp(file, integers, report)):
            count += 1
            different = run.single.disagreement or file.find_wrong_output(run, min_sqnr_db)
            if report.cross_check is None and different is not None:
                check = cross_check(converted, run.arguments, run.single.values, different)
                report.cross_check = (different.node, check)
            run.graph.tally(run.runtime, "end_to_end", report, file.output_names)
            if deployed is not None:
                run.graph.tally(deployed.run(run.graph.inputs), "deployed", report, file.output_names)
    if count == 0:
        raise CalibrationError("verification data has no batches: give at least one.")
    return report
