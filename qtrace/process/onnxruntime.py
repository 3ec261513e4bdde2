"""The exceptions of onnxruntime."""

from __future__ import annotations

__all__ = ["onnxruntime_errors"]


def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that onnxruntime raises; its own have no base class but `Exception`."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (t for t in vars(state).values() if isinstance(t, type) and issubclass(t, Exception))
    return (*own, RuntimeError, ValueError)
