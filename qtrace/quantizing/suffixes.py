"""The suffixes of the files that targets take."""

from __future__ import annotations

from pathlib import Path

from qtrace.config import backends
from qtrace.export import format_by_name, formats

__all__ = ["describe_suffixes", "suffix_of", "target_of", "with_suffix"]


def suffix_of(backend: str) -> str:
    """Returns the suffix of the files for a backend: the one of the format with its name, or ``.onnx``."""
    return next(iter(format_by_name(backend).suffixes), "") if backend in formats() else ".onnx"


def with_suffix(out: Path, suffix: str) -> str:
    """Returns a name with another suffix, in the place of a format's, too, as in ``net.tflite.gz``."""
    stem = Path(out.stem)
    return (stem.stem if stem.suffix in _suffixes().values() else stem.name) + suffix


def describe_suffixes(out: Path) -> str:
    """Says that none of qtrace's own backends takes a file by its name, and which suffixes they take."""
    targets: dict[str, list[str]] = {}
    for name in backends.packaged():
        targets.setdefault(suffix_of(name), []).append(name)
    known = ", ".join(f"{suffix} ({', '.join(names)})" for suffix, names in sorted(targets.items()))
    what = f"the suffix {out.suffix}, which no target takes" if out.suffix else "no suffix"
    others = [name for name in backends.known() if name not in backends.packaged()]
    other = f", or give a target ({', '.join(others)})" if others else ""
    return f"{out.name} has {what}: name the file with one of {known}{other}."


def target_of(suffix: str) -> str | None:
    """Returns the backend that alone takes files of a suffix; None for one that several take."""
    owners = [backend for backend, own in _suffixes().items() if own == suffix]
    return owners[0] if len(owners) == 1 else None


def _suffixes() -> dict[str, str]:
    return {backend: suffix_of(backend) for backend in backends.packaged()}
