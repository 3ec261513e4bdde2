"""Writes weights and biases that a graph computes from parameters as parameters, for `convert`.

A network may mask, scale, standardize, reshape or transpose a parameter before its layer reads it. These ops
stay while the graph is trained, so that gradients reach the parameters; a converted graph has their result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megengine import Parameter

from qtrace import ops
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold, BnFoldCall
from qtrace.graph.dataflow import evaluate_fixed, fixed_nodes
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute, set_parameter
from qtrace.graph.types import Constant, Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, free_name

__all__ = ["write_computed"]


def write_computed(model: TracedModule, annotation: Annotation) -> Annotation:
    """Replaces each weight, bias and static site that is computed only from parameters by a parameter.

    The parameter's node has the name of the node that it replaces. Parameters that no expr reads any more are
    deleted.

    Args:
        model: a prepared graph that is being converted; it is edited in place.
        annotation: the decisions for the graph.

    Returns:
        The decisions without the notes of the removed exprs; sites of new parameters are static.
    """
    before = exprs(model)
    computed = _find_computed(model, annotation)
    if not computed:
        return annotation
    values, names = evaluate_fixed(model, computed), {node.name for node in computed}
    with GraphEditor(model, renews_record=True) as editor:
        for node in computed:
            path = free_name(node.name, dir(model))
            set_parameter(model, path, Parameter(values[node].numpy()))
            editor.put_in_place(editor.get_attr(path), node)
    _delete_unread(model, before)
    alive = {node.name for expr in exprs(model) for node in expr.outputs}
    notes = tuple(note for note in annotation.notes if note.name in alive)
    sites = (dataclasses.replace(s, static=True) if s.node in names else s for s in annotation.sites)
    return dataclasses.replace(annotation, notes=notes, sites=tuple(sites))


def _find_computed(model: TracedModule, annotation: Annotation) -> list[TensorNode]:
    """Finds the nodes to replace, in graph order: they are computed only from unrounded parameters."""
    fixed = fixed_nodes(model, without=lambda expr: isinstance(owner(expr), (FakeQuant, BiasQuant)))
    sites = {site.node for site in annotation.sites}
    read = {node for expr in exprs(model) for node in _unrounded_parameters(expr)}
    return [
        node
        for expr in exprs(model)
        if not isinstance(expr, (GetAttr, Constant))
        for node in expr.outputs
        if node in fixed and (node.name in sites or node in read)
    ]


def _unrounded_parameters(expr: Expr) -> Iterator[TensorNode]:
    """Yields the weight, the bias and the factors that a layer or product reads, before their rounding."""
    if isinstance(owner(expr), BnFold):
        fold = BnFoldCall(*expr.args)
        yield from (node for node in (fold.weight, fold.bias) if node is not None)
    call = ops.read(expr)
    for node in (
        () if call is None or call.role is not Role.COMPUTE else (call.weight, call.bias, *call.inputs)
    ):
        if node is not None:
            yield node.expr.args[1] if isinstance(owner(node.expr), (FakeQuant, BiasQuant)) else node


def _delete_unread(model: TracedModule, before: list[Expr]) -> None:
    """Deletes the tensors that only exprs of ``before`` read, unless a called module owns them."""
    read = {expr.name: expr for expr in exprs(model) if isinstance(expr, GetAttr)}
    modules = tuple(f"{name}." for name, e in read.items() if not isinstance(e.outputs[0], TensorNode))
    deleted: set[str] = set()
    for expr in before:
        if not isinstance(expr, GetAttr) or not isinstance(expr.outputs[0], TensorNode):
            continue
        if expr.name not in read and expr.name not in deleted and not expr.name.startswith(modules):
            delete_attribute(model, expr.name)
            deleted.add(expr.name)
