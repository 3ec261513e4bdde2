"""The one call: a network and data go in, a verified file comes out, or a sentence and no file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.config import QConfig
from qtrace.config.checking import is_precision
from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.growth import describe_growth
from qtrace.plugins.arguments import check_arguments
from qtrace.preparation.faithfulness import Faithfulness
from qtrace.process.garbage import older_objects_spared
from qtrace.process.thread import on_engine_thread
from qtrace.quantizing.calibrator import Calibrator, refuse_broken
from qtrace.quantizing.call_data import DataOpener
from qtrace.quantizing.delivering import compare_with_own
from qtrace.quantizing.evaluation import check_values
from qtrace.quantizing.judging import Acceptance
from qtrace.quantizing.original import open_original
from qtrace.quantizing.placing import TimingPlan
from qtrace.quantizing.quantized import Quantized
from qtrace.quantizing.reporting import LogReporter, Reporter
from qtrace.quantizing.sources import own_file, read_network
from qtrace.quantizing.stage import DataReading
from qtrace.quantizing.targets import choose_config
from qtrace.quantizing.times import Times
from qtrace.quantizing.writing import FileWriter
from qtrace.runtimes.files import check_host
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.outputs import argument, output_file

__all__ = ["quantize"]


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
        CalibrationError: when all values of the data are alike.
        LimitError: when the verdict is ``broken``, or a limit does not hold.
        ExportError: when the graph has no such form.
        VerifyError: when the runtime computes something else.
        GraphError: when the float graph computes something else than the network on samples of the data, or
            a call of the network changes the results of the next ones.
        QtraceError: when network, data, recipe or path are at fault.
    """
    reporter, path = reporter or LogReporter(progress), Path(out)
    config = choose_config(target, recipe, path)
    _check_metric(metric, max_drop, spell)
    if runtime_host is not None:
        check_host(runtime_host, path)
    with output_file(path, force=force) as partial:
        reading = DataReading(batch_size, max_batches, skip_bad)
        opener = DataOpener(source, data, evaluation, reading, config, reporter, spell)
        opened = opener.open()
        stages = opened.times
        if not allow_broken:
            check_values(opened.calibration, spell)
        with stages.measure("import"):
            keeps_nodes = path.suffix.lower() == ".onnx"
            traced = read_network(source, opened.calibration, shapes, allow, keeps_nodes)
            opened = opener.open_for(traced, opened)
            original = Faithfulness(open_original(source, traced), traced, opened.calibration)
        measured = Times.open(None if times is None else Path(times))
        keep = keep or is_precision(recipe)
        plan = TimingPlan(measured, host=runtime_host, keep=keep) if measure else None
        calibrator = Calibrator(traced, config, opened, Acceptance(metric, at_least), reporter, original)
        refuse = functools.partial(refuse_broken, allow_broken=allow_broken, spell=spell)
        writer = FileWriter(partial, path, calibrator, refuse, measured, verify, measure, keep, runtime_host)
        result = calibrator.calibrate(plan)
        if not writer.judges_file:
            result = calibrator.judge(result)
        if max_drop is not None:
            with stages.measure("raise layers"):
                result = calibrator.keep_metric(result, max_drop)
            if result.raised:
                measured.forget_placement()
                reporter.note("the measured placement is left, as layers were raised to float")
        refuse(result)
        written = writer.write(result)
        delivery, own = written.delivery, own_file(source)
        if measure and own is not None and not measured.fixed:
            with stages.measure("measure the file"):
                delivery = compare_with_own(delivery, partial, own, traced, config, runtime_host)
        if own is not None and keeps_nodes:
            delivery = replace(delivery, growth=describe_growth(partial, own))
    return Quantized(
        path,
        written.result.judgement,
        written.report,
        written.result.prepared,
        written.converted,
        written.result.raised,
        traced,
        opened.calibration.source,
        delivery,
        stages.seconds,
        runtime_host,
    )


def _check_metric(
    metric: Callable[[TracedModule], float] | None, max_drop: float | None, spell: Callable[[str], str]
) -> None:
    """Refuses a metric that is no function, and a limit of a metric that is not given."""
    if metric is not None and not callable(metric):
        raise ConfigError(
            f"{spell('metric')} is {metric!r}: give a function of the graph that returns a number."
        )
    if max_drop is not None and metric is None:
        raise ConfigError(f"{spell('max_drop')} limits what a metric loses: give {spell('metric')}, too.")
