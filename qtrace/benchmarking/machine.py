"""Facts about the processor and the runtime that measured times depend on."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from pathlib import Path

from qtrace.benchmarking.costs import Machine

__all__ = ["describe_machine", "differences"]

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")


def describe_machine(runtime: str, package: str, threads: int) -> Machine:
    """Returns the facts for a table measured now on this machine.

    Args:
        runtime: the name of the runtime.
        package: the distribution that holds it.
        threads: the number of threads.
    """
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    pairs = [line.partition(":") for line in lines]
    facts = {name.strip(): value.strip() for name, _, value in reversed(pairs)}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return Machine(
        runtime=runtime,
        version=version(package),
        processor=facts.get("model name") or platform.machine(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        threads=threads,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    )


def differences(table: Machine, machine: Machine) -> list[str]:
    """Says in what the machine of a cost table differs from another one."""
    pairs = [
        ("processor", table.processor, machine.processor),
        ("version", f"{table.runtime} {table.version}", f"{machine.runtime} {machine.version}"),
        ("threads", table.threads, machine.threads),
    ]
    return [f"{name} {measured}, here {own}" for name, measured, own in pairs if measured != own]
