"""The origin of NaN and infinity: the first op on the way to a value that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.calibration.base import Arguments
from qtrace.errors import CalibrationError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.source_lines import name_with_line
from qtrace.graph.tracing.nonfinite import is_meant, remedy_for
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import op_label

__all__ = ["nonfinite_origins", "refuse_nonfinite_output"]


class _OriginFinder(Interpreter):
    """Runs a graph and follows NaN and infinity from the expr that produced them first.

    Attributes:
        origins: node that holds NaN or infinity -> the expr that produced them first; None for intended
            infinity, as in a mask, which an argument, a parameter or an input holds.
    """

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.origins: dict[Node, Expr | None] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Finds the origin of a value that is not finite."""
        if isinstance(node, TensorNode) and np.dtype(value.dtype).kind == "f":
            array = value.numpy()
            if not np.isfinite(array).all():
                self.origins[node] = self._origin(node.expr, bool(np.isnan(array).any()))
        return value

    def _origin(self, expr: Expr, nan: bool) -> Expr | None:
        tensors = [n for n in expr.inputs if isinstance(n, TensorNode)]
        before = [self.origins[n] for n in tensors if n in self.origins]
        earlier = next((origin for origin in before if origin is not None), None)
        if earlier is not None:
            return earlier
        overflows = bool(tensors) and not before and not is_meant(expr)
        return expr if nan or overflows else None


def nonfinite_origins(model: TracedModule, arguments: Arguments) -> dict[Node, Expr | None]:
    """Runs a graph and returns the origins of NaN and infinity in its values.

    Args:
        model: a flat graph, in the phase to examine.
        arguments: the arguments of its forward.

    Returns:
        Node that holds NaN or infinity -> the expr that produced them first, in graph order; None for
        infinity that an argument, a parameter or an input of the graph holds.
    """
    args, kwargs = arguments
    search = _OriginFinder(model)
    search.run(*args, **kwargs)
    return search.origins


def refuse_nonfinite_output(
    model: TracedModule, arguments: Arguments, index: int, output: TensorNode
) -> None:
    """Refuses a batch for which an output of the graph holds NaN or infinity.

    Args:
        model: the prepared graph, in the phase float.
        arguments: the arguments of its forward.
        index: the number of the batch.
        output: the node that held NaN or infinity.

    Raises:
        CalibrationError: when the infinity is not intended, as a mask of ``-inf`` is; it names output, batch,
            and the op that produced NaN or infinity first.
    """
    origins = nonfinite_origins(model, arguments)
    origin = origins.get(output, output.expr)  # finite in MegEngine: another engine computed the value
    if origin is None:
        return
    place = name_with_line(origin, op_label(origin))
    remedy = remedy_for(origin) or "repair the data or the model"
    raise CalibrationError(
        f"output {output.name}, batch {index}: it holds NaN or infinity, which {place} gives first: {remedy}."
    )
