"""Reasons to refuse a model: MegEngine's own quantized modules, and outputs that were moved."""

from __future__ import annotations

from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.module.quantized.module import QuantizedModule

from qtrace.graph.types import TracedModule

__all__ = ["moved_outputs", "native_quantization"]


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


def moved_outputs(traced: TracedModule) -> str:
    """Returns why a graph whose outputs were moved by ``set_end_points`` is refused; "" for other graphs."""
    ends = getattr(traced, "end_points", None) or ()
    if not ends:
        return ""
    names = ", ".join(str(node.name) for node in ends[:5])
    return (
        f"set_end_points moved its outputs to {names}, which a change of the graph would lose: make these "
        "nodes its outputs with traced.graph.reset_outputs, after traced.clear_end_points()."
    )
