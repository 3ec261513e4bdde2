"""Dynamic inputs: where the values of a layer are rounded by the range of each batch."""

from __future__ import annotations

from collections.abc import Mapping

from qtrace.graph.types import Expr, TensorNode
from qtrace.preparation.annotation import DynamicInput, Site, free_name
from qtrace.preparation.passes._sites import Placement
from qtrace.preparation.passes._view import View

__all__ = ["place_dynamic"]


def place_dynamic(view: View, placement: Placement, weights: Mapping[Expr, Site]) -> tuple[DynamicInput, ...]:
    """Places one rounding before all layers with method ``dynamic`` that read the same value.

    Args:
        view: the graph under its config.
        placement: the activation sites.
        weights: layer -> the site of its weight.
    """
    readers: dict[TensorNode, list[str]] = {}
    for expr in weights:
        if view.method(expr) == "dynamic":
            readers.setdefault(view.calls[expr].inputs[0], []).append(expr.outputs[0].name)
    used_names = {*placement.sites, *(site.name for site in weights.values())}
    dynamic = []
    for node, names in readers.items():
        name = free_name(f"{node.name}_dynamic", used_names, view.node_names)
        used_names.add(name)
        dynamic.append(DynamicInput(name, node.name, tuple(names)))
    return tuple(dynamic)
