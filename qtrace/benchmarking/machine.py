"""Facts about the processor and the runtime, and the peak memory of a file."""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qtrace.benchmarking.runners import RunnerSettings, open_file
from qtrace.costs import Machine
from qtrace.costs.table import processor_facts, processor_flags
from qtrace.errors import ExportError

__all__ = ["describe_machine", "differences", "peak_memory"]


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


_SECONDS = 300
_CODE = "import sys; from qtrace.benchmarking.machine import measure; measure(sys.stdin.read())"


def peak_memory(path: Path, runtime: str | None, settings: RunnerSettings) -> int | None:
    """Returns the bytes that loading and one run add to a process at most; None if it ends too early."""
    if settings.host is not None:  # its process holds only the file
        runner = open_file(path, runtime, settings)
        return runner.memory() or None
    order = {
        "path": str(path),
        "runtime": runtime,
        "threads": settings.threads,
        "batch": settings.batch,
        "shapes": {name: list(shape) for name, shape in settings.shapes.items()},
    }
    command = [sys.executable, "-c", _CODE]
    try:
        process = subprocess.run(
            command, input=json.dumps(order), text=True, capture_output=True, timeout=_SECONDS, check=True
        )
        return int(process.stdout.split()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def measure(text: str) -> None:
    """Loads and runs the file that ``text`` describes, and prints the bytes; see `peak_memory`."""
    order = json.loads(text)
    shapes = {name: tuple(shape) for name, shape in order["shapes"].items()}
    settings = RunnerSettings(order["threads"], order["batch"], shapes)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak of the imports
    before = _kilobytes("VmRSS")
    runner = open_file(Path(order["path"]), order["runtime"], settings)
    runner.run()
    own = runner.memory()
    print((_kilobytes("VmHWM") - before) * 1024 if own is None else own)


def _kilobytes(name: str) -> int:
    """Returns a line of the process's status: the memory in use, or its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(re.findall(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)[0])
