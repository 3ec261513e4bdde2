"""Size, MACs and predicted time of a calibrated graph and of an exported file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrace.display import format_bytes
from qtrace.errors import ConfigError, ExportError
from qtrace.quantizing.reporting import Reporter

if TYPE_CHECKING:
    from qtrace.costs import CostTable
    from qtrace.preparation.figures import Figures

_FLOAT_RUNTIME = "onnxruntime"  # runs the .onnx files of plain modules


def note_graph(model: Any, reporter: Reporter) -> dict[str, Any]:
    """Notes the size, the MACs and the predicted time of a calibrated graph; warns if float is faster.

    Args:
        model: a prepared or converted module.
        reporter: prints the notes.

    Returns:
        The figures, for JSON.
    """
    from qtrace.benchmarking.files import NO_SLOWER
    from qtrace.preparation.figures import read_figures

    figures = read_figures(model)
    precision = note_precision(model, reporter)
    size = f"parameters {format_bytes(figures.bytes)}, {format_bytes(figures.float_bytes)} in float"
    facts = {"parameter_bytes": figures.bytes, "float_parameter_bytes": figures.float_bytes, **_macs(figures)}
    facts |= precision | _choice(figures)
    placement = figures.placement
    if placement is None:
        reporter.note(f"{size}; {_show_macs(figures)}")
        return facts
    for line in placement.choice_lines():
        reporter.note(line)
    seconds, in_float = placement.milliseconds / 1e3, placement.float_milliseconds / 1e3
    reporter.note(f"{size}; {_show_macs(figures)}; {_show_times(seconds, in_float, placement.table)}")
    if seconds * NO_SLOWER > in_float:
        reporter.warn(
            f"the graph is predicted to be slower than float in {placement.table}, as its config asks for "
            "size: `placement: balanced` in the recipe leaves in float what gains no time."
        )
    return {**facts, "predicted_seconds": seconds, "predicted_float_seconds": in_float}


def note_precision(model: Any, reporter: Reporter, path: Path | None = None) -> dict[str, Any]:
    """Notes the precision that a graph really has, and which ops in float are in float16 if that was asked.

    Args:
        model: a module; nothing is noted of a plain one.
        reporter: prints the note.
        path: a file of the module, which may be in float32 all the same; None for none.

    Returns:
        The number of layers by precision, and of ops in float16, for JSON.
    """
    from qtrace.preparation.figures import count_precisions, describe_precision
    from qtrace.preparation.float16 import choose_float16, describe_float16, uses_float16
    from qtrace.preparation.model import QuantizedModel, is_quantized

    if not is_quantized(model):
        return {}
    view = QuantizedModel(model)
    reporter.note(describe_precision(view.annotation))
    facts: dict[str, Any] = {"precision": count_precisions(view.annotation)}
    if uses_float16(view) and view.record.float_ranges and (path is None or _has_float16(path)):
        choices = choose_float16(view)
        for line in describe_float16(choices):
            reporter.note(line)
        facts["float16"] = sum(not choice.reason for choice in choices)
    return facts


def _has_float16(path: Path) -> bool:
    from qtrace.export.converted import FLOAT16_KEY
    from qtrace.onnxfile.external_data import read_model

    return path.suffix.lower() == ".onnx" and any(
        p.key == FLOAT16_KEY for p in read_model(path).metadata_props
    )


def note_device(model: Any, path: Path, reporter: Reporter) -> dict[str, Any]:
    """Notes that a file was not run on its device, for a target whose runtime is not here.

    Args:
        model: the exported module.
        path: the file.
        reporter: prints the note.

    Returns:
        The note, for JSON; nothing for targets whose runtime is here, and for plain modules.
    """
    from qtrace.config import backends
    from qtrace.plugins import installed
    from qtrace.preparation.model import QuantizedModel, is_quantized

    if not is_quantized(model):
        return {}
    backend = backends.get(QuantizedModel(model).annotation.backend)
    if not backend.device:
        return {}
    note = f"not run on the device, {backend.device}"
    contract = path.suffix.lower() == ".onnx" and backend.name in installed("qtrace.contracts")
    advice = f"; `qtrace check {path} --target {backend.name}` checks the file's form" if contract else ""
    reporter.note(f"{path}: {note}{advice}")
    return {"device": note}


def note_kernels(model: Any, path: Path, reporter: Reporter) -> dict[str, Any]:
    """Notes how many ops of a file compute on integers, and what keeps the others in float.

    What onnxruntime does with an ONNX file is found where the file is loaded.

    Args:
        model: the exported module.
        path: the file.
        reporter: prints the notes.

    Returns:
        The ops that compute in float, for JSON; nothing for other files, and for those all in float.
    """
    from qtrace.preparation.model import is_quantized
    from qtrace.verification.runtimes import get as get_runtime

    if path.suffix.lower() == ".onnx" or not is_quantized(model):
        return {}
    try:
        find = get_runtime(path).kernels
        kernels = None if find is None else find(path)
    except ExportError:  # a format of the user's own
        return {}
    if kernels is None or not kernels.integer:
        return {}
    for line in kernels.describe():
        reporter.note(line)
    names = ("name", "op", "reason")
    return {"float_ops": [dict(zip(names, op, strict=True)) for op in kernels.floats]}


def note_file(model: Any, path: Path, reporter: Reporter) -> dict[str, Any]:
    """Notes the size, the MACs and the predicted time of an exported file; warns if float is faster.

    Args:
        model: the exported module.
        path: the file.
        reporter: prints the notes.

    Returns:
        The figures, for JSON.
    """
    from qtrace.benchmarking.files import NO_SLOWER, list_shares
    from qtrace.benchmarking.prediction import predict, predict_float, read_graph
    from qtrace.benchmarking.runners import file_size
    from qtrace.preparation.figures import read_figures
    from qtrace.quantizing.delivering import timed_settings

    figures, size = read_figures(model), file_size(path)
    text, facts = f"size {format_bytes(size)}; {_show_macs(figures)}", {"bytes": size, **_macs(figures)}
    facts |= note_precision(model, reporter, path) | _choice(figures)
    costs = _read_costs(figures) if path.suffix.lower() == ".onnx" else None
    try:
        graph = None if costs is None else read_graph(path, timed_settings(model).shapes)
    except ExportError:  # onnx cannot infer the shapes of every file that runs
        graph = None
    if costs is None or graph is None:
        reporter.note(text)
        return facts
    table = Path(figures.cost_table).name if figures.cost_table else costs.machine.runtime
    prediction, in_float = predict(graph, costs), predict_float(graph, costs).seconds
    reporter.note(f"{text}; {_show_times(prediction.seconds, in_float, table)}")
    if prediction.seconds * NO_SLOWER > in_float:
        reporter.warn(
            f"{path.name} is predicted to be slower than float in {table}: of its time, "
            f"{list_shares(prediction.by_sort())}. `placement: fastest` in the recipe leaves in "
            "float what gains no time."
        )
    return {**facts, "predicted_seconds": prediction.seconds, "predicted_float_seconds": in_float}


def _read_costs(figures: Figures) -> CostTable | None:
    """Returns the table that a graph was placed by, else the packaged one; None for other runtimes.

    Files are predicted for onnxruntime only.
    """
    from qtrace.config import backends
    from qtrace.costs import CostTable, processor_flags

    if figures.cost_table:
        try:
            table = CostTable.read(Path(figures.cost_table))
        except ConfigError:  # the model file has come without it
            return None
        return table if table.machine.runtime == _FLOAT_RUNTIME else None
    runtime = backends.get(figures.backend or _FLOAT_RUNTIME).cost_table
    if runtime != _FLOAT_RUNTIME:
        return None
    return CostTable.packaged(runtime)[CostTable.nearest(runtime, processor_flags())]


def _macs(figures: Figures) -> dict[str, Any]:
    return {"macs": figures.macs, "integer_macs": figures.integer_macs}


def _choice(figures: Figures) -> dict[str, Any]:
    """Returns what the calibrated graph has chosen from, for JSON."""
    placement = figures.placement
    if placement is None or not placement.rows:
        return {}
    return {"choice": {"chosen": placement.chosen, "rows": [vars(row) for row in placement.rows]}}


def _show_macs(figures: Figures) -> str:
    text = f"{figures.macs / 1e6:.4g} million MACs"
    if not figures.backend or not figures.macs:
        return text
    return f"{text}, {figures.integer_macs / figures.macs:.0%} of them on integers"


def _show_times(seconds: float, in_float: float, table: str) -> str:
    text = f"predicted {seconds * 1e3:.3g} ms"
    if seconds != in_float:
        text += f", {in_float * 1e3:.3g} ms in float ({in_float / seconds:.2f}x)"
    return f"{text}, in one thread by cost table {table}"
