"""Computes the shapes of all tensors of a graph by running it.

A node of a flat graph has the shape that it was traced with. If one module is called several times on maps
of different sizes, its nodes are copies of one graph, and all have the sizes of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megengine as mge
import numpy as np

from qtrace.errors import ExportError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import op_label, owner

__all__ = ["shapes_of"]


def shapes_of(model: TracedModule, more: int = 0) -> dict[Node, tuple[int, ...]]:
    """Returns node -> shape for inputs of the traced shapes.

    Args:
        model: the traced module.
        more: by how much the first axis of every input is longer than traced.
    """
    return _ShapeRecorder(model).run_on_zeros(more)


class _ShapeRecorder(Interpreter):
    def __init__(self, model: TracedModule) -> None:
        super().__init__(model)
        self.shapes: dict[Node, tuple[int, ...]] = {}

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes an expr; a fake quant returns its input, which has the same shape."""
        if isinstance(owner(expr), (FakeQuant, BiasQuant)):
            return (inputs[1],)
        try:
            return super().run_expr(expr, inputs)
        except RuntimeError as error:  # such as the inverse of a matrix
            raise ExportError(
                f"{expr.outputs[0].name}: {op_label(expr)} cannot be computed on zeros, which is how shapes "
                f"are found ({str(error).splitlines()[0]}): end the graph before it."
            ) from error

    def on_node(self, node: Node, value: Any) -> Any:
        """Records the shape of a node."""
        if isinstance(node, TensorNode):
            self.shapes[node] = tuple(int(n) for n in value.shape)
        return value

    def run_on_zeros(self, more: int = 0) -> dict[Node, tuple[int, ...]]:
        """Runs the graph on zeros, with ``more`` added to the first axes, and returns its shapes."""
        module, *nodes = self.traced.graph.inputs
        shapes = [tuple(int(size) for size in n.shape) for n in nodes]
        shapes = [(s[0] + more, *s[1:]) if s else s for s in shapes]
        zeros = [mge.Tensor(np.zeros(s, np.dtype(n.dtype))) for s, n in zip(shapes, nodes, strict=True)]
        assert not isinstance(module, TensorNode)
        level, mge.config.async_level = mge.config.async_level, 0  # an error must come where it is caught
        try:
            self._execute(self.traced.graph, [self.traced, *zeros], None)
        finally:
            mge.config.async_level = level
        return self.shapes
