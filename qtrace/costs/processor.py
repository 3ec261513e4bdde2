"""The instruction sets of this processor, by which a packaged table of costs is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["processor_facts", "processor_flags"]

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")


def processor_facts() -> Mapping[str, str]:
    """Returns what the system says of the first processor; nothing where it does not say it in a file."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    pairs = [line.partition(":") for line in lines]
    return {name.strip(): value.strip() for name, _, value in reversed(pairs)}


def processor_flags() -> tuple[str, ...]:
    """Returns the instruction sets that integer and float kernels use."""
    facts = processor_facts()
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return tuple(flag for flag in _FLAGS if flag in flags)
