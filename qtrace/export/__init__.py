"""Export: each format is a file or folder of its name, and is chosen by name or by its ``SUFFIXES``.

A format defines ``serialize(converted, **options) -> bytes`` or, if it consists of several files,
``files(converted, path, **options) -> dict[Path, bytes]``; ``converted`` is a `ConvertedGraph`.
``COMPANIONS`` are the suffixes of files that are written beside the named one.
``RUNS_GRAPH = True`` says that the format reads no recorded shapes.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.located import locate_by_name
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs, node_path, op_label
from qtrace.process.thread import on_engine_thread
from qtrace.storage.files import kind_of, problem, replacing

__all__ = ["export", "formats"]


# Modules that several formats use.
_NOT_FORMATS = ("converted", "layer_net", "parameters")


def formats() -> tuple[str, ...]:
    """Returns the names of all formats, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_FORMATS))


@on_engine_thread
def export(
    converted: TracedModule, path: str | os.PathLike[str], format: str | None = None, **options: Any
) -> Path:
    """Writes a converted module for a runtime. All files appear, or none.

    Args:
        converted: a module made by ``qtrace.convert``.
        path: the file to write; an existing one is replaced. If a format consists of several files, the
            others are written beside it.
        format: the name of the format; None takes it from the suffix of ``path``.
        **options: the options of the format.

    Returns:
        The path of the file.

    Raises:
        ExportError: for an unknown format or option, a path that cannot be written, or a graph that has no
            such form; the message has the node, its op and its source line.
        GraphError: when the module is not converted.
    """
    if wrong := problem(path):
        raise ExportError(wrong)
    target = Path(path)
    module = _format_module(target, format)
    graph = ConvertedGraph(converted)
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent} is not a folder: make it first.")
    _check_options(module, options)
    try:
        if not getattr(module, "RUNS_GRAPH", False):
            _check_shapes(converted)
        if hasattr(module, "files"):
            contents = module.files(graph, target, **options)
        else:
            contents = {target: module.serialize(graph, **options)}
    except ExportError as error:
        raise locate_by_name(error, converted) from error
    try:
        _write(contents)
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def _check_shapes(converted: TracedModule) -> None:
    """Refuses a graph with a tensor of unknown shape, which no format can express."""
    for expr in exprs(converted):
        for node in expr.outputs:
            if isinstance(node, TensorNode) and node.shape is None:
                path = node_path(node)
                raise ExportError(
                    f"{node.name}: its shape is not known, because {repr(path) if path else 'its module'} is "
                    f"called with several sizes and the size of this {op_label(expr)} depends on values: "
                    "give each call a module of its own, or end the graph before it."
                )


def _check_options(module: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(getattr(module, "files", None) or module.serialize).parameters
    known = [n for n in parameters if n not in ("converted", "path")]
    for option in options:
        if option not in known:
            name = module.__name__.rpartition(".")[2]
            raise ExportError(
                f"format {name} has no option {option!r}; it knows: {', '.join(known) or 'none'}."
            )


def _write(contents: dict[Path, bytes]) -> None:
    """Writes files that belong together: each to a temporary name first, then all are renamed."""
    for path in contents:
        if kind := kind_of(path):
            raise ExportError(f"{path} is {kind}: name a file.")
    with replacing(*contents) as files:
        for file, data in zip(files, contents.values(), strict=True):
            file.write(data)


def _format_module(path: Path, name: str | None) -> Any:
    modules = {f: f"{__name__}.{f}" for f in formats()}
    if name is None:
        for module in modules.values():
            format_module = importlib.import_module(module)
            if path.suffix in format_module.SUFFIXES:
                return format_module
            if path.suffix in getattr(format_module, "COMPANIONS", ()):
                raise ExportError(
                    f"{path.name} would be what is written beside the model: "
                    f"name the model, {path.with_suffix(format_module.SUFFIXES[0]).name}."
                )
        if path.suffix == ".mge":
            raise ExportError(
                f"{path.name} could be a model to work on, which qtrace.save writes, or a dump for "
                "MegEngine's runtime: name format='megengine' for the dump."
            )
        raise ExportError(
            f"no format has the suffix {path.suffix!r} of {path.name}: "
            f"name one with format= ({', '.join(modules)})."
        )
    if name not in modules:
        raise ExportError(f"unknown format {name!r}; known: {', '.join(modules)}.")
    return importlib.import_module(modules[name])


class _Callable(types.ModuleType):
    """Lets ``qtrace.export(...)`` work whether the name is bound to the function or to this package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
