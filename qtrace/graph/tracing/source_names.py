"""Gives the modules of a trace the names that its source has in its ``state_dict``.

A module may have two names, such as an attribute and an item of a list. The ``state_dict`` has the first of
them in alphabetical order; a trace has those that ``forward`` uses. With the former in the trace, a
``state_dict`` of the source fits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megengine import Tensor
from megengine.module import Module
from megengine.module.module import _expand_structure
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallMethod, Expr, GetAttr, is_call_module
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.traced_module import InternalGraph

__all__ = ["restore_input_names", "restore_names"]


def restore_names(source: Module, traced: TracedModule) -> None:
    """Names the modules and tensors of ``traced`` as the ``state_dict`` of ``source`` does.

    A module that was traced separately under both of its names, with different arguments, keeps them.

    Args:
        source: the module that ``traced`` was traced from.
        traced: the hierarchical trace; it is changed in place.
    """
    renamed = [pair for pair in list(_second_names(source, traced, "")) if _rename(traced, *pair)]
    if not renamed:
        return
    traced._update_ref()
    for module in traced.modules():
        if isinstance(module, TracedModule):
            for graph in module.argdef_graph_map.values():
                _requalify(graph, traced.graph._qualname, renamed)


def restore_input_names(traced: TracedModule) -> None:
    """Names the inputs of ``traced`` after the arguments of forward that they are.

    MegEngine counts only tensors when it looks for the names: after an argument that is left out, each
    input gets the name of another one.
    """
    ((arg_def, graph),) = traced.argdef_graph_map.items()
    args, kwargs = arg_def.children_defs
    spec = traced.argspec
    names = [] if spec is None else spec.args[1:]
    trees = [*zip(names, args.children_defs[1:], strict=False)]
    trees += zip(kwargs.aux_data or (), kwargs.children_defs, strict=True)
    found = [name for argument, tree in trees for name in _input_names(str(argument), tree)]
    nodes = [node for node in graph.inputs if isinstance(node, TensorNode)]
    if len(found) != len(nodes):  # arguments beyond those with names
        return
    wrong = [(node, name) for node, name in zip(nodes, found, strict=True) if node._name != name]
    names = graph._namespace
    holders = [(names.used_names.get(name), name) for _, name in wrong]
    others = [(other, name) for other, name in holders if other is not None and other not in nodes]
    for node in (*(node for node, _ in wrong), *(other for other, _ in others)):
        names.unassociate_name_with_obj(node)
    for node, name in (*wrong, *others):  # a result of an op that has the name of an input gets another one
        node._name = names.create_unique_name(name, node)


def _input_names(argument: str, tree: TreeDef) -> Iterator[str]:
    """Yields the names of the tensors in an argument: its own, or with the number of the value within it."""
    if isinstance(tree, LeafDef):
        yield from [argument] if Tensor in tree.type else []
        return
    leaves = [leaf for child in tree.children_defs for leaf in _leaves(child)]
    for number, leaf in enumerate(leaves):
        if Tensor in leaf.type:
            yield f"{argument}_{number}"


def _leaves(tree: TreeDef) -> Iterator[LeafDef]:
    if isinstance(tree, LeafDef):
        yield tree
        return
    for child in tree.children_defs:
        yield from _leaves(child)


def _second_names(source: Module, traced: Module, path: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of a path in ``traced`` and the path that it should have, the deepest first."""
    first: dict[int, str] = {}
    own = vars(source)
    for key in sorted(own):
        for name, leaf in _expand_structure(key, own[key]):
            child = _get(traced, name)
            if isinstance(leaf, Module) and isinstance(child, TracedModule):
                yield from _second_names(leaf, child, _join(path, name))
            first_name = first.setdefault(id(leaf), name)
            if first_name != name and isinstance(child, (Module, Tensor)):
                yield _join(path, name), _join(path, first_name)


def _rename(root: TracedModule, old: str, new: str) -> bool:
    """Moves the attribute at the path ``old`` to ``new``; returns whether that is possible."""
    present, moved = _get(root, new), _get(root, old)
    if present is not None and present is not moved:
        if not (_alike(present, moved) and isinstance(present, TracedModule)):
            return False
    elif present is None and not _attach(root, new, moved):
        return False
    for path in _ancestors(old):
        module = _get(root, path)
        if isinstance(module, TracedModule):
            for graph in module.argdef_graph_map.values():
                _redirect(graph, old[len(path) :].lstrip("."), new[len(path) :].lstrip("."))
    _detach(root, old)
    return True


