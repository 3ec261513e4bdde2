"""Finds tensors whose number of rows depends on values: results of NMS or a mask, and what they lead to.

If one LSB moves a value over a threshold, graph and runtime keep different numbers of rows. Their values then
cannot be compared, and the file need not be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qtrace.graph.source_lines import name_with_line
from qtrace.graph.types import Node, TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.outputs.selections import selects

__all__ = ["Shape", "Unsettled", "describe_rows", "find_selections"]

Shape = tuple[int, ...]


def find_selections(model: TracedModule) -> dict[Node, str]:
    """Finds the tensors whose number of rows depends on values.

    Returns:
        Node -> the first op before the node that selects rows, in words, with its source line if known.
    """
    selections: dict[Node, str] = {}
    for expr in exprs(model):
        origins = [selections[node] for node in expr.inputs if node in selections]
        if origins or selects(expr):
            origin = origins[0] if origins else name_with_line(expr, op_label(expr))
            selections.update((node, origin) for node in expr.outputs)
    return selections


class Unsettled:
    """Follows values that both sides may decide otherwise from the same integers, in graph order.

    Attributes:
        unequal: the nodes that both sides have decided otherwise, and the nodes that are computed from them.
    """

    def __init__(self) -> None:
        self._open: set[Node] = set()  # up to the next site
        self.unequal: set[Node] = set()

    def follow(self, node: Node, starts: bool, site: bool) -> bool:
        """Returns whether a node may differ.

        Args:
            node: the node, later in the graph than those before.
            starts: whether its own op decides.
            site: whether the runtime's integers are taken there: what follows is equal, if they are.
        """
        if not (starts or self._open or self.unequal):
            return False
        inputs = set(node.expr.inputs)
        unequal = not inputs.isdisjoint(self.unequal)
        unsettled = starts or not inputs.isdisjoint(self._open)
        if unequal:
            self.unequal.add(node)
        if unsettled and (unequal or not site):
            self._open.add(node)
        return unsettled

    def differ(self, *nodes: Node) -> None:
        """Records that both sides have decided otherwise, and ``nodes`` with what was decided."""
        self.unequal |= self._open | set(nodes)

    def among(self, outputs: Iterable[tuple[str, Node]]) -> set[str]:
        """Returns the names of those outputs that may differ."""
        return {name for name, node in outputs if node in self._open or node in self.unequal}


def describe_rows(tensor: str, shapes: Sequence[tuple[Shape, Shape]]) -> str:
    """Says that graph and runtime have different rows of a tensor.

    Args:
        tensor: "site" or "output" and its name.
        shapes: the tensor's shape in the graph and in the runtime, for each batch in which its rows differ.
    """
    graph, runtime = next(((a, b) for a, b in shapes if a != b), shapes[0])
    batches = f"in {len(shapes)} batch{'' if len(shapes) == 1 else 'es'}"
    if graph == runtime:
        return (
            f"{tensor} has other rows in the runtime than in the graph, or another order of them, {batches}"
        )
    return f"{tensor} has shape {runtime} in the runtime and {graph} in the graph {batches}"
