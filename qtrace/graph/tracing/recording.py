"""Changes MegEngine's tracer while qtrace traces.

The tracer then records the source line of each expr, records attention in parts, and accepts a forward that
returns None or numbers among tensors: the graph returns the tensors. What called a submodule has such a value
from the submodule itself, as any other Python value.

A branch or an index by a value of the data is wrong on other inputs, whether or not the inputs with which
`trace` compares take the other branch. A value that depends only on shapes fixes just a size.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import megengine
import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.core._imperative_rt import OpDef
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.traced_module import TracedModule, traced_module
from megengine.traced_module.expr import Apply, CallFunction, Input
from megengine.traced_module.node import Node, NodeMixin, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.tm_config import _exclude_from_trace
from megengine.traced_module.traced_module import TracedModuleBuilder

from qtrace.errors import TraceError, shorten_list
from qtrace.graph.failures import LIBRARIES
from qtrace.graph.notes import name_with_line, recorded_lines, shown_path
from qtrace.graph.tracing.tracer import Tracer, attention_in_parts, find_replacements, recorded_as
from qtrace.graph.walk import graphs_of, op_label, patched, reads_shape

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
    flatten, wrap = traced_module.tree_flatten, _wrapped
    replacements = find_replacements(tracer)

    def flatten_values(values: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code is not _CALL:
            return flatten(values, *args, **kwargs)
        if "is_leaf" not in kwargs:
            leaves, tree = flatten(values, *args, **kwargs)
            return _distinct(leaves), tree
        if not (builder := caller.f_locals["self"])._is_builtin:
            inner = isinstance(values, PYTHON_VALUES) and not builder._is_top
            values = () if inner else _without(values, PYTHON_VALUES)
        return flatten(values, *args, **kwargs)

    def wrap_function(function: Callable[..., Any]) -> Callable[..., Any]:
        if function is _ATTENTION:
            return attention_in_parts
        wrapped, other = wrap(function), replacements.get(id(function))
        return wrapped if other is None else recorded_as(other, wrapped, wrap)

    changes = {"tree_flatten": flatten_values, "_wrapped_function": wrap_function}
    with patched(traced_module, **changes), recorded_lines():
        yield


# Wrapped once, not in each trace: hundreds of MegEngine's functions.
_wrapped = functools.lru_cache(maxsize=1024)(traced_module._wrapped_function)


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
    for expr in (expr for graph in graphs_of(traced) for expr in graph._exprs):
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
    for graph in graphs_of(traced):
        known = set(graph._inputs)
        for expr in graph._exprs:
            for node in expr.inputs:
                if node not in known:
                    raise TraceError(
                        f"{name}: {name_with_line(expr, op_label(expr))} reads a tensor that a submodule "
                        f"keeps on itself, {name_with_line(node.expr, op_label(node.expr))}, which a trace "
                        "does not pass on: return it as an output."
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


# Watches what forward reads as Python values while it is traced: a trace fixes them.

_METHODS = {
    "__bool__": "a branch or bool()",
    "__int__": "int()",
    "__float__": "float()",
    "__index__": "an index or range()",
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": "a numpy function",
}
# Functions whose result depends only on the shape of their argument.
_OF_SHAPES = {"zeros_like", "ones_like", "full_like"}
_TRACER = str(Path(megengine.__file__).parent / "traced_module")


@dataclass(frozen=True)
class PythonRead:
    """A value that forward read as a Python value while it was traced.

    Attributes:
        line: file and line of the read, such as ``net.py:12``.
        how: the kind of read, such as ``int()``; ``self.training`` for the flag of a module.
        node: the node whose value was read, with its op; "" for a flag.
        of_data: whether the value derives from values of the inputs, not only from their shapes.
    """

    line: str
    how: str
    node: str = ""
    of_data: bool = False


@contextmanager
def watch_reads(kept: Collection[tuple[int, str]] = ()) -> Iterator[list[PythonRead]]:
    """Collects the reads in code outside of MegEngine and qtrace that a trace within the block fixes.

    Args:
        kept: owner and name of the attributes that forward assigns tensors to. It reads what it assigned
            last, or what the module has; only the tracer refuses a tensor in the place of another value.

    Yields:
        The reads, each line and kind once, in order; filled while the block runs.
    """
    reads: dict[PythonRead, None] = {}
    collected: list[PythonRead] = []
    known: dict[Node, bool] = {}
    passed: dict[Node, Node] = {}  # input of a submodule -> the node that its caller passed

    def note(read: PythonRead) -> None:
        if read not in reads:
            reads[read] = None
            collected.append(read)

    def watched(original: Callable[..., Any], how: str) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            node = NodeMixin.get(tensor, None)
            # A call that stays one op is computed anew with its Python code: nothing in it is fixed.
            watching = node is not None and is_tracing_module()
            line = _user_line(sys._getframe(1)) if watching else ""
            if line:
                of_data = _is_of_data(node, known, passed)
                note(PythonRead(line, how, f"{node.name} ({op_label(node.expr)})", of_data))
                truth = None if of_data or how != _METHODS["__bool__"] else _compare_shapes(node, tensor)
                if truth is not None:
                    return truth
            return original(tensor, *args, **kwargs)

        return read

    get_attribute = TracedModuleBuilder.__getattribute__

    def attribute(builder: Any, name: str) -> Any:
        if name == "training":
            line = _user_line(sys._getframe(1))
            if line:
                note(PythonRead(line, "self.training"))
        if kept and (id(get_attribute(builder, "_mod")), name) in kept:
            assigned, before = get_attribute(builder, "__dict__"), vars(get_attribute(builder, "_mod"))
            if name in assigned or not isinstance(before.get(name), Tensor):
                return assigned.get(name, before.get(name))
        return get_attribute(builder, name)

    methods = {name: watched(getattr(Tensor, name), how) for name, how in _METHODS.items()}
    with (
        patched(Tensor, **methods),
        patched(TracedModuleBuilder, __getattribute__=attribute),
        _record_arguments(passed),
        _trace_later_calls(),
    ):
        yield collected


def _compare_shapes(node: Node, tensor: Tensor) -> bool | None:
    """Returns what a comparison of two shapes is to Python, which a trace has as a tensor of several values.

    ``x.shape == y.shape`` compares tuples in a forward; None for other nodes and single values.
    """
    method = getattr(node.expr, "method", "")
    if method not in ("__eq__", "__ne__") or tensor.size == 1:
        return None
    values = tensor.numpy()
    return bool(values.all() if method == "__eq__" else values.any())


@contextmanager
def _record_arguments(passed: dict[Node, Node]) -> Iterator[None]:
    """Maps each input of a submodule's graph to the node that the caller passes, in ``passed``."""
    wrap = NodeMixin.wrap

    def wrap_and_record(value: Any, node: Any) -> None:
        outer = NodeMixin.get(value, None)
        wrap(value, node)
        inner = NodeMixin.get(value, None)
        if not (isinstance(inner, TensorNode) and isinstance(inner.expr, Input)):
            return
        inside = str(inner._qualname).count(".") > 1  # "Net.layer.[x]"; an input of the graph is "Net.[x]"
        if inside and isinstance(outer, TensorNode) and inner is not outer:
            passed[inner] = outer

    with patched(NodeMixin, wrap=staticmethod(wrap_and_record)):
        yield


