"""Adds and removes inputs and outputs of a traced graph, and what its module says about them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Input
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.pytree import TreeDef, tree_flatten

from qtrace.errors import GraphError
from qtrace.graph.interface import Interface, TensorInfo, read_interface, write_interface
from qtrace.graph.walk import op_label

__all__ = ["EndpointEdits"]


class EndpointEdits(ABC):
    """The part of an editor that changes the inputs and outputs of a graph.

    Args:
        traced: a flat traced module with one graph.
    """

    def __init__(self, traced: TracedModule) -> None:
        self.traced = traced
        self.graph = traced.graph

    @abstractmethod
    def _unique(self, name: str, node: Node) -> str:
        """Reserves a free name for ``node`` and returns it."""

    def add_input(self, name: str, shape: Sequence[int], dtype: Any = "float32") -> TensorNode:
        """Adds a last positional argument to ``forward``, and returns its node.

        Raises:
            GraphError: when ``forward`` has an argument of this name, or takes more than tensors by position.
        """
        node = _append_input(self.traced, name, shape, dtype)
        node._name = self._unique(name, node)
        return node

    def remove_input(self, node: TensorNode) -> None:
        """Removes an argument of ``forward``, which nothing may read any more.

        Raises:
            GraphError: when an expr reads the input, or it is part of a container.
        """
        if node.users or any(output is node for output in self.graph._outputs):
            readers = ", ".join(op_label(user) for user in dict.fromkeys(node.users)) or "an output"
            raise GraphError(f"input {node.name} is still used by {readers}: replace its uses first.")
        _drop_input(self.traced, node)
        self.graph._namespace.unassociate_name_with_obj(node)

    def add_output(self, node: TensorNode, key: str | None = None) -> None:
        """Makes ``forward`` return ``node`` too.

        One tensor becomes a tuple of two. A tuple or list grows by one value, and a dict by the one of
        ``key``.

        Raises:
            GraphError: when ``forward`` returns a dict and there is no key, or the other way round.
        """
        _replace_outputs(self.traced, _with_output(self.traced, node, key))

    def remove_output(self, node: TensorNode) -> None:
        """Drops ``node`` from the tuple, list or dict that ``forward`` returns.

        Raises:
            GraphError: when ``node`` is not in it, or nothing else is.
        """
        _replace_outputs(self.traced, _without_output(self.traced, node))

    def set_outputs(self, outputs: Any) -> None:
        """Makes ``forward`` return ``outputs``: a node, or tuples, lists and dicts of nodes.

        Raises:
            GraphError: when there is anything but nodes of tensors in ``outputs``.
        """
        _replace_outputs(self.traced, outputs)


def _append_input(traced: TracedModule, name: str, shape: Sequence[int], dtype: Any) -> TensorNode:
    """Adds a last positional argument of ``forward``; the caller gives its node a name.

    Raises:
        GraphError: when ``forward`` has keyword or variable arguments, or one of this name.
    """
    graph, spec = traced.graph, _plain_signature(traced)
    if not name.isidentifier() or name in spec.args:
        why = "is an input already" if name in spec.args else "is no name of an argument"
        raise GraphError(f"add_input: {name!r} {why}: choose another name.")
    arg_def, out_def = _definitions(traced)
    args, kwargs = arg_def.unflatten(list(graph._inputs))
    node: TensorNode = Input(TensorNode, name, f"{graph._qualname}.[{name}]").outputs[0]
    node._shape, node._dtype = tuple(int(n) for n in shape), np.dtype(dtype)
    node._device = Tensor(0.0).device
    defaults = None if spec.defaults is None else (*spec.defaults, None)
    graph._inputs.append(node)
    spec = spec._replace(args=[*spec.args, name], defaults=defaults)
    _define(traced, tree_flatten(((*args, node), kwargs))[1], out_def, spec)
    _edit_interface(traced, "inputs", add=TensorInfo(name, np.dtype(dtype).name))
    return node


def _drop_input(traced: TracedModule, node: Node) -> None:
    """Removes the argument of ``forward`` that is the tensor ``node``.

    Raises:
        GraphError: when ``node`` is no input or part of a container, or ``forward`` has keyword arguments.
    """
    graph, spec = traced.graph, _plain_signature(traced)
    arg_def, out_def = _definitions(traced)
    args, kwargs = arg_def.unflatten(list(graph._inputs))
    place = next((i for i, n in enumerate(graph._inputs) if n is node), 0)
    if place == 0:
        raise GraphError(f"remove_input: {node.name} is not a tensor input of the graph.")
    index = next((i for i, value in enumerate(args) if value is node), 0)
    if index == 0 or index >= len(spec.args):
        raise GraphError(f"remove_input: {node.name} is part of a container: replace the whole argument.")
    del graph._inputs[place]
    first_default = len(spec.args) - len(spec.defaults or ())
    defaults = list(spec.defaults or ())
    if index >= first_default:
        del defaults[index - first_default]
    names = [name for i, name in enumerate(spec.args) if i != index]
    kept = (value for i, value in enumerate(args) if i != index)
    spec = spec._replace(args=names, defaults=tuple(defaults) or None)
    _define(traced, tree_flatten(((*kept,), kwargs))[1], out_def, spec)
    _edit_interface(traced, "inputs", drop=place - 1)


def _with_output(traced: TracedModule, node: Node, key: str | None) -> Any:
    """Returns what ``forward`` returns, as nodes, with ``node`` after the other values.

    Raises:
        GraphError: when ``forward`` returns a dict and there is no key, or the other way round.
    """
    result = _current_outputs(traced)
    if isinstance(result, dict) != (key is not None):
        kind = "a dict" if isinstance(result, dict) else "no dict"
        need = "give the key of the output" if isinstance(result, dict) else "leave out the key"
        raise GraphError(f"add_output: forward returns {kind}: {need}.")
    if isinstance(result, dict):
        if key in result:
            raise GraphError(f"add_output: forward returns a value under {key!r} already.")
        return {**result, key: node}
    if type(result) in (list, tuple):
        return type(result)((*result, node))
    return (result, node)


def _without_output(traced: TracedModule, node: Node) -> Any:
    """Returns what ``forward`` returns, as nodes, without ``node``; a tuple of one value stays a tuple.

    Raises:
        GraphError: when ``node`` is no direct value of what forward returns, or the only one.
    """
    result = _current_outputs(traced)
    if isinstance(result, dict):
        remaining: Any = {k: v for k, v in result.items() if v is not node}
    elif type(result) in (list, tuple):
        remaining = type(result)(v for v in result if v is not node)
    else:
        raise GraphError(f"remove_output: {node.name} cannot go, since forward returns one tensor.")
    if len(remaining) == len(result):
        raise GraphError(f"remove_output: {node.name} is no value of the {type(result).__name__} of forward.")
    if not remaining:
        raise GraphError(f"remove_output: {node.name} is the last output.")
    return remaining


def _current_outputs(traced: TracedModule) -> Any:
    """Returns what ``forward`` returns, with the nodes of the graph in the place of tensors."""
    return _definitions(traced)[1].unflatten(list(traced.graph._outputs))


def _replace_outputs(traced: TracedModule, outputs: Any) -> None:
    """Makes ``forward`` return ``outputs``: a node, or tuples, lists and dicts of nodes.

    Raises:
        GraphError: when there is anything but nodes of tensors in ``outputs``.
    """
    try:
        leaves, out_def = tree_flatten(outputs, is_leaf=lambda leaf: isinstance(leaf, Node))
    except AssertionError:
        leaves, out_def = [None], None
    if not leaves or any(not isinstance(leaf, TensorNode) for leaf in leaves):
        raise GraphError("set_outputs: the outputs are nodes of tensors, or tuples, lists and dicts of them.")
    arg_def, _ = _definitions(traced)
    interface = read_interface(traced)
    known = {}
    if interface is not None:
        known = dict(zip(traced.graph._outputs, interface.outputs, strict=True))
    traced.graph._outputs[:] = leaves
    _define(traced, arg_def, out_def, traced.argspec)
    if interface is not None:
        infos = tuple(known.get(n) or TensorInfo(str(n.name), np.dtype(n.dtype).name) for n in leaves)
        write_interface(traced, replace(interface, outputs=infos))


def _plain_signature(traced: TracedModule) -> inspect.FullArgSpec:
    spec = traced.argspec
    arg_def, _ = _definitions(traced)
    constants = arg_def.num_leaves != len(traced.graph._inputs)
    keywords = spec is None or spec.varkw or spec.kwonlyargs or arg_def.children_defs[1].num_leaves
    if keywords or constants or spec.varargs:
        raise GraphError(
            "inputs can be added and removed where forward takes tensors by position only: trace a module "
            "whose forward does."
        )
    return spec


def _definitions(traced: TracedModule) -> tuple[TreeDef, TreeDef]:
    """Returns the structures of the arguments and of the result of the one traced call.

    Raises:
        GraphError: when the module was traced with several structures.
    """
    if len(traced.argdef_graph_map) != 1:
        raise GraphError("the module was traced with several structures: trace it with one to edit them.")
    arg_def = next(iter(traced.argdef_graph_map))
    return arg_def, traced.argdef_outdef_map[arg_def]


def _define(traced: TracedModule, arg_def: TreeDef, out_def: TreeDef | None, spec: Any) -> None:
    graph = traced.graph
    # New dicts: an edit that fails puts the old ones back.
    traced.argdef_graph_map, traced.argdef_outdef_map = {arg_def: graph}, {arg_def: out_def}
    traced.argspec = spec


def _edit_interface(
    traced: TracedModule, side: str, add: TensorInfo | None = None, drop: int | None = None
) -> None:
    """Adds or drops a tensor of the interface that ``traced`` carries, if it carries one."""
    text = getattr(traced, "onnx_interface", None)
    if text is None:
        return
    interface = Interface.from_json(text)  # not `read_interface`: it does not fit the graph any more
    tensors = list(getattr(interface, side))
    if drop is not None:
        del tensors[drop]
    if add is not None:
        tensors.append(add)
    write_interface(traced, replace(interface, **{side: tuple(tensors)}))
