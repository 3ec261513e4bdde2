"""The suffixes of the files that targets take."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qtrace import plugins
from qtrace.export.format import Format
from qtrace.plugins.installed import BACKENDS, FORMATS, installed

__all__ = ["describe_suffixes", "suffix_of", "target_of", "with_suffix"]

_SUFFIXES = {"tflite": ".tflite", "ncnn": ".param", "megengine": ".mge"}


def suffix_of(backend: str) -> str:
    """Returns the suffix of the files for a backend: that of the installed format with its name, if any."""
    if backend in installed(FORMATS):
        return next(iter(plugins.load_object(FORMATS, backend, Format).suffixes), "")
    return _SUFFIXES.get(backend, ".onnx")


def with_suffix(out: Path, suffix: str) -> str:
    """Returns a name with another suffix, in the place of a format's, too, as in ``net.tflite.gz``."""
    stem = Path(out.stem)
    return (stem.stem if stem.suffix in (".onnx", *_SUFFIXES.values()) else stem.name) + suffix


def describe_suffixes(out: Path, backends: Iterable[str]) -> str:
    """Says that none of some backends takes a file by its name, and which suffixes they take."""
    targets: dict[str, list[str]] = {}
    for name in backends:
        targets.setdefault(suffix_of(name), []).append(name)
    known = ", ".join(f"{suffix} ({', '.join(names)})" for suffix, names in sorted(targets.items()))
    what = f"the suffix {out.suffix}, which no target takes" if out.suffix else "no suffix"
    own = f", or give a target ({', '.join(installed(BACKENDS))})" if installed(BACKENDS) else ""
    return f"{out.name} has {what}: name the file with one of {known}{own}."


def target_of(suffix: str) -> str | None:
    """Returns the backend that alone takes files of a suffix; None for one that several take."""
    return next((backend for backend, own in _SUFFIXES.items() if own == suffix), None)
