"""Reasons to refuse a model: MegEngine's own quantized modules, and marks of debugging."""

from __future__ import annotations

from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.module.quantized.module import QuantizedModule

from qtrace.graph.types import TracedModule

__all__ = ["debugging_marks", "native_quantization"]


def native_quantization(module: Module) -> str:
    """Returns why a graph with layers of ``megengine.quantization`` is refused; "" for any other."""
    for path, part in module.named_modules():
        if isinstance(part, (QATModule, QuantizedModule)):
            room = "qat" if isinstance(part, QATModule) else "quantized"
            return (
                f"{path or 'the model'} is a {room}.{type(part).__name__} of MegEngine's own quantization: "
                "call qtrace.trace on the model first, which puts float layers in the place of these and "
                "keeps their scales for prepare."
            )
    return ""


def debugging_marks(traced: TracedModule) -> str:
    """Returns why a graph with end points or watch points is refused; "" for other graphs."""
    if ends := _names(traced, "end_points"):
        return (
            f"set_end_points moved its outputs to {ends}, which a file and a change of the graph would lose: "
            "make these nodes its outputs with traced.graph.reset_outputs, after traced.clear_end_points()."
        )
    if watched := _names(traced, "watch_points"):
        return (
            f"set_watch_points keeps the values of {watched}, which a file and a change of the graph would "
            "lose: call traced.clear_watch_points() first."
        )
    return ""


def _names(traced: TracedModule, points: str) -> str:
    return ", ".join(str(node.name) for node in (getattr(traced, points, None) or ())[:5])
