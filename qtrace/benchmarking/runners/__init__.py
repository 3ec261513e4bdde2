"""Runners, one a runtime: each loads a file with all optimizations, and runs it on the same inputs.

A runner is an entry point in the group ``qtrace.runners``, called as its runtime.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from qtrace.benchmarking.runners.base import Load, ProfiledRunner, Runner, RunnerSettings
from qtrace.errors import ExportError, install
from qtrace.plugins import ObjectPlugins

__all__ = [
    "Load",
    "ProfiledRunner",
    "Runner",
    "RunnerSettings",
    "can_time",
    "find_package",
    "known",
    "open_file",
]


_RUNNERS = ObjectPlugins("qtrace.runners", Load, ExportError)
known = _RUNNERS.known


def can_time(path: Path) -> bool:
    """Returns whether a runtime here runs files like ``path``."""
    return any(path.suffix.lower() in _RUNNERS.get(name).suffixes for name in known())


def find_package(runtime: str) -> str:
    """Returns the name by which the Python package of a runtime is imported."""
    return _RUNNERS.get(runtime).package


def open_file(path: Path, runtime: str | None = None, settings: RunnerSettings | None = None) -> Runner:
    """Loads a file in its runtime.

    Args:
        path: the file.
        runtime: the name of the runtime; None for the first one that runs such files.
        settings: threads and shapes.

    Raises:
        ExportError: when the file is missing, no runtime runs it, or the runtime is not installed.
    """
    if runtime is not None and runtime not in known():
        raise ExportError(f"files cannot be timed in {runtime!r}; known: {', '.join(known())}.")
    loads = {name: _RUNNERS.get(name) for name in ([runtime] if runtime else known())}
    fitting = [load for load in loads.values() if path.suffix.lower() in load.suffixes]
    if not fitting:
        subject = f"{runtime} does not run" if runtime else "no runtime here runs"
        raise ExportError(f"{subject} files like {path.name}; known: {_describe(loads)}.")
    if not path.is_file():
        raise ExportError(f"{path} does not exist: export the module first.")
    load = sorted(fitting, key=lambda each: not each.default)[0]
    settings = settings or RunnerSettings()
    if settings.host is None and importlib.util.find_spec(load.package) is None:
        raise ExportError(
            f"to time {path.name} in {load.name}, the package {load.package} is needed: "
            f"run {install(load.extra)}."
        )
    return load.open(path, settings)


def _describe(loads: Mapping[str, Load]) -> str:
    return ", ".join(f"{load.name} ({' '.join(load.suffixes)})" for load in loads.values())
