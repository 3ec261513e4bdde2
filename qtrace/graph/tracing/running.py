"""Runs of a module during a trace, and modules of functions."""

from __future__ import annotations

import copy
import difflib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

import megengine as mge
from megengine import Tensor
from megengine.module import Identity, Module
from megengine.traced_module import tm_config
from megengine.traced_module.module_tracer import module_tracer
from megengine.utils.naming import AutoNaming

from qtrace.errors import TraceError
from qtrace.gradients.recurrent import checked_shapes
from qtrace.graph import failures
from qtrace.graph.tracing.example_inputs import with_forward
from qtrace.graph.tracing.leaves import open_attention

__all__ = ["as_module", "check_signature", "copy_module", "engine_for_tracing"]

# Names that a subclass may define without changing what its forward computes.
_WITHOUT_EFFECT = {
    "__abstractmethods__",
    "__annotations__",
    "__dict__",
    "__doc__",
    "__init__",
    "__module__",
    "__qualname__",
    "__repr__",
    "__slotnames__",
    "__weakref__",
    "_abc_impl",
    "_module_info_string",
    "reset_parameters",
}


def check_signature(module: Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a `TraceError` if ``module`` lacks ``method``, or cannot call it with these arguments."""
    name = type(module).__name__
    called = getattr(type(module), method, None)
    if not callable(called):
        similar = difflib.get_close_matches(method, dir(type(module)), n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "."
        raise TraceError(f"{name} lacks method {method!r}{hint}")
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
    _use_builtin_classes(module)
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


def _use_builtin_classes(root: Module) -> None:
    """Sets the class of every submodule below ``root`` that computes the same as its base class to that base.

    A tracer records the inside of every class that it does not know. A subclass that only fills in arguments,
    such as a BatchNorm2d that is always frozen, would become functions, and no pass would recognize a layer.

    Args:
        root: a private copy of the user's module; its own class stays.
    """
    for module in root.modules():
        if module_tracer.is_builtin(module):  # a leaf of the user's own, or a layer of MegEngine's
            continue
        base = _builtin_base(type(module))
        if module is not root and base is not None and not (_is_hooked(module) or _is_patched(module, base)):
            module.__class__ = base


def _builtin_base(cls: type[Module]) -> type[Module] | None:
    """Returns the MegEngine class whose ``forward`` ``cls`` runs unchanged.

    None if ``cls`` is such a class itself, or if there is none.
    """
    for position, base in enumerate(cls.__mro__):
        if base is Module:
            return None
        if base.__module__.startswith("megengine.module.") and base in module_tracer._opaque_types:
            between = cls.__mro__[:position]
            return base if between and all(_adds_nothing(c, base) for c in between) else None
    return None


def _adds_nothing(cls: type, base: type[Module]) -> bool:
    return all(
        name in _WITHOUT_EFFECT or _is_new_method(name, value, base) for name, value in vars(cls).items()
    )


def _is_new_method(name: str, value: Any, base: type[Module]) -> bool:
    """Returns whether ``value`` is a method whose name ``base`` lacks, so that its forward never calls it."""
    is_method = isinstance(value, (FunctionType, staticmethod, classmethod))
    return is_method and not name.startswith("__") and not hasattr(base, name)


def _is_hooked(module: Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_patched(module: Module, base: type[Module]) -> bool:
    """Returns whether ``module`` itself replaces a method of ``base``, as by ``self.forward = ...``."""
    return any(callable(getattr(base, name, None)) for name in vars(module))


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
