"""Undoes what MegEngine leaves after a block of ``insert_exprs`` that ends by an exception.

Its ``__exit__`` returns at once then: MegEngine goes on tracing, its functions and the methods of nodes stay
patched, no layer can be built, and the next trace fails with a bare AssertionError. From the import of
this module on, such a block ends as others do; `clear_leaked_state` ends what an earlier one left.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType, FunctionType, TracebackType
from typing import Any

from megengine.core._imperative_rt.core2 import is_tracing_module, unset_module_tracing
from megengine.traced_module import trace_module, traced_module
from megengine.traced_module.module_tracer import NotExist, active_module_tracer, set_active_module_tracer
from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.errors import GraphError

__all__ = ["clear_leaked_state"]

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