@contextmanager
def _trace_later_calls() -> Iterator[None]:
    """Makes the tracer trace every call of a submodule, where it would only run those after the first.

    What a later call reads is watched then, such as an argument that was a constant in the first call. The
    graph of the first call is kept.
    """
    own = TracedModuleBuilder.__call__

    def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = builder._argdef_graph_map
        if builder._is_builtin or not graphs:
            return own(builder, *args, **kwargs)
        builder._argdef_graph_map = {}
        try:
            return own(builder, *args, **kwargs)
        finally:
            builder._argdef_graph_map = {**graphs, **_new_items(builder._argdef_graph_map, graphs)}

    with patched(TracedModuleBuilder, __call__=call):
        yield


def _new_items(new: dict[Any, Any], known: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in new.items() if key not in known}


def _user_line(frame: FrameType | None) -> str:
    """Returns the line of the code that reads a value; "" if MegEngine, qtrace or a library reads it."""
    while frame is not None and frame.f_code.co_filename.startswith(_TRACER):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(LIBRARIES):
        return ""
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_of_data(node: Node, known: dict[Node, bool], passed: dict[Node, Node]) -> bool:
    """Returns whether the value of ``node`` derives from values of the graph's inputs.

    Args:
        node: the node that is read.
        known: the answers so far, extended.
        passed: the node that the caller passed, for each input of a submodule.
    """
    pending = [node]
    visited = {node}
    while pending:
        current = pending.pop()
        if known.get(current) or (isinstance(current.expr, Input) and current not in passed):
            known[node] = True
            return True
        if current in known or reads_shape(current.expr) or _is_of_shapes(current):
            continue
        for source in (passed[current],) if current in passed else current.expr.inputs:
            if source not in visited and isinstance(source, TensorNode):
                visited.add(source)
                pending.append(source)
    known[node] = False
    return False


