"""One form for every call of a layer: functions of parameters in one flat graph."""

from __future__ import annotations

from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import check_traced
from qtrace.preparation.model import is_quantized
from qtrace.preparation.passes.expand import expand


def normalize(traced: TracedModule) -> TracedModule:
    """Returns a flat copy in which each layer is a function of its weight and bias.

    `qtrace.ops.read` reads every expr of it in one form, whichever spelling the model has: ``M.Conv2d`` and
    ``F.conv2d`` are ``conv2d`` with a weight; ``M.ReLU``, ``F.relu`` and the kernel ``RELU`` are ``relu``.

    Args:
        traced: a traced module; it is not changed.

    Raises:
        GraphError: when ``traced`` is not a traced module.
    """
    check_traced(traced, "normalize takes")
    flat = flatten(traced)
    if not is_quantized(traced):
        expand(flat)
    return flat