def _alike(left: Any, right: Any) -> bool:
    """Returns whether two traces of one module have the same graphs and the same modules below."""
    if not (isinstance(left, TracedModule) and isinstance(right, TracedModule)):
        return left is right
    if set(left.argdef_graph_map) != set(right.argdef_graph_map):
        return False
    lefts, rights = dict(_children(left)), dict(_children(right))
    return lefts.keys() == rights.keys() and all(_alike(lefts[k], rights[k]) for k in lefts)


def _children(module: Module) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in vars(module).items() if isinstance(v, (Module, Tensor)))


def _redirect(graph: InternalGraph, old: str, new: str) -> None:
    """Makes every expr of ``graph`` that reads the attribute ``old`` of its module read ``new``."""
    paths: dict[Node, str] = {graph._inputs[0]: ""}
    for expr in list(graph._exprs):
        if not isinstance(expr, GetAttr) or expr.inputs[0] not in paths:
            continue
        path = paths[expr.outputs[0]] = _join(paths[expr.inputs[0]], expr.name)
        if path == old:
            _get_from(graph, expr, graph._inputs[0], new)


def _get_from(graph: InternalGraph, expr: GetAttr, base: ModuleNode, name: str) -> None:
    before = expr.inputs[0]
    before.users.remove(expr)
    base.users.append(expr)
    expr.inputs[0], expr.name = base, name
    _rename_nodes(graph, expr.outputs[0], name.replace(".", "_"))
    while isinstance(before.expr, GetAttr) and not before.users and before not in graph._outputs:
        unused: Expr = before.expr
        graph._exprs.remove(unused)
        before = unused.inputs[0]
        before.users.remove(unused)


def _rename_nodes(graph: InternalGraph, node: Node, name: str) -> None:
    """Renames ``node`` and the results of the calls of its module after the attribute ``name``."""
    old, node._name = node._name, graph._namespace.create_unique_name(name, node)
    for user in node.users:
        if isinstance(user, CallMethod) and user.inputs[0] is node:
            for out in user.outputs:
                if out._name.startswith(f"{old}_"):
                    new_name = f"{node._name}{out._name[len(old) :]}"
                    out._name = graph._namespace.create_unique_name(new_name, out)


def _attach(root: TracedModule, path: str, value: Any) -> bool:
    """Sets the attribute at ``path`` and creates its containers; False if a container is no module."""
    parent: Any = root
    *containers, name = path.split(".")
    for part in containers:
        if not hasattr(parent, part):
            _set(parent, part, TracedModule(False, {}, {}, False))
        parent = getattr(parent, part)
        if not isinstance(parent, Module):
            return False
    _set(parent, name, value)
    return True


def _set(parent: Module, name: str, value: Any) -> None:
    """Sets an attribute like ``setattr``, which would warn that the module keeps its old name."""
    parent.__dict__[name] = value
    if isinstance(value, Module) and name not in parent._modules:
        parent._modules.append(name)


def _detach(root: TracedModule, path: str) -> None:
    """Removes the attribute at ``path``, and the containers that are empty afterwards."""
    parent_path, _, name = path.rpartition(".")
    parent = _get(root, parent_path)
    delattr(parent, name)
    empty = isinstance(parent, TracedModule) and not parent.argdef_graph_map and not list(_children(parent))
    if parent_path and empty:
        _detach(root, parent_path)


def _requalify(graph: InternalGraph, top: str, renamed: list[tuple[str, str]]) -> None:
    """Rewrites the paths that MegEngine recorded for a graph and its nodes."""
    graph._qualname = _requalified(graph._qualname, top, renamed)
    graph._namespace.qualname = graph._qualname
    nodes = list(graph._inputs)
    for expr in graph._exprs:
        nodes.extend(expr.outputs)
        if isinstance(expr, CallMethod) and is_call_module(expr):
            nodes.append(expr.inputs[0])
    for node in dict.fromkeys(nodes):
        node._qualname = _requalified(node._qualname, top, renamed)


def _requalified(name: str, top: str, renamed: list[tuple[str, str]]) -> str:
    for old, new in renamed:
        old_name = f"{top}.{old}"
        if name == old_name or name.startswith(f"{old_name}."):
            name = f"{top}.{new}{name[len(old_name) :]}"
    return name


def _ancestors(path: str) -> Iterator[str]:
    """Yields the paths above ``path``, from its parent to the root, which is ''."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _get(root: Module, path: str) -> Any:
    """Returns the attribute at a dotted path; None if there is none."""
    value: Any = root
    for part in path.split(".") if path else ():
        value = vars(value).get(part) if isinstance(value, Module) else None
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
