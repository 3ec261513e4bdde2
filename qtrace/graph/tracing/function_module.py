"""Makes a module of a function, so that functions are traced and watched as modules are.

The modules and tensors that the function names, as globals or as variables around it, become attributes of
the module under these names. The function runs with the attributes in their place, so that a trace records
the modules and keeps the parameters.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

from megengine import Tensor
from megengine.module import Identity, Module

from qtrace.errors import TraceError

__all__ = ["as_module"]


def as_module(root: Any, method: str) -> tuple[Module, str]:
    """Returns what is to be traced as a module, and the name of the method.

    Args:
        root: a module, a function, or a bound method of a module.
        method: the name of the method that shall be traced if ``root`` is a module.

    Raises:
        TraceError: for anything else.
    """
    if isinstance(root, Module):
        return root, method
    name = getattr(root, "__name__", type(root).__name__)
    if method != "forward" and isinstance(root, (FunctionType, MethodType)):
        raise TraceError(f"method={method!r} goes with a module, but {name} is a function: leave method out.")
    if isinstance(root, MethodType) and isinstance(root.__self__, Module):
        return root.__self__, root.__name__
    if isinstance(root, FunctionType):
        return _module_of(root), "forward"
    kind = f"the class {name}" if isinstance(root, type) else type(root).__name__
    raise TraceError(
        f"a megengine.module.Module or a function can be traced, not {kind}: call it in a function or in the "
        "forward of a Module, and trace that."
    )


def _module_of(function: FunctionType) -> Module:
    """Returns a module whose forward is ``function``."""
    free, used = _held_variables(function), _held_globals(function)
    attributes = {name: _attribute_name(name) for name in (*used, *free)}

    def bind(module: Any) -> Callable[..., Any]:
        """Returns ``function`` with attributes of ``module`` for the modules and tensors that it names."""
        scope = function.__globals__
        recorded: Any = scope.get(function.__name__)
        if recorded is not function and _original(recorded) is function:
            return cast(Callable[..., Any], recorded)  # the tracer has wrapped it: one call
        if used:
            scope = {**scope, **{name: getattr(module, attributes[name]) for name in used}}
        cells = tuple(
            CellType(getattr(module, attributes[name])) if name in free else cell
            for name, cell in _variables(function)
        )
        own = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
        own.__kwdefaults__ = function.__kwdefaults__
        return own

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        return bind(self)(*args, **kwargs)

    # MegEngine's tracer wraps what the globals of forward name, so these are the globals of the function.
    outer = FunctionType(forward.__code__, function.__globals__, "forward", None, forward.__closure__)
    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if not any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in signature.parameters.values()):
        own = own.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *signature.parameters.values()]
    outer.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    name = function.__name__ if function.__name__.isidentifier() else "function"
    module = type(name, (Module,), {"__module__": function.__module__, "forward": outer})()
    for key, value in (*used.items(), *free.items()):
        setattr(module, attributes[key], value)
    return module


def _original(function: Any) -> Any:
    return getattr(function, "__wrapped__", function)


def _variables(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _held_variables(function: FunctionType) -> dict[str, Any]:
    """Returns the modules and tensors among the variables around ``function``."""
    held = {}
    for name, cell in _variables(function):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if _is_held(value):
            held[name] = value
    return held


def _held_globals(function: FunctionType) -> dict[str, Any]:
    """Returns the modules and tensors among the globals that ``function`` reads."""
    names = dict.fromkeys(_global_names(function.__code__))
    values = {name: function.__globals__.get(name) for name in names}
    return {name: value for name, value in values.items() if _is_held(value)}


def _global_names(code: CodeType) -> Iterator[str]:
    """Yields the globals that ``code`` and the functions and comprehensions within it read."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_held(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(isinstance(item, Module) for item in value)
    return isinstance(value, (Module, Tensor))


@functools.lru_cache(1)
def _reserved() -> frozenset[str]:
    """Returns the names that every module has."""
    return frozenset(dir(Identity()))


def _attribute_name(name: str) -> str:
    return f"{name}_" if name in _reserved() else name
