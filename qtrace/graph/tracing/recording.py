"""Changes MegEngine's tracer while qtrace traces.

The tracer then records the source line of each expr, records attention in parts, and accepts a forward that
returns None or numbers among tensors: the graph returns the tensors. What called a submodule has such a value
from the submodule itself, as any other Python value.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megengine.functional as F
import numpy as np
from megengine.core._imperative_rt import OpDef
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.traced_module import TracedModule, traced_module
from megengine.traced_module.expr import Apply
from megengine.traced_module.node import NodeMixin
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.tm_config import _exclude_from_trace
from megengine.traced_module.traced_module import TracedModuleBuilder

from qtrace.errors import TraceError
from qtrace.graph.source_lines import name_with_line, recorded_lines
from qtrace.graph.tracing.leaves import attention_in_parts
from qtrace.graph.tracing.tracer import Tracer, find_replacements, recorded_as
from qtrace.graph.walk import op_label

__all__ = [
    "NONE_IS_DROPPED",
    "PYTHON_VALUES",
    "VALUES_ARE_DROPPED",
    "check_kernels",
    "check_readers",
    "holds_none",
    "key_order",
    "recording",
    "restore_key_order",
    "without_none",
]

NONE_IS_DROPPED = "forward returns None among tensors: the trace returns only the tensors."
VALUES_ARE_DROPPED = (
    "forward returns Python values among tensors, such as numbers: the trace returns only the tensors."
)
_KNOWN_COMPILED = ("Where",)  # `expand` writes it as a function
PYTHON_VALUES = (type(None), bool, int, float, str, bytes, np.generic, np.ndarray, np.dtype)
"""Types of the values that a graph does not compute."""
_CALL = TracedModuleBuilder.__call__.__code__  # `watch_reads` replaces the method while it watches


def without_none(result: Any) -> Any:
    """Returns ``result`` without None in its dicts, lists and tuples."""
    return _without(result, type(None))


def _without(result: Any, kinds: type | tuple[type, ...]) -> Any:
    """Returns ``result`` without values of ``kinds`` in its dicts, lists and tuples."""
    if type(result) in (list, tuple):
        return type(result)(_without(v, kinds) for v in result if not isinstance(v, kinds))
    if isinstance(result, dict):
        tensors = copy.copy(result)  # keeps the kind of dict
        tensors.clear()
        tensors.update((k, _without(v, kinds)) for k, v in result.items() if not isinstance(v, kinds))
        return tensors
    return result


def holds_none(result: Any) -> bool:
    """Returns whether a dict, list or tuple of ``result`` contains None."""
    values = list(result.values()) if isinstance(result, dict) else result
    return isinstance(values, (list, tuple)) and any(v is None or holds_none(v) for v in values)


@contextmanager
def recording(tracer: Tracer) -> Iterator[None]:
    """Applies the changes that this module describes to all traces within the block.

    Args:
        tracer: says what a call is recorded as.
    """
    flatten, wrap = traced_module.tree_flatten, traced_module._wrapped_function
    replacements = find_replacements(tracer)

    def flatten_values(values: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code is not _CALL:
            return flatten(values, *args, **kwargs)
        if "is_leaf" not in kwargs:
            leaves, tree = flatten(values, *args, **kwargs)
            return _distinct(leaves), tree
        if not (builder := caller.f_locals["self"])._is_builtin:
            values = (
                ()
                if isinstance(values, PYTHON_VALUES) and not builder._is_top
                else _without(values, PYTHON_VALUES)
            )
        return flatten(values, *args, **kwargs)

    def wrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
        if function is _ATTENTION:
            return attention_in_parts
        wrapped, other = wrap(function), replacements.get(id(function))
        return wrapped if other is None else recorded_as(other, wrapped, wrap)

    traced_module.tree_flatten, traced_module._wrapped_function = flatten_values, wrap_function
    try:
        with recorded_lines():
            yield
    finally:
        traced_module.tree_flatten, traced_module._wrapped_function = flatten, wrap


def _distinct(arguments: list[Any]) -> list[Any]:
    """Returns the arguments of a submodule with a copy of each tensor that is given again.

    MegEngine's tracer knows an argument by its object: it would record one argument for all places, and a
    later call with other tensors would compute something else.
    """
    distinct: list[Any] = []
    for argument in arguments:
        node = NodeMixin.get(argument, None) if isinstance(argument, RawTensor) else None
        if node is not None and any(argument is other for other in distinct):
            with _exclude_from_trace():
                argument = argument.detach()
            NodeMixin.wrap_safe(argument, node)
        distinct.append(argument)
    return distinct


_ATTENTION = F.nn.multi_head_attention


def check_kernels(traced: TracedModule, name: str) -> None:
    """Refuses ops that were compiled from other ops: no file and no export can contain them.

    Raises:
        TraceError: for such an op, with its module and its line.
    """
    for module in traced.modules():
        graphs: Any = getattr(module, "argdef_graph_map", None) or {}
        for graph in graphs.values():
            for expr in graph._exprs:
                if _is_compiled(expr):
                    raise TraceError(
                        f"{name}: {name_with_line(expr, str(expr.opdef))} is compiled from other ops, which "
                        "no file and no export can hold: write it with functions of megengine.functional."
                    )


def check_readers(traced: TracedModule, name: str) -> None:
    """Refuses an op that reads a tensor which another module computed and did not return.

    Raises:
        TraceError: for such an op, with its line and the line that computes the tensor.
    """
    for module in traced.modules():
        graphs: Any = getattr(module, "argdef_graph_map", None) or {}
        for graph in graphs.values():
            known = set(graph._inputs)
            for expr in graph._exprs:
                for node in expr.inputs:
                    if node not in known:
                        raise TraceError(
                            f"{name}: {name_with_line(expr, op_label(expr))} reads a tensor that a "
                            f"submodule keeps on itself, {name_with_line(node.expr, op_label(node.expr))}, "
                            "which a trace does not pass on: return it as an output."
                        )
                known.update(expr.outputs)


def _is_compiled(expr: Any) -> bool:
    return isinstance(expr, Apply) and type(expr.opdef) is OpDef and str(expr.opdef) not in _KNOWN_COMPILED


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
