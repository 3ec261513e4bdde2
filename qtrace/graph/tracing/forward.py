"""Gives a module another forward: one of its methods, or a call some of whose arguments are fixed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule

from qtrace.errors import TraceError

__all__ = ["fix_arguments", "with_forward"]


def with_forward(own: type[Module], method: str) -> type[Module]:
    """Returns a subclass of ``own`` whose ``forward`` is its ``method``, which may call the old forward."""
    inside = False
    called = getattr(own, method)

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return own.forward(self, *args, **kwargs)
        inside = True
        try:
            return called(self, *args, **kwargs)
        finally:
            inside = False

    return _subclass(own, "forward", forward, called, inspect.signature(called))


def fix_arguments(source: Module, method: str, fixed: Mapping[str, Any]) -> Module:
    """Returns a module that shares all with ``source`` and whose ``method`` takes the other arguments only.

    Args:
        source: the module; it is not changed.
        method: the name of the method.
        fixed: value of each argument that is fixed, by its name.

    Raises:
        TraceError: for a graph, which lacks such arguments, and for a name that the method does not take.
    """
    own = type(source)
    called = getattr(own, method, None)
    if isinstance(source, TracedModule):
        raise TraceError("fixed goes with a module: a graph is traced already, and takes only Tensors.")
    if not callable(called):  # refused with its name by `check_signature`
        return source
    signature = inspect.signature(called)
    names = list(signature.parameters)[1:]  # without self
    collects = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    named = [n for n in names if signature.parameters[n].kind not in _VARIADIC]
    unknown = [name for name in fixed if name not in named]
    if unknown and not collects:
        similar = difflib.get_close_matches(unknown[0], named, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"there are: {', '.join(named) or 'none'}."
        raise TraceError(f"fixed: {own.__name__}.{method} takes no argument {unknown[0]!r}; {hint}")
    rest = _without(signature, [name for name in fixed if name in named])

    def complete(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Returns all arguments of ``called`` for those that are not fixed."""
        bound = rest.bind(*args, **kwargs).arguments
        for name, value in fixed.items():
            if name in named:
                bound[name] = value
            else:
                bound[collects[0]] = {**bound.get(collects[0], {}), name: value}
        ordered = {name: bound[name] for name in signature.parameters if name in bound}
        return inspect.BoundArguments(signature, ordered)

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        call = complete(self, *args, **kwargs)
        return called(*call.args, **call.kwargs)

    result = object.__new__(_subclass(own, method, forward, called, rest))
    result.__dict__.update(source.__dict__)
    return result


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _without(signature: inspect.Signature, names: list[str]) -> inspect.Signature:
    """Returns ``signature`` without the parameters of these names."""
    return signature.replace(parameters=[p for n, p in signature.parameters.items() if n not in names])


def _subclass(
    own: type[Module],
    method: str,
    forward: Callable[..., Any],
    called: Callable[..., Any],
    signature: inspect.Signature,
) -> type[Module]:
    """Returns a subclass of ``own`` whose ``method`` is ``forward``, with the globals of what it calls.

    MegEngine's tracer wraps the functions that the globals of forward name: with other globals, a function
    that the user's file imports by name would be recorded as a bare op.
    """
    assert isinstance(forward, FunctionType)
    scope = getattr(inspect.unwrap(called), "__globals__", forward.__globals__)
    outer = FunctionType(forward.__code__, scope, method, None, forward.__closure__)
    outer.__signature__ = signature  # type: ignore[attr-defined]
    return type(own.__name__, (own,), {"__module__": own.__module__, method: outer})
