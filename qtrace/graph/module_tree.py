"""Adds, replaces and deletes modules and tensors of a traced module by their paths.

Within the ``with`` block of a `GraphEditor`, an exception undoes these changes too.
"""

from __future__ import annotations

from typing import Any

from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule

from qtrace.errors import GraphError

__all__ = ["add_submodule", "delete_attribute", "set_parameter", "tied_parameters"]


def add_submodule(traced: TracedModule, path: str, module: Module) -> None:
    """Adds ``module`` at the dotted ``path``; the parent must exist and the name must be free.

    Raises:
        GraphError: when the name is used already or the parent is missing.
    """
    parent, name = _parent(traced, path)
    if getattr(parent, name, None) is not None:
        raise GraphError(f"the module has an attribute {path!r} already: choose another name.")
    setattr(parent, name, module)


def set_parameter(traced: TracedModule, path: str, value: Any) -> None:
    """Sets the attribute at the dotted ``path`` to a Parameter, a Tensor or None.

    Raises:
        GraphError: when a submodule on the way is missing, or the value is no tensor.
    """
    parent, name = _parent(traced, path)
    if value is not None and not isinstance(value, Tensor):
        raise GraphError(
            f"{path!r} cannot become {value!r:.60}: give a Parameter, a Tensor or None, such as "
            "Parameter(numpy_array)."
        )
    setattr(parent, name, value)


def delete_attribute(traced: TracedModule, path: str) -> None:
    """Deletes the submodule or tensor at the dotted ``path``, and the parents that are empty afterwards."""
    parent, name = _parent(traced, path)
    delattr(parent, name)
    parent_path = path.rpartition(".")[0]
    if parent_path and not any(True for _ in parent._flatten(recursive=False)):
        delete_attribute(traced, parent_path)


def tied_parameters(traced: TracedModule) -> dict[str, str]:
    """Returns the path of a tensor that several attributes hold -> another path of it."""
    paths: dict[int, list[str]] = {}
    for place, module in traced.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                paths.setdefault(id(value), []).append(f"{place}.{name}".lstrip("."))
    groups = [group for group in paths.values() if len(group) > 1]
    return {path: next(other for other in group if other != path) for group in groups for path in group}


def _parent(traced: TracedModule, path: str) -> tuple[Module, str]:
    *parts, name = path.split(".")
    parent: Any = traced
    for part in parts:
        parent = getattr(parent, part, None)
        if not isinstance(parent, Module):
            raise GraphError(f"the module lacks submodule {part!r} on the way to {path!r}.")
    return parent, name
