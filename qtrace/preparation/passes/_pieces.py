"""Writes ops in pieces, and lists the activation functions whose pieces have integer kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megengine.functional as F

from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["PIECES", "Pieces", "PiecesWriter"]


class PiecesWriter:
    """Writes calls in the place of an op, one after the other.

    Args:
        editor: the editor of the graph.
        expr: the op, whose users the caller connects with the last call.

    Attributes:
        like: the output of the op, after which the results of the calls are named.
        exprs: the calls.
    """

    def __init__(self, editor: GraphEditor, expr: Expr) -> None:
        self.like: TensorNode = expr.outputs[0]
        self.exprs: list[Expr] = []
        self._editor, self._after = editor, expr

    def call(self, func: Callable[..., Any], *args: Any, shape: tuple[int, ...] | None = None) -> TensorNode:
        """Calls ``func``; its output has ``shape``, or the shape of the op's output."""
        node = self._editor.call_function(func, *args, after=self._after, like=self.like)
        if shape is not None:
            node.shape = shape
        return self._append(node)

    def every(self, x: TensorNode, step: int, row: int, column: int) -> TensorNode:
        """Takes every ``step``-th row and column of an image, from ``row`` and ``column`` on."""
        index = (slice(None), slice(None), slice(row, None, step), slice(column, None, step))
        node = self._editor.call_method("__getitem__", x, index, after=self._after, like=x)
        node.shape = tuple(n // step if axis > 1 else n for axis, n in enumerate(shape_of(x)))
        return self._append(node)

    def _append(self, node: TensorNode) -> TensorNode:
        self._after = node.expr
        self.exprs.append(node.expr)
        return node


@dataclass(frozen=True)
class Pieces:
    """The ops with integer kernels that make an activation function.

    Attributes:
        write: writes the ops for an input.
        kernels: how the `OpShape` of each kernel differs from the function's; a clamp has none.
    """

    write: Callable[[PiecesWriter, TensorNode], TensorNode]
    kernels: tuple[dict[str, Any], ...]


def _silu(pieces: PiecesWriter, x: TensorNode) -> TensorNode:
    return pieces.call(F.mul, x, pieces.call(F.sigmoid, x))


def _hswish(pieces: PiecesWriter, x: TensorNode) -> TensorNode:
    factor = pieces.call(F.relu6, pieces.call(F.add, x, 3.0))
    # The sixth of the factor is its integers with another scale: it takes no time.
    return pieces.call(F.mul, x, pieces.call(F.mul, factor, 1 / 6))


def _gated_hswish(pieces: PiecesWriter, x: TensorNode) -> TensorNode:
    return pieces.call(F.mul, x, pieces.call(F.hsigmoid, x))


PIECES = {
    "silu": Pieces(_silu, ({"kind": "sigmoid"}, {"kind": "mul"})),
    "hswish": Pieces(
        _hswish,
        ({"kind": "add", "stored": True}, {"kind": "mul"}),
    ),
    "gated_hswish": Pieces(_gated_hswish, ({"kind": "hsigmoid"}, {"kind": "mul"})),
}
