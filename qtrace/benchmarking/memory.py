"""The peak memory of a file: a process of its own loads it and runs it once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from qtrace.benchmarking.runners import RunnerSettings, open_file

__all__ = ["peak_memory"]

_SECONDS = 300
_CODE = "import sys; from qtrace.benchmarking.memory import measure; measure(sys.stdin.read())"


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
