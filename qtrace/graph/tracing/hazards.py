"""What a trace cannot hold: values that Python reads, lost state, and calls that are refused."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import Function
from megengine.core._imperative_rt.core2 import is_tracing_module, unset_module_tracing
from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.module.quantized.module import QuantizedModule
from megengine.traced_module import TracedModule, trace_module, traced_module
from megengine.traced_module.expr import Constant, GetAttr
from megengine.traced_module.module_tracer import (
    NotExist,
    Patcher,
    active_module_tracer,
    module_tracer,
    set_active_module_tracer,
)
from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.errors import GraphError, shorten_list
from qtrace.graph.walk import patched


def native_quantization(module: Module) -> str:
    """Returns why a graph with layers of ``megengine.quantization`` is refused; "" for any other."""
    for path, part in module.named_modules():
        if isinstance(part, (QATModule, QuantizedModule)):
            room = "qat" if isinstance(part, QATModule) else "quantized"
            return (
                f"{path or 'the model'} is a {room}.{type(part).__name__} of MegEngine's own quantization: "
                "call qtrace.trace on the model first, which puts float layers in the place of these and "
                "keeps their scales for prepare."
            )
    return ""


def debugging_marks(traced: TracedModule) -> str:
    """Returns why a graph with end points or watch points is refused; "" for other graphs."""
    if ends := _names(traced, "end_points"):
        return (
            f"set_end_points moved its outputs to {ends}, which a file and a change of the graph would lose: "
            "make these nodes its outputs with traced.graph.reset_outputs, after traced.clear_end_points()."
        )
    if watched := _names(traced, "watch_points"):
        return (
            f"set_watch_points keeps the values of {watched}, which a file and a change of the graph would "
            "lose: call traced.clear_watch_points() first."
        )
    return ""


def _names(traced: TracedModule, points: str) -> str:
    return shorten_list(node.name for node in getattr(traced, points, None) or ())


_OPEN = "qtrace_open_block"  # an attribute of the tracer of a block
_PATCHED = "_wrap_method_to_tensor_node"


def clear_leaked_state() -> None:
    """Ends a trace that MegEngine has left active; without one nothing happens.

    Raises:
        GraphError: when a trace or a block of ``insert_exprs`` is really going on.
    """
    if active_module_tracer() is None and not is_tracing_module():
        return
    if any(_runs_trace(frame) for frame in sys._current_frames().values()):
        raise GraphError("MegEngine is tracing a module now: call qtrace outside of its forward.")
    if getattr(active_module_tracer(), _OPEN, False):
        raise GraphError("a block of insert_exprs is open: leave it before you call qtrace.")
    _end_trace()


def _runs_trace(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is trace_module.__code__:
            return True
        frame = frame.f_back
    return False


def _end_trace() -> None:
    tracer = active_module_tracer()
    if tracer is not None:
        tracer.patcher.__exit__(None, None, None)
    _restore_nodes()
    traced_module.set_symbolic_shape(False)
    traced_module._set_graph_surgery_mode(False)
    set_active_module_tracer(None)
    unset_module_tracing()


def _restore_nodes() -> None:
    """Gives the classes of nodes their own methods again, which the patches hold in their closures."""
    for name, value in list(TensorNode.__dict__.items()):
        patch = value.fget if isinstance(value, property) else value
        if not isinstance(patch, FunctionType) or _PATCHED not in patch.__qualname__:
            continue
        original = dict(zip(patch.__code__.co_freevars, patch.__closure__ or (), strict=True))["func"]
        if original.cell_contents is NotExist:
            delattr(TensorNode, name)
        else:
            setattr(TensorNode, name, original.cell_contents)
    Node.name = Node.name.getter(Node.name.fget).setter(_set_name)
    if "__call__" in ModuleNode.__dict__:
        del ModuleNode.__call__


def _set_name(node: Node, name: str) -> None:
    """Names a node as MegEngine does outside of a block of ``insert_exprs``."""
    names = node.top_graph._namespace
    if names.used_names.get(name) is not None:
        raise GraphError(f"the name {name!r} is in use already: choose another one.")
    names.unassociate_name_with_obj(node)
    node._name = names.create_unique_name(name, node)


def _forget_exprs(block: Any) -> None:
    """Takes the exprs of a block that failed out of the users of nodes, and its builders out of modules."""
    for expr in block.global_scope._exprs:
        for node in expr.inputs:
            node.users = [user for user in node.users if user is not expr]
    for node in block.root_graph.nodes():
        if isinstance(node, TensorNode):
            node.value = None
    for module in list(block.root_graph.inputs[0].owner.modules()):
        for name, value in list(module.__dict__.items()):
            if isinstance(value, traced_module.TracedModuleBuilder):
                setattr(module, name, value._mod)


def _guard_insert_exprs() -> None:
    """Makes blocks of ``insert_exprs`` end when an exception leaves them."""
    cls = traced_module._InsertExprs
    enter, leave = cls.__enter__, cls.__exit__

    @functools.wraps(enter)
    def guarded_enter(self: Any) -> None:
        enter(self)
        setattr(active_module_tracer(), _OPEN, True)

    @functools.wraps(leave)
    def guarded_exit(
        self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        if error is None:
            try:
                return leave(self, kind, error, trace)
            except BaseException:
                _end_trace()
                raise
        _end_trace()
        _forget_exprs(self)
        return False

    cls.__enter__, cls.__exit__ = guarded_enter, guarded_exit


_guard_insert_exprs()


_ATOMS = (bool, int, float, str, type(None), FunctionType)  # what most attributes are; isinstance is slow


def tensors_in(root: Module, objects: bool = False) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields every tensor below ``root`` once: path, tensor, and whether it is a module's own attribute.

    Args:
        root: the module to search.
        objects: whether to look into plain Python objects too, not only modules and containers.
    """
    visited: set[int] = set()

    def visit(obj: Any, path: str, own: bool) -> Iterator[tuple[str, Tensor, bool]]:
        if type(obj) in _ATOMS or id(obj) in visited:
            return
        if isinstance(obj, Tensor):
            visited.add(id(obj))
            yield path, obj, own
        elif isinstance(obj, (Module, list, tuple, dict)) or (objects and _is_plain_object(obj)):
            visited.add(id(obj))
            for key, value, is_own in _children(obj, path):
                yield from visit(value, key, is_own)

    yield from visit(root, "", False)