def _is_of_shapes(node: Node) -> bool:
    return isinstance(node.expr, CallFunction) and node.expr.func.__name__ in _OF_SHAPES


def check_allowed(allow_branch: Sequence[str]) -> None:
    """Refuses an entry that is not of the form ``FILE:LINE``."""
    for entry in allow_branch:
        file, _, number = str(entry).rpartition(":")
        if not file or not number.isdecimal():
            raise TraceError(f"allow_branch takes FILE:LINE, such as net.py:12, not {entry!r}.")


def refuse_reads(name: str, reads: Sequence[PythonRead], allow_branch: Sequence[str]) -> None:
    """Raises an error for reads of data that ``allow_branch`` does not name.

    Args:
        name: the class of the traced module.
        reads: the reads of its trace.
        allow_branch: the lines whose reads are kept, as ``FILE:LINE``; the file may be only its name.

    Raises:
        TraceError: with the lines and what was read there.
    """
    problems = [r for r in reads if r.of_data and not any(_names(entry, r.line) for entry in allow_branch)]
    if not problems:
        return
    listed = shorten_list((f"{r.line} reads {r.node} by {r.how}" for r in problems), "; ")
    allowed = " ".join(f"--allow-branch {line}" for line in dict.fromkeys(r.line for r in problems))
    raise TraceError(
        f"{name} uses values of its data as Python values, which a trace fixes: {listed}. Compute with "
        "tensor operations (F.where for a branch), or take it out of forward. To keep the branch that the "
        f"example takes, name the line in allow_branch ({allowed})."
    )


def _names(entry: str, line: str) -> bool:
    return line == entry or line.endswith(f"/{entry}") or entry.endswith(f"/{line}")


def describe_unused(reads: Sequence[PythonRead], allow_branch: Sequence[str]) -> list[str]:
    """Returns a sentence for each entry of ``allow_branch`` on whose line no value of the data was read."""
    lines = [read.line for read in reads if read.of_data]
    return [
        f"allow_branch names {entry}, where forward reads no value of its data: remove the entry, or correct "
        "its line."
        for entry in dict.fromkeys(allow_branch)
        if not any(_names(entry, line) for line in lines)
    ]


def describe_notes(reads: Sequence[PythonRead]) -> list[str]:
    """Returns a clause for each line where a size, or a branch by ``self.training``, was fixed."""
    notes: dict[str, None] = {}
    for read in reads:
        if read.how == "self.training":
            notes[f"{read.line} reads self.training: the trace has the branch of eval mode"] = None
        elif not read.of_data:
            notes[f"{read.line} reads {read.node} by {read.how}: this size is fixed in the trace"] = None
    return list(notes)
