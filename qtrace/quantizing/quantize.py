"""The one call: a network and data go in, a verified file comes out, or a sentence and no file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.config import QConfig
from qtrace.config.checking import is_precision
from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.external_data import describe_growth
from qtrace.plugins.options import check_arguments
from qtrace.preparation.annotation import Preference
from qtrace.preparation.faithfulness import Faithfulness
from qtrace.process import older_objects_spared, on_engine_thread
from qtrace.quantizing.calibrator import Calibrator, refuse_broken
from qtrace.quantizing.call_data import DataOpener, check_values
from qtrace.quantizing.delivering import FileWriter
from qtrace.quantizing.judging import Acceptance
from qtrace.quantizing.options import QuantizeOptions
from qtrace.quantizing.quantized import Quantized
from qtrace.quantizing.reporting import LogReporter, StageTimes
from qtrace.quantizing.sources import open_original, own_file, read_network
from qtrace.quantizing.targets import choose_config, prefer_placement, with_safe_bits
from qtrace.runtimes.child import check_host
from qtrace.storage.outputs import output_file


@check_arguments(options=QuantizeOptions)
@on_engine_thread
@older_objects_spared()
def quantize(
    source: Any,
    data: Any,
    out: str | os.PathLike[str],
    *,
    target: str | None = None,
    recipe: QConfig | str | Path | Mapping[str, Any] | None = None,
    metric: Callable[[TracedModule], float] | None = None,
    at_least: float | None = None,
    evaluation: Any = None,
    prefer: Preference | None = None,
    force: bool = False,
    progress: bool = True,
    **options: Any,
) -> Quantized:
    """Quantizes a network to a file for a runtime: imports or traces, calibrates, exports, verifies, judges.

    The file appears only if the verdict is not ``broken``, the limits hold, and the runtime computes what
    the graph computes. Values of a batch after the inputs that look like labels are left out; the logger
    ``qtrace`` names them.

    Args:
        source: the path of an .onnx file, or of an .mge file of ``qtrace.save``; a Module, which is traced on
            the first batch; a module of torch, which torch exports on it; or a TracedModule.
        data: an array or a dict of arrays, whose first axis counts the samples. Or a list of batches, an
            object whose ``__iter__`` begins anew (a DataLoader), or a function that returns an iterable. Or
            the path of an .npy or .npz file, a folder of images, or ``pkg.mod:loader``.
        out: the file to write. Its suffix says the format: .onnx, .tflite, .param (ncnn), .mge (MegEngine).
        target: the name of a backend, such as ``onnxruntime`` or ``tensorrt``; None for the recipe's, or else
            that of the suffix.
        recipe: the config, as for ``qtrace.prepare``; None for the default of the target.
        metric: a function of the graph that returns a number; more is better.
        at_least: the smallest value of ``metric``, or of the SQNR in dB without one.
        evaluation: other data to judge and verify on; None for a quarter of the samples, 16 at most. They
            are held back if there are 8 samples or more; else the first ones serve.
        prefer: ``speed`` keeps all on integers that gains time, ``balanced`` what is worth its noise, and
            ``accuracy`` nothing; None for what ``placement`` of the recipe says.
        force: whether to replace a file that qtrace did not write.
        progress: whether to show progress bars on stderr.
        **options: more options, the fields of `QuantizeOptions`.

    Raises:
        CalibrationError: when all values of the data are alike.
        LimitError: when the verdict is ``broken``, or a limit does not hold.
        ExportError: when the graph lacks such a form.
        VerifyError: when the runtime computes something else.
        GraphError: when the float graph computes something else than the network on samples of the data, or
            a call of the network changes the results of the next ones.
        QtraceError: when network, data, recipe or path are at fault.
    """
    given, reporter, path = QuantizeOptions(**options), LogReporter(progress), Path(out)
    host, max_drop = given.runtime_host, given.max_drop
    config = choose_config(target, recipe, path)
    config = with_safe_bits(prefer_placement(config, prefer), host)
    _check_metric(metric, max_drop)
    if host is not None:
        check_host(host, path)
    with output_file(path, force=force) as partial:
        opener, stages = DataOpener(source, data, evaluation, given, config, reporter), StageTimes()
        if not given.allow_broken:
            check_values(opener.given)
        with stages.measure("import"):
            keeps_nodes = path.suffix.lower() == ".onnx"
            traced, opened = opener.open(
                lambda data: read_network(source, data, given.shapes, given.allow, keeps_nodes)
            )
            opened = replace(opened, times=stages)
            original = Faithfulness(open_original(source, traced), traced, opened.calibration)
        keep = given.keep or is_precision(recipe)
        acceptance = Acceptance(metric, at_least)
        calibrator = Calibrator(traced, config, opened, acceptance, reporter, original, prefer)
        refuse = functools.partial(refuse_broken, allow_broken=given.allow_broken)
        own = own_file(source)
        writer = FileWriter(partial, path, calibrator, refuse, given.verify, given.measure, keep, own, host)
        result = calibrator.calibrate()
        if not writer.judges_file:
            result = calibrator.judge(result)
        if max_drop is not None:
            with stages.measure("raise layers"):
                result = calibrator.keep_metric(result, max_drop)
        refuse(result)
        written = writer.write(result)
        delivery = written.delivery
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
        host,
    )


def _check_metric(metric: Callable[[TracedModule], float] | None, max_drop: float | None) -> None:
    """Refuses a metric that is no function, and a limit of a metric that is not given."""
    if metric is not None and not callable(metric):
        raise ConfigError(f"metric= is {metric!r}: give a function of the graph that returns a number.")
    if max_drop is not None and metric is None:
        raise ConfigError("max_drop= limits what a metric loses: give metric=, too.")