def _children(obj: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(obj, dict):
        yield from ((f"{path}[{k!r}]", v, False) for k, v in list(obj.items()))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"{path}[{i}]", v, False) for i, v in enumerate(list(obj)))
    else:
        own = isinstance(obj, Module)
        yield from ((f"{path}.{k}".lstrip("."), v, own) for k, v in list(obj.__dict__.items()))


def _is_plain_object(obj: Any) -> bool:
    return isinstance(getattr(obj, "__dict__", None), dict) and not isinstance(
        obj, (type, FunctionType, type(sys))
    )


def changed_state(before: Module, after: Module) -> dict[str, Tensor | None]:
    """Maps the paths of the tensors that differ between two copies of one module to their new values."""
    old = {path: tensor for path, tensor, _ in tensors_in(before)}
    new = {path: tensor for path, tensor, _ in tensors_in(after)}
    changed: dict[str, Tensor | None] = {p: None for p in old if p not in new}
    changed.update((p, t) for p, t in new.items() if p not in old or not _same_bits(old[p], t))
    return changed


def shift_state(root: Module, paths: Collection[str], upwards: bool) -> None:
    """Changes every number of the tensors at ``paths`` in place, floats by more than the largest of theirs.

    Integers, which may be places in a table, change by 1.
    """
    for path, tensor, _ in tensors_in(root):
        if path not in paths:
            continue
        values = tensor.numpy()
        if values.dtype.kind == "b":
            tensor._reset(Tensor(~values))
            continue
        finite = np.abs(values[np.isfinite(values)])
        step = 1 + 2 * finite.max(initial=0) if values.dtype.kind == "f" else 1
        tensor._reset(Tensor((values + (step if upwards else -step)).astype(values.dtype)))


def forget(root: Module, paths: Iterable[str]) -> None:
    """Deletes the attributes at ``paths`` below ``root``; leaves what is in a list or dict, or not there."""
    modules = dict(root.named_modules())
    for path in paths:
        owner, _, name = path.rpartition(".")
        if name in vars(modules.get(owner, root)) and owner in modules:
            delattr(modules[owner], name)


def attributes_at(root: Module, paths: Iterable[str]) -> set[tuple[int, str]]:
    """Returns the owner and the name of each attribute at ``paths``; leaves out what is in a list or dict."""
    modules = dict(root.named_modules())
    places = [path.rpartition(".")[::2] for path in paths]
    return {(id(modules[owner]), name) for owner, name in places if owner in modules and "[" not in name}


def with_place(root: Module, path: str) -> str:
    """Names a tensor below ``root`` for a message: ``'body.state' (net.py:12)``.

    The line assigns its attribute; it is omitted if no method of the owner's class
    contains one.
    """
    parts = re.sub(r"\[.*", "", path).split(".")
    owner: Any = root
    for k, name in enumerate(parts):
        inner = vars(owner).get(name)
        if not isinstance(inner, Module):
            line = _assigning_line(type(owner), parts[k])
            return f"{path!r} ({line})" if line else repr(path)
        owner = inner
    return repr(path)


