"""What a trace keeps as one call, and what it records a call as: a class to be subclassed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.traced_module import TracedModule
from megengine.traced_module.module_tracer import Patcher, active_module_tracer, module_tracer
from megengine.traced_module.node import ModuleNode

from qtrace.errors import TraceError
from qtrace.graph.failures import short

__all__ = ["Tracer", "chosen_leaves", "find_replacements", "name_own_classes", "recorded_as"]


class Tracer:
    """Decides how `qtrace.trace` records a module; give an instance of a subclass to ``trace(tracer=)``.

    The trace is compared with the module all the same, so that a call which is recorded as something else
    must compute the same.

    Example:
        ```python
        class KeepBlocks(qtrace.graph.Tracer):
            def is_leaf(self, module, path):
                return isinstance(module, Block) or super().is_leaf(module, path)

            def record(self, function):
                return clip6 if function is F.relu6 else function
        ```
    """

    def is_leaf(self, module: Module, path: str) -> bool:
        """Returns whether a call of ``module`` is recorded as one expr, without looking inside.

        MegEngine's own layers are leaves unless a subclass says otherwise. A leaf of a class of your own may
        bring an `OpRule` as its attribute ``qtrace_rule``, and `load` needs its class in ``allow``.

        Args:
            module: a submodule.
            path: its path in the traced module, such as ``backbone.stem``.
        """
        return bool(module_tracer.is_builtin(module))

    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what a call of ``function`` is recorded as: itself, or a function with the same arguments.

        Args:
            function: a function of ``megengine.functional``.

        Returns:
            The function, or another. One of ``megengine.functional`` is recorded as one call; of one of your
            own, what it calls is recorded, and there ``function`` means itself.
        """
        return function


@contextmanager
def chosen_leaves(root: Module, tracer: Tracer) -> Iterator[dict[type[Module], type[Module]]]:
    """Makes MegEngine's tracer treat the submodules of ``root`` as ``tracer`` says within the block.

    MegEngine knows leaves by their class, so a choice that differs from MegEngine's gets a class of its own.

    Args:
        root: the private copy that is traced.
        tracer: says what is a leaf.

    Yields:
        A map from these classes to the modules' own.

    Raises:
        TraceError: for a leaf that a trace must look into.
    """
    own: dict[type[Module], type[Module]] = {}
    changed: list[Module] = []
    inside: list[str] = []
    for path, module in list(root.named_modules()):
        if not path or any(path.startswith(f"{leaf}.") for leaf in inside):
            continue
        leaf = _ask(tracer, "is_leaf", path, tracer.is_leaf, module, path)
        builtin = module_tracer.is_builtin(module)
        if leaf:
            inside.append(path)
        if bool(leaf) == builtin or type(module) in own:
            continue
        cls = type(module)
        if leaf and isinstance(module, (TracedModule, QATModule)):
            raise TraceError(f"{path} ({cls.__name__}) cannot be a leaf: a trace must look inside.")
        module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        own[type(module)] = cls
        changed.append(module)
        if leaf:
            module_tracer._opaque_types.add(type(module))
    try:
        yield own
    finally:
        for module in changed:
            module_tracer._opaque_types.discard(type(module))
            module.__class__ = own[type(module)]


def name_own_classes(traced: TracedModule, own: dict[type[Module], type[Module]]) -> None:
    """Writes the modules' own classes into the nodes of ``traced``."""
    for module in traced.modules():
        for graph in (getattr(module, "argdef_graph_map", None) or {}).values():
            for node in graph.nodes(False).as_list():
                if isinstance(node, ModuleNode) and node.module_type in own:
                    node.module_type = own[node.module_type]


def find_replacements(tracer: Tracer) -> dict[int, Callable[..., Any]]:
    """Asks ``tracer`` what each function of ``megengine.functional`` is recorded as.

    It is asked before MegEngine's tracer puts wrappers in the place of the functions, so that it may compare
    them with ``is``.

    Returns:
        The ``id`` of a function -> the other one that it is recorded as.

    Raises:
        TraceError: when the tracer fails, or returns no function.
    """
    replacements: dict[int, Callable[..., Any]] = {}
    if type(tracer).record is Tracer.record:
        return replacements
    functions = {
        id(value): value
        for module in Patcher._builtin_modules
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__.startswith("megengine.functional")
    }
    for key, function in functions.items():
        other = _ask(tracer, "record", function.__name__, tracer.record, function)
        if not callable(other):
            raise TraceError(
                f"{type(tracer).__name__}.record returned {other!r} for {function.__name__}: return a "
                "function."
            )
        if other is not function:
            replacements[key] = other
    return replacements


def _ask(tracer: Tracer, method: str, subject: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of the user's tracer; its errors name it."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TraceError(f"{type(tracer).__name__}.{method} fails for {subject}: {short(error)}") from error


def recorded_as(
    other: Callable[..., Any], wrapped: Callable[..., Any], wrap: Callable[[Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns what MegEngine's tracer calls in the place of a function that is recorded as another one.

    Args:
        other: the other function.
        wrapped: records a call of the function itself.
        wrap: makes the function that records a call of its argument.
    """
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not is_tracing_module():
            return wrapped(*args, **kwargs)
        patcher = active_module_tracer().patcher
        recorded = wrap(other) if id(other) in patcher.patched_fn_ids else other
        patcher.auto_patch(getattr(other, "__globals__", {}))
        inside = True
        try:
            return recorded(*args, **kwargs)
        finally:
            inside = False

    return call
