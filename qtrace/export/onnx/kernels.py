"""Finds ops that onnxruntime's integer kernels compute wrong, so that the file keeps them in float."""

from __future__ import annotations

import numpy as np

from qtrace.export.converted.graph import ConvertedGraph
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall, Role

__all__ = ["softmax_overflows"]

# QLinearSoftmax multiplies by 1 / scale in 32 bits. On overflow, values wrap around to 0: below a
# scale of 1 / (150 * length of the axis), measured with onnxruntime 1.23 for 2 to 64 values. The bound leaves
# a margin.
_LOWEST_SCALE = 1.0 / 100.0
_MAX_BITS = 8  # of an integer kernel


def softmax_overflows(graph: ConvertedGraph, call: OpCall) -> bool:
    """Whether ``call`` is a softmax whose output has a scale too small for onnxruntime's integer kernel.

    Such a scale means that no probability reached twice 1 / length: attention that is nearly uniform.
    """
    if call.kind != "softmax" or len(call.attrs["axis"]) != 1:
        return False
    length = int(call.inputs[0].shape[call.attrs["axis"][0]])
    return any(
        float(np.min(site.qparams.scale)) * length < _LOWEST_SCALE
        for site in graph.sites
        if site.sort == "activation"
        and site.decision.plan is not None
        and site.decision.plan.scheme.bits <= _MAX_BITS
        and _origin(graph, site.source) is call.out
    )


def _origin(graph: ConvertedGraph, node: TensorNode) -> TensorNode:
    """Returns the node that ``node`` has its values from, before the ops that only move them."""
    while (call := graph.call(node.expr)) is not None and call.role is Role.CARRY and call.inputs:
        node = call.inputs[0]
    return node
