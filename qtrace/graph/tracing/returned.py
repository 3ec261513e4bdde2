"""Restores the order in which a trace returns its results: MegEngine sorts the keys of dicts."""

from __future__ import annotations

from typing import Any

from megengine.traced_module import TracedModule
from megengine.traced_module.pytree import LeafDef, TreeDef

from qtrace.graph.tracing.recording import PYTHON_VALUES

__all__ = ["key_order", "restore_key_order"]


def key_order(result: Any) -> Any:
    """Returns the dicts, lists and tuples of ``result`` with None in the place of every tensor."""
    if isinstance(result, dict):
        return {
            key: key_order(value) for key, value in result.items() if not isinstance(value, PYTHON_VALUES)
        }
    if isinstance(result, (list, tuple)):
        return [key_order(value) for value in result if not isinstance(value, PYTHON_VALUES)]
    return None


def restore_key_order(traced: TracedModule, order: Any) -> None:
    """Makes ``traced`` return its dicts with their keys as in ``order``, which ``key_order`` returned.

    Only the top graph changes: the callers of other graphs expect sorted keys.
    """
    ((arg_def, out_def),) = traced.argdef_outdef_map.items()
    graph = traced.argdef_graph_map[arg_def]
    if len(graph._outputs) != out_def.num_leaves:
        return
    ordered, leaves = _ordered(out_def, order, 0)
    graph._outputs[:] = [graph._outputs[i] for i in leaves]
    traced.argdef_outdef_map[arg_def] = ordered


def _ordered(tree: TreeDef, order: Any, start: int) -> tuple[TreeDef, list[int]]:
    """Returns ``tree``, whose first leaf is number ``start``, in ``order``, and the old leaf numbers."""
    keys = _keys(tree, order)
    if keys is None:
        return tree, list(range(start, start + tree.num_leaves))
    children: dict[Any, tuple[TreeDef, list[int]]] = {}
    for key, child in zip(keys, tree.children_defs, strict=True):
        children[key] = _ordered(child, order[key], start)
        start += child.num_leaves
    ordered_keys = tuple(key for key in order if key in children) if isinstance(order, dict) else keys
    leaves = [leaf for key in ordered_keys for leaf in children[key][1]]
    data = ordered_keys if isinstance(order, dict) else tree.aux_data
    return TreeDef(tree.type, data, [children[key][0] for key in ordered_keys]), leaves


def _keys(tree: TreeDef, order: Any) -> tuple[Any, ...] | None:
    """Returns the keys of the children of ``tree``; None for a leaf or if ``order`` does not fit."""
    if isinstance(tree, LeafDef):
        return None
    if issubclass(tree.type, dict) and isinstance(order, dict) and set(tree.aux_data) <= set(order):
        return tuple(tree.aux_data)
    same = tree.type in (list, tuple) and isinstance(order, list) and len(order) == len(tree.children_defs)
    return tuple(range(len(order))) if same else None
