"""Replaces a subclass of a MegEngine layer by the layer if both compute the same.

A tracer records the inside of every class that it does not know. A subclass that only fills in arguments,
such as a BatchNorm2d that is always frozen, would become functions whose parameters have other shapes than in
the ``state_dict``, and no rule or pass would recognize a layer.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from megengine.module import Module
from megengine.traced_module.module_tracer import module_tracer

__all__ = ["use_builtin_classes"]

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


def use_builtin_classes(root: Module) -> None:
    """Sets the class of every submodule below ``root`` that computes the same as its base class to that base.

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
