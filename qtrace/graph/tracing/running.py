"""Prepares a module for tracing: checks its call, copies it, and sets up MegEngine's engine."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megengine as mge
from megengine.module import Module
from megengine.traced_module import tm_config
from megengine.traced_module.module_tracer import module_tracer
from megengine.utils.naming import AutoNaming

from qtrace.errors import TraceError
from qtrace.gradients.recurrent import checked_shapes
from qtrace.graph import failures
from qtrace.graph.tracing.attention import open_attention
from qtrace.graph.tracing.forward import with_forward
from qtrace.graph.tracing.subclasses import use_builtin_classes

__all__ = ["check_signature", "copy_module", "engine_for_tracing"]


def check_signature(module: Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a `TraceError` if ``module`` has no ``method``, or cannot call it with these arguments."""
    name = type(module).__name__
    called = getattr(type(module), method, None)
    if not callable(called):
        similar = difflib.get_close_matches(method, dir(type(module)), n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "."
        raise TraceError(f"{name} has no method {method!r}{hint}")
    signature = inspect.signature(getattr(module, method))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{name}.{method}{signature} cannot be called with "
            f"{len(args)} example(s) by position{_by_name(kwargs)} ({error}); give all that it needs, by "
            "position or by name."
        ) from error


def _by_name(kwargs: dict[str, Any]) -> str:
    return f" and {', '.join(kwargs)} by name" if kwargs else ""


@contextmanager
def engine_for_tracing(async_level: int) -> Iterator[None]:
    """Limits MegEngine's ``async_level`` within the block, and restores the tracer after an exception."""
    level, default_check, depth = (
        mge.config.async_level,
        tm_config._enable_default_checker,
        len(AutoNaming.scopes),
    )
    mge.config.async_level = min(level, async_level)
    # qtrace compares on other inputs; MegEngine's own comparison on the example costs another forward.
    tm_config._enable_default_checker = False
    try:
        with checked_shapes():
            yield
    finally:
        mge.config.async_level = level
        tm_config._enable_default_checker = default_check
        while len(AutoNaming.scopes) > depth:
            AutoNaming.pop_scope()


def copy_module(source: Module, method: str) -> Module:
    """Copies ``source`` in eval mode, with its ``method`` as forward, so that the tracer looks inside.

    Raises:
        TraceError: for a module that cannot be copied, or whose class is registered as a builtin.
    """
    name = type(source).__name__
    try:
        module = copy.deepcopy(source)
    except Exception as error:
        raise TraceError(
            f"{name} cannot be copied, so it cannot be traced without changing it; take what cannot "
            f"be copied out of its attributes ({failures.short(error)})."
        ) from error
    module.eval()
    use_builtin_classes(module)
    open_attention(module)
    own = type(module)
    if module_tracer.is_builtin(module):  # the tracer calls such a class as one op, which is no graph
        if not own.__module__.startswith("megengine."):
            raise TraceError(
                f"{name} is registered as a builtin, so a trace does not look inside: hold it in a "
                "Module of your own and trace that."
            )
        module.__class__ = type(own.__name__, (own,), {"__module__": own.__module__})
    if method != "forward":
        module.__class__ = with_forward(type(module), method)
    return module
