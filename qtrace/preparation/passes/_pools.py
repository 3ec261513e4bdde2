"""The shapes of ops as cost tables know them, and the times of max pooling, which belongs to no unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qtrace.costs import FLOAT, INTEGER, PLAIN_MAX_POOL, CostTable, OpShape
from qtrace.graph.types import Constant, Expr, GetAttr, Node
from qtrace.graph.walk import shape_of, users
from qtrace.ops import OpCall, Role
from qtrace.preparation.passes._view import View

__all__ = ["PoolTimes", "op_shape", "time_pools"]

# Ops that read and write the plain layout.
_PLAIN = (
    "reshape flatten expand_dims squeeze matmul linear softmax conv_transpose2d layer_norm transpose swapaxes"
)
# Ops that write the channels last if all that they read has them so.
_KEEPING = "max_pool2d avg_pool2d relu relu6 clip add mul concat"


@dataclass(frozen=True)
class PoolTimes:
    """The times of the poolings between a value and the ops that read it.

    Attributes:
        float_seconds: in float.
        integer_seconds: on integers, after an integer op.
    """

    float_seconds: float = 0.0
    integer_seconds: float = 0.0

    def __add__(self, other: PoolTimes) -> PoolTimes:
        return PoolTimes(
            self.float_seconds + other.float_seconds, self.integer_seconds + other.integer_seconds
        )


def time_pools(view: View, expr: Expr, table: CostTable) -> PoolTimes:
    """Returns the times of ``expr`` if it is a pooling that carries integers, else no time.

    onnxruntime has a fast integer kernel for channels last, the layout that an integer convolution writes
    and most ops after it keep. In the plain layout, integers take several times as long as floats. An
    exported file pools an input in float.
    """
    call = view.calls.get(expr)
    if call is None or call.kind != "max_pool2d" or call.role is not Role.CARRY:
        return PoolTimes()
    shape = op_shape(call)
    seconds, integer = table.seconds(shape, FLOAT), table.seconds(shape, INTEGER)
    if seconds is None or integer is None:
        return PoolTimes()
    if _is_input(view, call.inputs[0]):
        return PoolTimes(seconds, seconds)
    if _has_channels_last(view, call.inputs[0], _leads_to_conv(view, expr)):
        return PoolTimes(seconds, integer)
    plain = table.seconds(replace(shape, kind=PLAIN_MAX_POOL), INTEGER) or integer
    return PoolTimes(seconds, max(plain, integer))


def _is_input(view: View, node: Node) -> bool:
    """Returns whether a value is an input of the graph, or a pooled one."""
    call = view.calls.get(node.expr)
    while call is not None and call.kind == "max_pool2d":
        node = call.inputs[0]
        call = view.calls.get(node.expr)
    return node in view.traced.graph.inputs


def _has_channels_last(view: View, node: Node, ahead: bool) -> bool:
    """Returns whether a value has the channels last if all is on integers.

    Args:
        view: the graph.
        node: the value.
        ahead: whether a convolution follows, for which functions of one value keep the layout, too.
    """
    waiting, seen = [node], {node}
    while waiting:
        call = view.calls.get(waiting.pop().expr)
        if call is None or call.kind in _PLAIN.split() or not call.inputs:
            return False
        if call.kind == "conv2d":
            continue
        if call.kind not in _KEEPING.split() and not ahead:
            return False
        waiting += [n for n in call.inputs if n not in seen and view.is_data(n)]
        seen.update(call.inputs)
    return True


def _leads_to_conv(view: View, start: Expr) -> bool:
    """Returns whether a convolution reads the result, through ops that take any layout."""
    ahead, seen = [start], {start}
    while ahead:
        for node in ahead.pop().outputs:
            for user in users(node):
                call = view.calls.get(user)
                if call is None or user in seen or call.kind in _PLAIN.split():
                    continue
                if call.kind == "conv2d":
                    return True
                seen.add(user)
                ahead.append(user)
    return False


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
