"""Runtimes: each runs exported files and returns their integers.

A runtime is an entry point in the group ``qtrace.runtimes``; one of your own may also be ``pkg.mod:NAME``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from qtrace.config import backends
from qtrace.errors import ConfigError, ExportError, install
from qtrace.onnxfile.kernels import products_are_wrong, products_saturate
from qtrace.plugins import ObjectPlugins
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.runtimes.base import Runtime

# Backends whose files these runtimes run where they are deployed.
_ON_CPU = ("onnxruntime", "openvino")

__all__ = ["Runtime", "describe_choice", "get", "known", "runs_optimized"]


_RUNTIMES = ObjectPlugins("qtrace.runtimes", Runtime, ExportError)
known = _RUNTIMES.known


def get(
    path: Path, name: str | Runtime | None = None, host: RuntimeHost | None = None, backend: str = ""
) -> Runtime:
    """Returns the runtime called ``name``; without a name, the one that the file is meant for.

    That is the backend's own runtime. Where it is not installed here, the default one for files like
    ``path`` stands in for it.

    Args:
        path: the file.
        name: the name of the runtime, or the runtime itself.
        host: the interpreter or machine that has the runtime; None for this one.
        backend: the backend that the file is for; "" for a float file.

    Raises:
        ExportError: when no runtime runs the file, or its package is not installed.
        ConfigError: when the runtime is the user's own and cannot be imported, or is no `Runtime`.
    """
    if isinstance(name, Runtime):
        return name.at(host)
    own, suffix = _runtime_of(backend) if name is None else None, path.suffix.lower()
    if own is not None and suffix in own.suffixes and (host is not None or _is_installed(own)):
        return own.at(host)
    runtimes = [_RUNTIMES.get(n) for n in ([name] if name else known())]
    fitting = [runtime for runtime in runtimes if suffix in runtime.suffixes]
    if not fitting:
        for runtime in runtimes:
            if suffix in runtime.companions:
                model = path.with_suffix(runtime.suffixes[0]).name
                raise ExportError(f"{path.name} holds weights: name the model that belongs to it, {model}.")
        subject = f"{name} does not run" if name else "no runtime runs"
        raise ExportError(f"{subject} files like {path.name or path}; known: {_describe_known()}.")
    # ONNX files without a backend that says otherwise are written for onnxruntime.
    runtime = sorted(fitting, key=lambda r: not r.default)[0]
    if host is not None:
        return runtime.at(host)
    if not _is_installed(runtime):
        cure = install(runtime.extra) if runtime.extra else f"pip install {runtime.package}"
        raise ExportError(f"verification in {runtime.name} needs the package {runtime.package}: run {cure}.")
    return runtime


def describe_choice(runtime: Runtime, backend: str) -> str:
    """Says that a file runs in the runtime that its backend names, or in another one in its place.

    Args:
        runtime: the runtime that was chosen without a name.
        backend: the backend that the file is for; "" for a float file.

    Returns:
        A clause; "" where the backend names none.
    """
    own = _runtime_of(backend)
    if own is None:
        return ""
    if own.name == runtime.name:
        return f"{runtime.name}, which the file is for"
    return (
        f"{runtime.name} without its optimizations in the place of {own.name}, which the file is for and "
        f"which is not installed: {install(own.extra)}"
    )


def runs_optimized(runtime: Runtime, backend: str) -> bool:
    """Returns whether a file also runs with the optimizations of ``runtime``.

    onnxruntime rounds the float weights of layers between roundings, unless the file was written so that it
    does not: a file for another runtime runs in it without optimizations. Where the products of CPU runtimes
    saturate, or lose columns, their optimized kernels say nothing about a file for another target, which they
    only stand in for.

    Args:
        runtime: the runtime.
        backend: the backend that the file is for; "" for a float file.
    """
    if not runtime.optimizes:
        return False
    if runtime.name == "onnxruntime" and backend and not _is_written_for_onnxruntime(backend):
        return False
    if backend in ("", *_ON_CPU) or runtime.name not in _ON_CPU:
        return True
    in_onnxruntime = runtime.name == "onnxruntime" and backend != "generic"  # whose files have whole columns
    return not (products_saturate(runtime.host) or (in_onnxruntime and products_are_wrong(runtime.host)))


def _is_written_for_onnxruntime(backend: str) -> bool:
    try:
        return "held_floats" in backends.get(backend).cures
    except ConfigError:  # of another tool
        return False


def _runtime_of(backend: str) -> Runtime | None:
    """Returns the runtime that a backend names; None where it names none."""
    name = backends.get(backend).runtime if backend else ""
    return _RUNTIMES.get(name) if name else None


def _is_installed(runtime: Runtime) -> bool:
    return importlib.util.find_spec(runtime.package) is not None


def _describe_known() -> str:
    runtimes = ((name, _RUNTIMES.get(name)) for name in known())
    return ", ".join(f"{name} ({' '.join(runtime.suffixes)})" for name, runtime in runtimes)
