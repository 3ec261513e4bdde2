"""Layers of a user's class that computes what MegEngine's own does.

A tracer looks inside of every class that it does not know. A subclass that only fills in arguments, such as a
BatchNorm2d that is always frozen, would come apart: into a function, with parameters in shapes that its
``state_dict`` does not have.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from megengine.module import Module
from megengine.traced_module.module_tracer import module_tracer

__all__ = ["become_builtin"]

# What a class may define without a change of what it computes.
_HARMLESS = {
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


def become_builtin(root: Module) -> None:
    """Gives every module below ``root`` that computes what its base does the class of that base.

    Args:
        root: a private copy; it keeps its own class.
    """
    for module in root.modules():
        base = _builtin_base(type(module))
        if module is not root and base is not None and not _is_hooked(module):
            module.__class__ = base


def _builtin_base(cls: type[Module]) -> type[Module] | None:
    """The class of MegEngine whose ``forward`` ``cls`` runs unchanged; None if it is one or there is none."""
    for position, base in enumerate(cls.__mro__):
        if base is Module:
            return None
        if base.__module__.startswith("megengine.module.") and base in module_tracer._opaque_types:
            between = cls.__mro__[:position]
            return base if between and all(_adds_nothing(c, base) for c in between) else None
    return None


def _adds_nothing(cls: type, base: type[Module]) -> bool:
    return all(name in _HARMLESS or _is_apart(name, value, base) for name, value in vars(cls).items())


def _is_apart(name: str, value: Any, base: type[Module]) -> bool:
    """Whether the forward of ``base`` cannot meet ``value``: a function of a name unknown to it."""
    plain = isinstance(value, (FunctionType, staticmethod, classmethod))
    return plain and not name.startswith("__") and not hasattr(base, name)


def _is_hooked(module: Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
