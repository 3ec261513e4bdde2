"""Export: one format a file; the file name is the name of the format, its ``SUFFIXES`` choose it by path."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.passes.record import read_record

__all__ = ["export", "formats"]


def formats() -> tuple[str, ...]:
    """The names of all formats, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def export(
    converted: TracedModule, path: str | os.PathLike[str], format: str | None = None, **options: Any
) -> Path:
    """Writes a converted module for a runtime. The file appears whole or not at all.

    Args:
        converted: a module made by ``qtrace.convert``.
        path: the file to write; it is replaced if it exists.
        format: the name of the format; None takes it from the suffix of ``path``.
        **options: of the format.

    Returns:
        The path.

    Raises:
        ExportError: for an unknown format, or a graph that the format cannot express, naming the node.
        GraphError: when the module is not converted.
    """
    target = Path(path)
    module = _format_module(target, format)
    read_record(converted, "converted")
    if not target.parent.is_dir():
        raise ExportError(f"{target.parent} is not a folder: make it first.")
    data: bytes = module.serialize(converted, **options)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _format_module(path: Path, name: str | None) -> Any:
    modules = {f: f"{__name__}.{f}" for f in formats()}
    if name is None:
        for module in modules.values():
            found = importlib.import_module(module)
            if path.suffix in found.SUFFIXES:
                return found
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
