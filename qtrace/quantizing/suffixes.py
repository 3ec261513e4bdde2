"""The suffixes of the files that targets take."""

from __future__ import annotations

__all__ = ["suffix_of", "target_of"]

_SUFFIXES = {"tflite": ".tflite", "ncnn": ".param", "megengine": ".mge"}


def suffix_of(backend: str) -> str:
    """Returns the suffix of the files for a backend."""
    return _SUFFIXES.get(backend, ".onnx")


def target_of(suffix: str) -> str | None:
    """Returns the backend that alone takes files of a suffix; None for one that several take."""
    return next((backend for backend, own in _SUFFIXES.items() if own == suffix), None)
