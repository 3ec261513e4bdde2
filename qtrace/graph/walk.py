"""Walks over a graph: exprs, users, owners, names and paths, and the structure of an expr's arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module.pytree import TreeDef, tree_flatten
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.types import (
    Apply,
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    Input,
    Node,
    TensorNode,
    TracedModule,
    is_call_module,
)

# Arguments of an expr: their structure, and the parameters of MegEngine's functions.


def set_arguments(expr: Expr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives ``expr`` its arguments, and its nodes one more user."""
    leaves, expr.arg_def = tree_flatten((tuple(args), kwargs))
    expr.inputs, expr.const_val = [], []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Node):
            expr.inputs.append(leaf)
            leaf.users.append(expr)
        else:
            expr.const_val.append((index, leaf))


@functools.lru_cache(maxsize=256)
def signature(func: Callable[..., Any]) -> inspect.Signature:
    """Returns the cached signature of a MegEngine function, which `inspect` takes a millisecond to find."""
    return inspect.signature(inspect.unwrap(func))


@functools.lru_cache(maxsize=256)
def argument_spec(func: Callable[..., Any]) -> inspect.FullArgSpec:
    """Returns the cached argument names and defaults of a MegEngine function."""
    return inspect.getfullargspec(inspect.unwrap(func))


# Walks over a graph: exprs, users, owners, names and paths.


def unused_name(name: str, is_used: Callable[[str], bool]) -> str:
    """Returns ``name``, with the first number from 1 that makes it unused if it is used.

    Args:
        name: the preferred name.
        is_used: whether something has a name already; ``names.__contains__`` for a set of names.
    """
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if not is_used(each))


