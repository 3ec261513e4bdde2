"""The shapes of an op, as the cost tables know them."""

from __future__ import annotations

import math

from qtrace.costs import OpShape
from qtrace.graph.types import Constant, GetAttr
from qtrace.graph.walk import shape_of
from qtrace.ops import OpCall

__all__ = ["op_shape"]


def op_shape(call: OpCall) -> OpShape:
    """Returns what the time of ``call`` depends on.

    The weight of a grouped convolution loses its leading axis: it is (outputs, inputs / groups, height,
    width), or (inputs, outputs / groups, height, width) if it is transposed, as runtimes store it.
    """
    groups = int(call.attrs.get("groups", 1))
    weight = () if call.weight is None else shape_of(call.weight)
    if groups > 1 and len(weight) > 3:
        weight = (math.prod(weight[:2]), *weight[2:])
    stride = call.attrs.get("stride", ())
    return OpShape(
        kind=call.kind,
        inputs=tuple(shape_of(node) for node in call.inputs),
        outputs=tuple(shape_of(node) for node in call.outputs),
        weight=weight,
        stride=tuple(int(n) for n in stride) if isinstance(stride, (tuple, list)) else (),
        groups=groups,
        stored="scalar" in call.attrs or any(isinstance(n.expr, (Constant, GetAttr)) for n in call.inputs),
    )