def _assigning_line(cls: type, attribute: str) -> str:
    """Returns file and line where a method of ``cls`` except the constructor assigns ``self.<attribute>``."""
    functions = [f for c in cls.__mro__ for f in vars(c).values() if isinstance(f, FunctionType)]
    for function in functions:
        if function.__name__ == "__init__" or function.__module__.startswith("megengine."):
            continue
        try:
            lines, first = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):  # no file, or a lambda within a longer expression
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(_is_attribute(t, attribute) for target in targets for t in ast.walk(target)):
                    return f"{Path(function.__code__.co_filename).name}:{first + node.lineno - 1}"
    return ""


def _is_attribute(node: ast.AST, attribute: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.value, ast.Name)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    x, y = a.numpy(), b.numpy()
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return bool(np.array_equal(x, y) or x.tobytes() == y.tobytes())  # the bytes settle NaN


@contextmanager
def watch_functions(root: Module) -> Iterator[dict[str, str]]:
    """Collects the custom autodiff Functions that a run of ``root`` calls where a trace would inline them.

    Yields:
        Class name -> path of the first module that called it; filled while the block runs.
    """
    callers: dict[str, str] = {}
    paths = {id(m): name for name, m in root.named_modules()}
    opaque = _wrapped_code()
    original = Function.__call__

    @functools.wraps(original)
    def call(self: Function, *args: Any) -> Any:
        path = _calling_module(sys._getframe(1), paths, opaque)
        if path is not None:
            callers.setdefault(type(self).__qualname__, path)
        return original(self, *args)

    with patched(Function, __call__=call):
        yield callers


def _wrapped_code() -> set[CodeType]:
    """Returns the code of the functions that the user gave to ``traced_module.wrap``: they stay one call."""
    functions = (space.get(name) for space, name in Patcher._builtin_functions)
    return {f.__code__ for f in functions if hasattr(f, "__code__")}


def _calling_module(frame: FrameType | None, paths: dict[int, str], opaque: set[CodeType]) -> str | None:
    """Returns the path of the module that runs at ``frame``; None inside of a call that stays one op."""
    nearest: str | None = None
    while frame is not None:
        if frame.f_code in opaque or frame.f_globals.get("__name__", "").startswith("megengine.functional"):
            return None
        if frame.f_code is Module.__call__.__code__:
            module = frame.f_locals["self"]
            if module_tracer.is_builtin(module):
                return None
            if nearest is None:
                nearest = paths.get(id(module), type(module).__name__)
            if paths.get(id(module)) == "":
                break
        frame = frame.f_back
    return nearest


def lost_parameters(source: Module, traced: TracedModule) -> list[str]:
    """Returns the paths of the parameters that became constants of the trace.

    ``traced`` must have been traced from ``source`` itself, so that they share their tensors. A buffer counts
    only if it is a module's own attribute: a plain tensor in a list is a constant anyway.
    """
    known: dict[int, tuple[str, bool]] = {}
    lost: dict[str, None] = {}
    for expr in traced.graph.exprs():
        if not isinstance(expr, Constant):
            continue
        known = known or {id(t): (path, own) for path, t, own in tensors_in(source, objects=True)}
        for tensor in expr.value.parameters() if isinstance(expr.value, Module) else (expr.value,):
            path, own = known.get(id(tensor), ("", False))
            if isinstance(tensor, Parameter) or own:
                lost[path or "a Parameter that is no attribute of the module"] = None
    return list(lost)


def read_parameters(traced: TracedModule) -> set[int]:
    """Returns the ids of the tensors that exprs of the trace read, directly or through a module's call."""
    idents: set[int] = set()
    for expr in traced.graph.exprs():
        if isinstance(expr, GetAttr) and isinstance(expr.outputs[0], TensorNode):
            idents.update(id(p) for p in expr.interpret(expr.inputs[0].owner))
        elif not isinstance(expr, GetAttr):
            for node in expr.inputs:
                if isinstance(node, ModuleNode) and not _has_graph(node.owner):
                    idents.update(id(p) for p in node.owner.parameters())
    return idents


def _has_graph(module: Module) -> bool:
    return isinstance(module, TracedModule) and not module.is_qat


def hooked_modules(root: Module) -> list[str]:
    """Returns the paths of the modules with forward hooks, which a trace does not run."""
    return [
        name or type(m).__name__
        for name, m in root.named_modules()
        if (m._forward_hooks or m._forward_pre_hooks) and not module_tracer.is_builtin(m)
    ]