def describe_path(value: Any) -> str:
    """Returns what a path in the place of a model is, and the function that reads it; "" for anything else.

    Args:
        value: the argument in the place of a model.
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        return ""
    path = PurePath(os.fsdecode(value))
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        return f"{str(path)!r} is a path: read the network by qtrace.from_onnx first"
    if suffix == ".mge":
        return f"{str(path)!r} is a path: read the model by qtrace.load first"
    return f"{str(path)!r} is text: give the module, or what qtrace.load or qtrace.from_onnx reads"


# Types of most attributes, which are told apart at once.
_WITHOUT_MODULES = frozenset((bool, float, int, str, type(None), np.ndarray, Parameter, Tensor))

_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
IN_PLACE = {f"__i{name}__": f"__{name}__" for name in _ARITHMETIC.split()}
"""Method that writes its result into its tensor -> the method that gives a new one."""


def check_traced(traced: Any, needs: str) -> None:
    """Refuses what is no traced module, after the words of ``needs``, such as ``lint takes``."""
    if not isinstance(traced, TracedModule):
        raise GraphError(f"{needs} a TracedModule, not a {type(traced).__name__}: trace it by qtrace.trace.")


@contextmanager
def patched(owner: Any, **changes: Any) -> Iterator[None]:
    """Replaces attributes of a class or module within the block."""
    own = {name: vars(owner)[name] for name in changes if name in vars(owner)}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in changes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


def graphs_of(root: Module) -> Iterator[InternalGraph]:
    """Yields the graphs of ``root`` and of all modules inside."""
    for module in root.modules():
        yield from (getattr(module, "argdef_graph_map", None) or {}).values()


def set_graph(
    traced: TracedModule, graph: InternalGraph, arg_def: TreeDef, out_def: TreeDef | None, argspec: Any
) -> None:
    """Makes ``graph`` the forward of ``traced``, in new dicts: an edit that fails puts the old ones back."""
    traced.argdef_graph_map, traced.argdef_outdef_map = {arg_def: graph}, {arg_def: out_def}
    traced.argspec = argspec


def set_positional_graph(traced: TracedModule, graph: InternalGraph, out_def: TreeDef) -> None:
    """Makes ``graph`` the forward of ``traced``, with one positional argument an input."""
    names = [node._name for node in graph._inputs]
    arg_def = tree_flatten(((traced, *(Tensor(0.0) for _ in names[1:])), {}))[1]
    set_graph(traced, graph, arg_def, out_def, inspect.FullArgSpec(names, None, None, None, [], None, {}))


def exprs(traced: TracedModule) -> list[Expr]:
    """Returns the exprs of the top graph in execution order, without the exprs of the graph inputs."""
    return list(traced.graph._exprs)


def modules_of(root: Module) -> list[Module]:
    """Returns the modules of ``root.modules()``, in an order of their own and a fraction of its time.

    MegEngine looks for tensors as well, and sorts all attributes by name.
    """
    modules: dict[int, Module] = {id(root): root}
    stack: list[Any] = [root]
    while stack:
        value = stack.pop()
        if not isinstance(value, (list, tuple, dict)):
            parts = vars(value)
        elif isinstance(value, dict):
            parts = value
        else:
            parts = dict(enumerate(value))
        inside = [p for p in parts.values() if type(p) not in _WITHOUT_MODULES]
        for part in reversed(inside):
            if isinstance(part, (list, tuple, dict)):
                stack.append(part)
            elif isinstance(part, Module) and id(part) not in modules:
                modules[id(part)] = part
                stack.append(part)
    return list(modules.values())


def users(node: Node) -> Iterator[Expr]:
    """Yields the exprs that read ``node``, each once, in the order in which they were recorded."""
    yield from dict.fromkeys(node.users)


def is_float_tensor(node: Node) -> bool:
    """Returns whether ``node`` is a float32 tensor: only such nodes may be quantized."""
    return isinstance(node, TensorNode) and node.dtype is not None and np.dtype(node.dtype) == np.float32


def shape_of(node: Node) -> tuple[int, ...]:
    """Returns the traced shape of ``node``; () if unknown."""
    shape = getattr(node, "shape", None)
    return () if shape is None else tuple(int(n) for n in shape)


def owner(expr: Expr) -> Module | None:
    """Returns the module that ``expr`` calls; None if it does not call a module."""
    if is_call_module(expr):
        return expr.inputs[0].owner
    return None


def op_label(expr: Expr) -> str:
    """Returns the callee of ``expr`` as source code has it: ``Conv2d``, ``F.relu``, ``Tensor.reshape``."""
    if isinstance(expr, Input):
        return "input"
    if isinstance(expr, GetAttr):
        return "getattr"
    if isinstance(expr, Constant):
        return "constant"
    if isinstance(expr, Apply):
        return type(expr.opdef).__name__
    if isinstance(expr, CallFunction):
        func = plain(expr.func)
        module = func.__module__
        prefix = "F" if module.startswith(("megengine.functional", "megengine.core")) else module
        return f"{prefix}.{func.__qualname__}"
    if isinstance(expr, CallMethod):
        if is_call_module(expr):
            return str(expr.inputs[0].module_type.__name__)
        return f"Tensor.{expr.method}"
    return type(expr).__name__


def node_path(node: Node) -> str:
    """Returns the dotted path that MegEngine recorded for ``node``, without the root's name and brackets.

    ``ResNet.layer1.0.conv1.[out]`` gives ``layer1.0.conv1``; a function called in ``ResNet.layer1.0``
    gives ``layer1.0``.
    """
    parts = [p for p in (node.qualname or "").split(".")[1:] if not p.startswith("[")]
    return ".".join(parts)


def module_path(expr: Expr) -> str:
    """Returns the path of the module that ``expr`` calls, or in whose ``forward`` it was recorded."""
    if isinstance(expr, CallMethod) and is_call_module(expr):
        return node_path(expr.inputs[0])
    if expr.outputs:
        return node_path(expr.outputs[0])
    return ""


def output_index(node: Node) -> int:
    """Returns the position of ``node`` among the outputs of the expr that produces it."""
    return [output is node for output in node.expr.outputs].index(True)


def get_module(traced: Module, path: str) -> Any:
    """Returns the attribute at the dotted ``path`` below ``traced``.

    Raises:
        AttributeError: when there is no such attribute.
    """
    obj: Any = traced
    for part in path.split(".") if path else ():
        obj = getattr(obj, part)
    return obj


def tensor_inputs(expr: Expr) -> list[TensorNode]:
    """Returns the tensor nodes that ``expr`` reads, with repetitions, in order."""
    return [n for n in expr.inputs if isinstance(n, TensorNode)]


def reads_shape(expr: Expr) -> bool:
    """Returns whether ``expr`` reads the shape of its input, or part of it, and none of its values."""
    return isinstance(expr, Apply) and type(expr.opdef).__name__ == "GetVarShape"


def writes_into(call: CallMethod) -> bool:
    """Returns whether a method writes into its own tensor, as ``x[0] = y`` and ``x += y`` do."""
    return call.method in IN_PLACE or call.method == "__setitem__"


def updates_inputs(expr: Expr) -> bool:
    """Returns whether ``expr`` is a BatchNorm in training, which writes into its running statistics."""
    if isinstance(expr, CallFunction) and expr.func.__name__ in ("batch_norm", "sync_batch_norm"):
        return bool(expr.kwargs.get("training", False))
    return isinstance(expr, Apply) and str(getattr(expr.opdef, "fwd_mode", "")).endswith("TRAINING")


def called_graph(expr: Expr) -> InternalGraph | None:
    """Returns the graph of the traced submodule that ``expr`` calls; None if it calls anything else."""
    module = owner(expr)
    if isinstance(module, TracedModule) and not module.is_qat:
        return module.argdef_graph_map[expr.arg_def]
    return None


def freeze(value: Any, name: Callable[[Node], Hashable]) -> Hashable:
    """Returns a hashable form of an argument, whose numbers keep their types: 1 is not 1.0.

    Args:
        value: an argument, or a tuple, list or dict of arguments.
        name: gives what stands for a node.

    Raises:
        TypeError: when an argument's type cannot be compared.
    """
    if isinstance(value, Node):
        return "node", name(value)
    if isinstance(value, RawTensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return "list", tuple(freeze(v, name) for v in value)
    if isinstance(value, dict):
        return "dict", tuple((key, freeze(v, name)) for key, v in value.items())
    if isinstance(value, slice):
        return "slice", tuple(freeze(v, name) for v in (value.start, value.stop, value.step))
    hash(value)
    return type(value).__name__, value if value == value else "nan"
