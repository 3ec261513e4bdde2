"""Facts about the machine that a reader of the figures needs; nothing that names it or its files."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megengine

__all__ = ["facts", "load"]


def facts() -> dict[str, Any]:
    """Processor, versions, date, and the present load of the machine."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": load(),
        "system": platform.system(),
        "python": platform.python_version(),
        "device": megengine.get_default_device(),
        **{name: version(name) for name in ("megengine", "numpy", "onnxruntime", "qtrace")},
    }


def load() -> float:
    """The load average of the last minute; the benchmarks themselves make about 1."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
