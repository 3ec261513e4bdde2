"""The times of max pooling, which gives integers on unchanged and belongs to no unit of the placement."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qtrace.costs import FLOAT, INTEGER, PLAIN_MAX_POOL, CostTable
from qtrace.graph.types import Expr
from qtrace.graph.walk import users
from qtrace.ops import Role
from qtrace.preparation.passes._view import View
from qtrace.preparation.placement.shapes import op_shape

__all__ = ["PoolTimes", "time_pools"]

# Ops that read the plain layout, so that no convolution behind them makes a runtime keep the channels last.
_SENSITIVE = (
    "reshape flatten expand_dims squeeze matmul linear softmax conv_transpose2d layer_norm transpose swapaxes"
)


@dataclass(frozen=True)
class PoolTimes:
    """The times of the poolings between a value and the ops that read it.

    Attributes:
        float_seconds: in float.
        integer_seconds: on integers, behind an integer op.
        plain_seconds: what is added on integers if a float op reads the result, in the plain layout.
    """

    float_seconds: float = 0.0
    integer_seconds: float = 0.0
    plain_seconds: float = 0.0

    def __add__(self, other: PoolTimes) -> PoolTimes:
        return PoolTimes(
            self.float_seconds + other.float_seconds,
            self.integer_seconds + other.integer_seconds,
            self.plain_seconds + other.plain_seconds,
        )


def time_pools(view: View, expr: Expr, table: CostTable) -> PoolTimes:
    """Returns the times of ``expr`` if it is a pooling that carries integers, else no time.

    onnxruntime has a fast integer kernel for channels last. It keeps this layout if an integer convolution
    follows; in the plain layout, integers take several times as long as floats.
    """
    call = view.calls.get(expr)
    if call is None or call.kind != "max_pool2d" or call.role is not Role.CARRY:
        return PoolTimes()
    shape = op_shape(call)
    seconds, integer = table.seconds(shape, FLOAT), table.seconds(shape, INTEGER)
    if seconds is None or integer is None:
        return PoolTimes()
    plain = max(table.seconds(replace(shape, kind=PLAIN_MAX_POOL), INTEGER) or integer, integer)
    if not _leads_to_conv(view, expr):
        return PoolTimes(seconds, plain)
    return PoolTimes(seconds, integer, plain - integer)


def _leads_to_conv(view: View, start: Expr) -> bool:
    """Returns whether a convolution reads the result, through ops that take any layout."""
    ahead, seen = [start], {start}
    while ahead:
        for node in ahead.pop().outputs:
            for user in users(node):
                call = view.calls.get(user)
                if call is None or user in seen or call.kind in _SENSITIVE.split():
                    continue
                if call.kind == "conv2d":
                    return True
                seen.add(user)
                ahead.append(user)
    return False
