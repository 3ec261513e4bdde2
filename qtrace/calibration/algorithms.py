"""The last step of ``calibrate``: the algorithms of a config that work on the calibrated graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from qtrace.config.checking import Named, algorithms, check_imported
from qtrace.errors import CalibrationError
from qtrace.graph.flatten import flatten
from qtrace.graph.kernels import read_array, shared_copy
from qtrace.graph.stepping import SegmentEngine
from qtrace.graph.types import TracedModule
from qtrace.learning import LearningEngine
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.base import named_report
from qtrace.preparation.phases import switch_phase
from qtrace.ptq.base import Batches, CalibratedAlgorithm, CalibratedTask, Left
from qtrace.ptq.layers.outputs import CalibrationOutputs, output_errors
from qtrace.storage.checkpoints import Checkpoint

__all__ = ["calibrated_algorithms", "restoring", "run_calibrated"]


def calibrated_algorithms(model: QuantizedModel, batches: Any) -> tuple[Named, ...]:
    """Returns the algorithms that ``calibrate`` runs.

    Args:
        model: the prepared model.
        batches: the calibration data.

    Raises:
        CalibrationError: when the data cannot be read twice, or an algorithm changed the model before.
        ConfigError: when an algorithm lies in a module that is not imported.
    """
    check_imported(spec for _, spec in model.config.ptq_entries)
    selected = tuple((name, a) for name, a in algorithms(model.config) if a.stage == "calibrated")
    names = ", ".join(name for name, _ in selected)
    if selected and iter(batches) is batches:
        raise CalibrationError(
            f"batches is an iterator, which can be read once, but ptq: {names} reads the data again: give a "
            "list, or an object whose __iter__ begins anew."
        )
    earlier = {report["algorithm"] for report in model.ptq if report["changed"]}
    repeated = [name for name, _ in selected if name in earlier]
    if repeated:
        raise CalibrationError(
            f"{', '.join(repeated)} changed this model in an earlier calibration: prepare it again from the "
            "float model."
        )
    return selected


def run_calibrated(
    model: QuantizedModel,
    selected: tuple[Named, ...],
    batches: Batches,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    engine: SegmentEngine | None = None,
    learning: LearningEngine | None = None,
    threads: int | None = None,
) -> None:
    """Runs the algorithms of the calibrated stage and writes their reports into the record.

    Args:
        model: the calibrated model, in the phase ``quantize`` and in eval mode; it is changed in place.
        selected: the algorithms that `calibrated_algorithms` returned.
        batches: the calibration data.
        progress: whether to show progress bars.
        checkpoint: the storage of learned blocks; None to store none.
        engine: computes the values of layers where it can; None for MegEngine.
        learning: computes the steps of what is learned where it can; None for MegEngine.
        threads: number of threads that compute; None for all cores.
    """
    if not selected:
        return
    reference = flatten(model.module)
    switch_phase("float", model.view(reference))
    reference.eval()
    reports, before = [], None
    with CalibrationOutputs(model, reference, batches, engine, threads) as outputs:
        for name, algorithm in selected:
            assert isinstance(algorithm, CalibratedAlgorithm)
            subset = batches.spread(algorithm.samples)
            report = algorithm.apply(
                CalibratedTask(
                    model.module, reference, subset, progress, checkpoint, engine, learning, threads
                )
            )
            before = outputs.before if before is None else before
            after = outputs.ratios() if report.changed else before
            errors = output_errors(before, after)
            report = dataclasses.replace(report, outputs=errors, measured=outputs.measured)
            before = after
            if len(subset) < len(batches):
                reason = (
                    f"{len(subset)} of {len(batches)} batches were read, since samples is {algorithm.samples}"
                )
                report = dataclasses.replace(report, left=(*report.left, Left("", reason)))
            reports.append(named_report(report, name, algorithm))
    model.add_reports(*reports)


@contextmanager
def restoring(model: TracedModule) -> Iterator[None]:
    """Restores every parameter and buffer of ``model`` when the block fails."""
    before = [(tensor, shared_copy(tensor)) for _, tensor in model.named_tensors()]
    try:
        yield
    except BaseException:
        for tensor, value in before:
            if not np.array_equal(read_array(tensor), read_array(value), equal_nan=True):
                tensor._reset(value)
        raise
