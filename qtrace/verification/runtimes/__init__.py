"""Runtimes, one a file: each runs exported files and returns their integers; the file name is its name."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path

from qtrace.errors import ExportError
from qtrace.verification.runtimes.base import Runtime

__all__ = ["Runtime", "get", "known"]


def known() -> tuple[str, ...]:
    """Returns the names of all runtimes, sorted."""
    names = (m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return tuple(sorted(name for name in names if name != "base"))


def get(path: Path, name: str | None = None) -> Runtime:
    """Returns the runtime called ``name``; without a name, the default one for files like ``path``.

    Raises:
        ExportError: when no runtime runs the file, or its package is not installed.
    """
    if name is not None and name not in known():
        raise ExportError(f"unknown runtime {name!r}; known: {', '.join(known())}.")
    modules = [importlib.import_module(f"{__name__}.{n}") for n in ([name] if name else known())]
    fitting: list[Runtime] = [m.RUNTIME for m in modules if path.suffix in m.RUNTIME.suffixes]
    if not fitting:
        for module in modules:
            if path.suffix in module.RUNTIME.companions:
                model = path.with_suffix(module.RUNTIME.suffixes[0]).name
                raise ExportError(f"{path.name} holds weights: name the model that belongs to it, {model}.")
        subject = f"{name} does not run" if name else "no runtime runs"
        raise ExportError(f"{subject} files like {path.name or path}; known: {_describe_known()}.")
    # ONNX files are written for onnxruntime; other runtimes that read them are asked for by name.
    runtime = sorted(fitting, key=lambda r: not r.default)[0]
    if importlib.util.find_spec(runtime.package) is None:
        raise ExportError(
            f"verification in {runtime.name} needs the package {runtime.package}: "
            f"run pip install 'qtrace[{runtime.extra}]'."
        )
    return runtime


def _describe_known() -> str:
    runtimes = (importlib.import_module(f"{__name__}.{n}").RUNTIME for n in known())
    return ", ".join(f"{r.name} ({' '.join(r.suffixes)})" for r in runtimes)
