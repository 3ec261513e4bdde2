"""Export: each format is a `Format`, an entry point in the group ``qtrace.formats``.

A format is chosen by its name, or by a suffix. A format of your own may also be ``pkg.mod:NAME``.

An exporter is a walk over the converted graph plus a table of emitters. ``converted.py`` is what they all
read, and computes integers of weights and biases. It also reads a plain traced module as a graph without
sites, to be written in float. A format whose runtime folds nothing when it loads a file
(``Format.folds_norms``) gets plain modules with BatchNorms folded. ``parameters.py`` writes qparams next to a
float model, and ``layer_net.py`` is the base of the ncnn and Caffe writers.

What stays float is float16 if the config asks for it. ``calibrate`` observes its ranges, and
``preparation/float16.py`` decides op by op by them. ``onnx/finished.py`` writes the finished model so, and
``verification/float16.py`` rounds in the graph what the file has so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, PlainGraph, check_float_type, is_plain, locate_by_name
from qtrace.export.format import Content, Format
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs, node_path, op_label, owner
from qtrace.plugins import FORMATS, ObjectPlugins, make_callable
from qtrace.plugins.options import check_arguments
from qtrace.process import on_engine_thread, returns_memory
from qtrace.storage.files import kind_of, problem, replacing
from qtrace.storage.outputs import foreign_output

_LOG = logging.getLogger("qtrace")


_FORMATS = ObjectPlugins(FORMATS, Format, ExportError)
formats, format_by_name = _FORMATS.known, _FORMATS.get


@check_arguments
@on_engine_thread
@returns_memory
def export(
    converted: TracedModule,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    force: bool = False,
    **options: Any,
) -> Path:
    """Writes a converted module, or a plain traced one in float, for a runtime. All files appear, or none.

    Args:
        converted: a module made by ``qtrace.convert``; or a traced module that was not prepared, which needs
            no calibration: ``onnx``, ``tflite``, ``ncnn`` and ``caffe`` write it in float.
        path: the file to write; an existing one is replaced if qtrace wrote it. If a format consists of
            several files, the others are written next to it.
        format: the name of the format, or ``pkg.mod:NAME`` of your own; None takes it from the suffix of
            ``path``.
        force: whether to replace a file that qtrace did not write, too.
        **options: the options of the format. All formats know ``float="fp32"``, which writes what stays float
            in float32 though the recipe says ``float: fp16``.

    Returns:
        The path of the file.

    Raises:
        ExportError: for an unknown format or option, or a path that cannot be written. Also for a file there
            that qtrace did not write, or a graph that the format cannot express. The message has the node,
            its op and its source line.
        GraphError: when the module is prepared and not converted, or no traced module.
        ConfigError: when a format of your own cannot be imported, or is no `Format`.
    """
    if wrong := problem(path):
        raise ExportError(wrong)
    target = Path(path)
    chosen = find_format(target, format)
    if plain := is_plain(converted):
        _check_float_format(chosen, converted)
    graph = (
        PlainGraph(converted, not chosen.has_composites, chosen.folds_norms)
        if plain
        else ConvertedGraph(converted)
    )
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent} is not a folder: make it first.")
    float_type = options.get("float")
    if not plain and "float" not in chosen.options:  # every format knows float32
        options.pop("float", None)
    _check_options(chosen, options, plain)
    check_float_type(graph, chosen.name, chosen.float_types, float_type)
    if not force:
        _check_foreign(target, ())
    try:
        if not chosen.runs_graph:
            _check_shapes(graph.module)
        if chosen.fixes_sizes:
            _warn_of_open_axes(chosen, graph.module)
        contents = chosen.write(graph, target, **options)
    except ExportError as error:
        raise locate_by_name(error, graph.module) from error
    try:
        if not force:
            _check_foreign(target, contents)
        _write(contents)
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def _check_shapes(converted: TracedModule) -> None:
    """Refuses a graph with a tensor of unknown shape, which no format can express.

    An opaque node's shape may depend on values: its format writes the node as it was in its file, or none.
    """
    for expr in exprs(converted):
        if isinstance(owner(expr), OpaqueOp):
            continue
        for node in expr.outputs:
            if isinstance(node, TensorNode) and node.shape is None:
                path = node_path(node)
                raise ExportError(
                    f"{node.name}: its shape is not known, because {repr(path) if path else 'its module'} is "
                    f"called with several sizes, and {op_label(expr)} gives a size that depends on values. "
                    "Give each call a module of its own, or end the graph before it."
                )


def _warn_of_open_axes(chosen: Format, converted: TracedModule) -> None:
    """Says that a file has numbers where the graph has open axes."""
    record = read_open_axes(converted)
    if record is None or record.only_batch():
        return
    shapes = {node.name: node.shape for node in converted.graph.inputs if isinstance(node, TensorNode)}
    axes = [axis for axis in record.axes if axis.axis]
    sizes = (f"axis {a.axis} of {a.input} at {int(shapes[a.input][a.axis])}" for a in axes)
    _LOG.warning(
        f"format {chosen.name} has numbers for all sizes, so the file fixes {', '.join(sizes)}; a file of "
        "format onnx leaves these open."
    )


def _check_float_format(chosen: Format, traced: TracedModule) -> None:
    """Refuses a format that cannot express a plain traced module."""
    if chosen.float_options is not None:
        return
    subject = traced.graph.name or "the module"
    names = [name for name in formats() if _FORMATS.get(name).float_options is not None]
    raise ExportError(
        f"format {chosen.name} writes quantized modules, and {subject} is a plain traced module: prepare, "
        "calibrate and convert it first, or write it in float as "
        f"{' or '.join([', '.join(names[:-1]), names[-1]])}."
    )


def _check_options(chosen: Format, options: dict[str, Any], plain: bool) -> None:
    allowed = chosen.float_options or () if plain else chosen.options
    for option in options:
        if option in allowed:
            continue
        where = " for a plain traced module" if option in chosen.options else ""
        raise ExportError(
            f"format {chosen.name} lacks option {option!r}{where}; it knows: {', '.join(allowed) or 'none'}."
        )


def _check_foreign(path: Path, beside: Iterable[Path]) -> None:
    """Refuses to replace files that qtrace did not write."""
    try:
        reason = foreign_output(path, beside)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}.") from error
    if reason:
        raise ExportError(f"{reason}. Name another file, or replace it with force=True.")


def _write(contents: Mapping[Path, Content]) -> None:
    """Writes files that belong together: each to a temporary name first, then all are renamed."""
    for path in contents:
        if kind := kind_of(path):
            raise ExportError(f"{path} is {kind}: name a file.")
    with replacing(*contents) as files:
        for file, data in zip(files, contents.values(), strict=True):
            file.writelines([data] if isinstance(data, bytes) else data)


def check_case(path: Path) -> None:
    """Refuses a suffix in upper case, as runtimes go by those in lower case.

    Raises:
        ExportError: naming the file in lower case.
    """
    lower = path.suffix.lower()
    if lower != path.suffix and any(lower in _FORMATS.get(n).suffixes for n in formats()):
        raise ExportError(
            f"{path.name}: runtimes know a file by a suffix in lower case: name it "
            f"{path.with_suffix(lower).name}."
        )


def find_format(path: Path, name: str | None = None) -> Format:
    """Returns the format that a user named, or that has the suffix of `path`.

    Raises:
        ExportError: when there is none; the message names the formats.
    """
    if name is not None:
        return _FORMATS.get(name)
    check_case(path)
    if path.suffix == ".mge":
        raise ExportError(
            f"{path.name} could be a model to work on, which qtrace.save writes, or a dump for "
            "MegEngine's runtime: name format='megengine' for the dump."
        )
    for known in formats():
        chosen = _FORMATS.get(known)
        if path.suffix in chosen.suffixes:
            return chosen
        if path.suffix in chosen.companions:
            raise ExportError(
                f"{path.name} would be what is written next to the model: "
                f"name the model, {path.with_suffix(chosen.suffixes[0]).name}."
            )
    suffixes = ", ".join(sorted(suffix for known in formats() for suffix in _FORMATS.get(known).suffixes))
    raise ExportError(
        f"no format has the suffix {path.suffix!r} of {path.name}: there are {suffixes}; "
        f"or name one with format= ({', '.join(formats())})."
    )


make_callable(__name__, export)
