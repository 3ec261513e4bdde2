"""Keeps chosen module classes and functions as one call while qtrace traces.

MegEngine's own ``register_as_builtin`` and ``wrap`` do so for good, and for every later trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction
from megengine.traced_module.module_tracer import Patcher, module_tracer

from qtrace.errors import TraceError
from qtrace.gradients import plain
from qtrace.graph.walk import owner

__all__ = ["check_leaves", "describe_unused_leaves", "keep_leaves"]


def check_leaves(leaves: Sequence[Any]) -> None:
    """Refuses leaves that a trace cannot keep as one call.

    Raises:
        TraceError: for what is neither a class of modules nor a function at the top level of a file.
    """
    if isinstance(leaves, (type, FunctionType, str)):
        raise TraceError("leaves takes a list of module classes and functions, such as leaves=[MyOp].")
    for leaf in leaves:
        if isinstance(leaf, type) and issubclass(leaf, Module):
            if issubclass(leaf, (TracedModule, QATModule)):
                raise TraceError(f"{leaf.__name__} cannot be a leaf: a trace must look inside; leave it out.")
        elif not isinstance(leaf, FunctionType):
            raise TraceError(
                f"a leaf is a class of modules or a function, not {leaf!r}: give the class of the module."
            )
        elif leaf.__globals__.get(leaf.__name__) is not leaf:
            raise TraceError(
                f"the function {leaf.__qualname__} cannot be a leaf, since it is not at the top level of its "
                "file under its own name: a file of the trace could not name it; move it there."
            )


@contextmanager
def keep_leaves(leaves: Sequence[Any]) -> Iterator[None]:
    """Makes MegEngine's tracer record each call of ``leaves`` as one expr within the block.

    Args:
        leaves: classes of modules and functions that `check_leaves` accepts.
    """
    classes = {leaf for leaf in leaves if isinstance(leaf, type)} - module_tracer._opaque_types
    functions = [(leaf.__globals__, leaf.__name__) for leaf in leaves if isinstance(leaf, FunctionType)]
    before = list(Patcher._builtin_functions)
    module_tracer._opaque_types.update(classes)
    Patcher._builtin_functions.extend(functions)
    try:
        yield
    finally:
        module_tracer._opaque_types.difference_update(classes)
        Patcher._builtin_functions[:] = before


def describe_unused_leaves(traced: TracedModule, leaves: Sequence[Any]) -> list[str]:
    """Returns a sentence for each leaf that ``traced`` does not call."""
    called: set[Any] = set()
    for expr in traced.graph.exprs():
        called.add(plain(expr.func) if isinstance(expr, CallFunction) else type(owner(expr)))
    return [
        f"leaves names {leaf.__name__}, which forward never calls: remove it, or name the class itself, not "
        "a base of it."
        for leaf in leaves
        if leaf not in called
    ]
