"""The arguments of a traced module: names and shapes of its inputs, and whether a call fits the trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megengine import Tensor
from megengine.traced_module import TracedModule
from megengine.traced_module.node import TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef

from qtrace.errors import GraphError
from qtrace.graph.interface import read_inputs
from qtrace.graph.interpreter import Interpreter

__all__ = ["argument_names", "has_traced_structure", "list_inputs"]


def argument_names(traced: TracedModule) -> tuple[str, ...]:
    """Returns the names of forward's arguments without ``self``; empty if the trace does not know them."""
    spec = traced.argspec
    return () if spec is None else (*spec.args[1:], *spec.kwonlyargs)


def has_traced_structure(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call with these arguments has a traced structure; does not compare shapes."""
    try:
        Interpreter(traced).bind(args, kwargs)
    except GraphError:
        return False
    return True


def list_inputs(traced: TracedModule) -> list[tuple[str, tuple[int, ...]]]:
    """Lists name and shape of every input tensor, such as ``("x['left']", (1, 3, 8, 8))``.

    The inputs of an imported module have their names in the file.

    Args:
        traced: the module; if it was traced with several structures, the first counts.
    """
    arg_def, graph = next(iter(traced.argdef_graph_map.items()))
    args, kwargs = arg_def.children_defs
    names = [] if traced.argspec is None else traced.argspec.args[1:]
    declared = read_inputs(traced)
    names = [declared[name].name if name in declared else name for name in names]
    names = [*names, *(f"input {i}" for i in range(len(names), len(args.children_defs) - 1))]
    trees = [*zip(names, args.children_defs[1:], strict=True)]
    trees += zip(kwargs.aux_data or (), kwargs.children_defs, strict=True)
    written_tensors = [written for name, tree in trees for written in _tensors(str(name), tree)]
    nodes = [node for node in graph.inputs if isinstance(node, TensorNode)]
    shapes = [tuple(int(n) for n in node.shape or ()) for node in nodes]
    return list(zip(written_tensors, shapes, strict=True))


def _tensors(name: str, tree: TreeDef) -> Iterator[str]:
    """Yields the names of the tensors in an argument, in the order of the graph's inputs."""
    if isinstance(tree, LeafDef):
        if Tensor in tree.type:
            yield name
        return
    keys = tree.aux_data if issubclass(tree.type, dict) else range(len(tree.children_defs))
    for key, child in zip(keys, tree.children_defs, strict=True):
        yield from _tensors(f"{name}[{key!r}]", child)
