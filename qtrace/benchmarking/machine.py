"""Facts about the processor and the runtime that measured times depend on."""

from __future__ import annotations

import datetime
import importlib
import platform
from importlib.metadata import PackageNotFoundError, version

from qtrace.costs import Machine
from qtrace.costs.processor import processor_facts, processor_flags
from qtrace.errors import ExportError

__all__ = ["describe_machine", "differences"]


def describe_machine(runtime: str, package: str, threads: int) -> Machine:
    """Returns the facts for a table measured now on this machine.

    Args:
        runtime: the name of the runtime.
        package: the distribution that usually holds it; another one may, as onnxruntime-gpu does.
        threads: the number of threads.

    Raises:
        ExportError: when the runtime is not installed.
    """
    return Machine(
        runtime=runtime,
        version=_version(package),
        processor=processor_facts().get("model name") or platform.machine(),
        flags=processor_flags(),
        threads=threads,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    )


def _version(package: str) -> str:
    """Returns the version of a package's module, whatever distribution it has come with."""
    try:
        own = str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", ""))
    except ImportError as error:
        raise ExportError(f"{package} cannot be imported ({error}): install it.") from error
    try:
        released = version(package)
    except PackageNotFoundError:
        return own or "unknown"
    return released if own.startswith(released) or not own else own  # OpenVINO's own one has a build, too


def differences(table: Machine, machine: Machine) -> list[str]:
    """Says in what the machine of a cost table differs from another one."""
    pairs = [
        ("processor", table.processor, machine.processor),
        ("version", f"{table.runtime} {table.version}", f"{machine.runtime} {machine.version}"),
        ("threads", table.threads, machine.threads),
    ]
    return [f"{name} {measured}, here {own}" for name, measured, own in pairs if measured != own]
