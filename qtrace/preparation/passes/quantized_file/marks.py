"""Takes the marks of given roundings out of a graph, and remembers who reads which rounded value."""

from __future__ import annotations

from dataclasses import dataclass, field

from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.preparation.passes.quantized_file.tensors import FileRounding, StoredGrid

__all__ = ["Mark", "take_marks"]


@dataclass(eq=False)
class Mark:
    """A rounding of the value of a node.

    Attributes:
        node: the node.
        grid: the grid.
        parent: the rounding whose result is rounded again; None for one of the value itself.
        readers: the ops that read the rounded value.
        leaves: whether the rounded value is an output of the graph.
    """

    node: TensorNode
    grid: StoredGrid
    parent: Mark | None
    readers: list[Expr] = field(default_factory=list)
    leaves: bool = False


def take_marks(model: TracedModule) -> dict[Node, list[Mark]]:
    """Removes the calls of `FileRounding` from a flat graph.

    Equal roundings of one value become one.

    Returns:
        node -> the roundings of its value, each after its parent.
    """
    marks: dict[Node, list[Mark]] = {}
    marked: dict[Node, Mark] = {}  # the result of a mark -> the mark
    calls = [expr for expr in exprs(model) if isinstance(owner(expr), FileRounding)]
    outputs = set(model.graph.outputs)
    for expr in calls:
        rounding = owner(expr)
        assert isinstance(rounding, FileRounding)
        source, result = expr.inputs[1], expr.outputs[0]
        parent = marked.get(source)
        node = parent.node if parent else source
        mark = _merged(marks.setdefault(node, []), Mark(node, rounding.grid, parent))
        marked[result] = mark
        mark.readers += [u for u in dict.fromkeys(result.users) if u not in calls and u not in mark.readers]
        mark.leaves |= result in outputs
    paths = [expr.inputs[0].expr.name for expr in calls if isinstance(expr.inputs[0].expr, GetAttr)]
    with GraphEditor(model) as editor:
        for expr in calls:
            editor.replace_uses(expr.outputs[0], expr.inputs[1])
            editor.remove(expr)
    for path in dict.fromkeys(paths):
        delete_attribute(model, path)
    return marks


def _merged(marks: list[Mark], new: Mark) -> Mark:
    """Returns an equal rounding of the same value, or ``new`` after it is added."""
    if new.parent is not None and new.parent.grid.equals(new.grid):
        return new.parent
    for mark in marks:
        if mark.parent is new.parent and mark.grid.equals(new.grid):
            return mark
    marks.append(new)
    return new
