"""The inputs and outputs of a traced graph: in its file, in its signature, and how they are added and
removed.

MegEngine computes int64 as int32, and qtrace computes float16 and float64 as float32. The interface
keeps the types of the file, so that an export declares them again. It is a plain attribute of the traced
module, as JSON text, which ``flatten``, ``prepare``, ``convert``, ``save`` and ``load`` keep.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.traced_module.pytree import LeafDef, TreeDef, tree_flatten

from qtrace.errors import GraphError
from qtrace.graph.failures import Saved, from_json, parsing
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import MAX_RANK
from qtrace.graph.types import Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import op_label, set_graph

# The interface of the file that a traced module was imported from: names, order and types of its tensors.

_ATTRIBUTE = "onnx_interface"

# Type in the file -> type of the node of the graph.
_CARRIED = {
    **{name: name for name in ("bool", "int8", "int16", "int32", "uint8", "uint16", "float32")},
    **dict.fromkeys(("int64", "uint16", "uint32", "uint64"), "int32"),
    **dict.fromkeys(("float16", "bfloat16", "float64"), "float32"),
}


@dataclass(frozen=True)
class TensorInfo(Saved):
    """Name and type of an input or output of a file.

    Attributes:
        name: the name of the tensor in the file, any text.
        dtype: the numpy name of its type in the file, such as ``int64``.
        sizes: the size of each axis that the file fixes, and None for each axis that it leaves open; None
            if they are unknown. An output has them where its values decide its shape.

    Raises:
        GraphError: for an empty name, a type that no traced module carries, or sizes that no tensor has.
    """

    name: str
    dtype: str
    sizes: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.encode(errors="ignore"):
            raise GraphError(f"an interface names its tensors by text that is not empty, not {self.name!r}.")
        if self.name.encode(errors="replace").decode() != self.name:
            raise GraphError(f"tensor {self.name!r} of an interface has a name that UTF-8 cannot express.")
        if not isinstance(self.dtype, str) or self.dtype not in _CARRIED:
            raise GraphError(
                f"tensor {self.name!r} of an interface has type {self.dtype!r}; "
                f"known: {', '.join(sorted(_CARRIED))}."
            )
        if self.sizes is not None and not _are_sizes(self.sizes):
            raise GraphError(f"tensor {self.name!r} of an interface has the sizes {self.sizes!r}.")

    @property
    def carried_dtype(self) -> str:
        """The type of the node that carries the tensor, such as ``int32`` for ``int64``."""
        return _CARRIED[self.dtype]

    @property
    def exported_dtype(self) -> str:
        """The type of the tensor in exported files: the file's type, but ``float32`` for bfloat16.

        Clients of runtimes in Python lack arrays of bfloat16.
        """
        return "float32" if self.dtype == "bfloat16" else self.dtype


@dataclass(frozen=True)
class Interface(Saved):
    """The inputs and outputs of the file that a traced module was imported from.

    Attributes:
        inputs: the inputs, in the order of the graph's inputs without ``self``.
        outputs: the outputs, in the order of the graph's outputs.
        metadata: keys and values that the file carries for its users, such as the names of classes.

    Raises:
        GraphError: when two inputs, or two outputs, have one name, or the metadata are no text.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        texts = [text for pair in self.metadata for text in pair]
        if not all(
            isinstance(text, str) and text.encode(errors="replace").decode() == text for text in texts
        ):
            raise GraphError("the metadata of an interface are pairs of texts that UTF-8 can express.")
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = Counter(tensor.name for tensor in tensors)
            if repeated := sorted((names - Counter(set(names))).keys()):
                raise GraphError(f"two {kind} of an interface are called {repeated[0]!r}.")

    def to_json(self) -> str:
        """Returns the interface as JSON text: ``{"inputs": [{"name": "x", "dtype": "int64"}], ...}``."""
        document = asdict(self)
        if not self.metadata:
            del document["metadata"]
        return json.dumps(document, ensure_ascii=True, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Interface:
        """Parses the text that `to_json` wrote.

        Raises:
            GraphError: when the text is anything else.
        """
        with parsing("the interface that the model carries is", "import the file again"):
            return from_json(cls, text)


def _are_sizes(sizes: Any) -> bool:
    if not isinstance(sizes, tuple) or len(sizes) > MAX_RANK:
        return False
    return all(n is None or (isinstance(n, int) and not isinstance(n, bool) and n > 0) for n in sizes)


def write_interface(traced: TracedModule, interface: Interface) -> None:
    """Attaches ``interface`` to ``traced``.

    Raises:
        GraphError: when the interface has other numbers or types of inputs or outputs than the graph.
    """
    _check(interface, traced)
    setattr(traced, _ATTRIBUTE, interface.to_json())


def read_interface(traced: TracedModule) -> Interface | None:
    """Returns the interface that ``traced`` carries, or None if it was not imported from a file.

    Raises:
        GraphError: when the interface is damaged or does not fit the graph.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    if text is None:
        return None
    interface = Interface.from_json(text)
    _check(interface, traced)
    return interface


def read_inputs(traced: TracedModule) -> dict[str, TensorInfo]:
    """Returns name of the argument of ``forward`` -> the input of the file that ``traced`` was imported from.

    Empty if it was not imported, or its inputs differ from the file's.

    Raises:
        GraphError: when the interface is damaged.
    """
    text, spec = getattr(traced, _ATTRIBUTE, None), traced.argspec
    if text is None or spec is None:
        return {}
    inputs, names = Interface.from_json(text).inputs, spec.args[1:]
    return dict(zip(names, inputs, strict=True)) if len(inputs) == len(names) else {}


def _check(interface: Interface, traced: TracedModule) -> None:
    """Refuses an interface that does not fit the graph of ``traced``."""
    graph = traced.graph
    sides: tuple[tuple[str, Sequence[TensorInfo], list[Any]], ...] = (
        ("input", interface.inputs, graph.inputs[1:]),
        ("output", interface.outputs, graph.outputs),
    )
    for kind, tensors, nodes in sides:
        if len(tensors) != len(nodes):
            raise GraphError(
                f"the interface that the model carries has {len(tensors)} {kind}s and the graph "
                f"{len(nodes)}: import the file again, and keep the {kind}s of the graph."
            )
        for tensor, node in zip(tensors, nodes, strict=True):
            known = isinstance(node, TensorNode) and node.dtype is not None
            dtype = np.dtype(node.dtype).name if known else tensor.carried_dtype
            if dtype != tensor.carried_dtype:
                raise GraphError(
                    f"{kind} {tensor.name!r} is {tensor.dtype} in the interface that the model carries, and "
                    f"node {node.name} of the graph is {dtype}: import the file again."
                )


# The arguments of a traced module: names and shapes of its inputs, and whether a call fits the trace.


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
    written_tensors = [written for name, tree in trees for written in _names_of_tensors(str(name), tree)]
    nodes = [node for node in graph.inputs if isinstance(node, TensorNode)]
    shapes = [tuple(int(n) for n in node.shape or ()) for node in nodes]
    return list(zip(written_tensors, shapes, strict=True))


def _names_of_tensors(name: str, tree: TreeDef) -> Iterator[str]:
    """Yields the names of the tensors in an argument, in the order of the graph's inputs."""
    if isinstance(tree, LeafDef):
        if Tensor in tree.type:
            yield name
        return
    keys = tree.aux_data if issubclass(tree.type, dict) else range(len(tree.children_defs))
    for key, child in zip(keys, tree.children_defs, strict=True):
        yield from _names_of_tensors(f"{name}[{key!r}]", child)


# Adds and removes inputs and outputs of a traced graph, and what its module says about them.


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
    set_graph(traced, traced.graph, tree_flatten(((*args, node), kwargs))[1], out_def, spec)
    _edit_interface(traced, add=TensorInfo(name, np.dtype(dtype).name))
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
    others = (value for i, value in enumerate(args) if i != index)
    spec = spec._replace(args=names, defaults=tuple(defaults) or None)
    set_graph(traced, traced.graph, tree_flatten(((*others,), kwargs))[1], out_def, spec)
    _edit_interface(traced, drop=place - 1)


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
    set_graph(traced, traced.graph, arg_def, out_def, traced.argspec)
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


def _edit_interface(traced: TracedModule, add: TensorInfo | None = None, drop: int | None = None) -> None:
    """Adds or drops an input of the interface that ``traced`` carries, if it carries one."""
    text = getattr(traced, "onnx_interface", None)
    if text is None:
        return
    interface = Interface.from_json(text)  # not `read_interface`: it does not fit the graph any more
    inputs = list(interface.inputs)
    if drop is not None:
        del inputs[drop]
    if add is not None:
        inputs.append(add)
    write_interface(traced, replace(interface, inputs=tuple(inputs)))
