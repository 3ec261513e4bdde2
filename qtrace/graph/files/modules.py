"""Checks the modules of a loaded model: that they form a tree of bounded depth, and hold plain attributes."""

from __future__ import annotations

import dataclasses
from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule

from qtrace.errors import SchemeError
from qtrace.graph.files.module_attributes import check_attributes
from qtrace.graph.files.names import DEPTH, DamagedError, Ref, RefusedError, shown
from qtrace.graph.files.plain_values import Pending
from qtrace.graph.files.rules import Rules
from qtrace.graph.files.trees import CONTAINERS, DICTS, weigh
from qtrace.scheme import QParams, QScheme

__all__ = ["check_modules"]

_GRAPHS = ("argdef_graph_map", "argdef_outdef_map")
# What MegEngine reads of every module and its earlier versions did not write.
_OF_LATER_VERSIONS = {"name": None, "_name": None, "_short_name": None, "quantize_disabled": False}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_modules(model: TracedModule, rules: Rules) -> None:
    """Refuses modules that MegEngine could not go through.

    Args:
        model: the outermost module; the graphs of traced modules are not checked.
        rules: the rules of the file.

    Raises:
        RefusedError: naming the module's class and what is wrong with it.
    """
    walk = _ModuleWalk(rules)
    for owner in (model, *rules.traced, *rules.constants):
        walk.visit(owner, ())
    try:
        for _ in model.named_tensors():
            pass
    except Exception as error:
        raise DamagedError(f"its modules cannot be listed ({type(error).__name__})") from None


def _check_graph_map(name: str, value: Any) -> None:
    """Refuses containers where graphs belong, which MegEngine would open at each occurrence."""
    if value is None:  # of the class
        return
    if type(value) not in DICTS or any(type(item) in CONTAINERS for item in value.values()):
        raise RefusedError(f"a TracedModule in it has something other than graphs in its {name}")


class _ModuleWalk:
    """Checks modules and the objects of qtrace in their attributes.

    Args:
        rules: the rules of the file.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._heights: dict[int, int] = {}
        self._open: set[int] = set()

    def visit(self, owner: Any, path: tuple[str, ...]) -> int:
        """Checks ``owner`` and what it holds, once; gives how deeply that is nested.

        Args:
            owner: a module, or an object of one of qtrace's classes.
            path: the attributes that lead to it.
        """
        if id(owner) in self._open:
            raise RefusedError(f"a {type(owner).__name__} in it holds itself")
        if len(path) + self._heights.get(id(owner), 0) > DEPTH:
            raise RefusedError(f"it nests modules more than {DEPTH} levels deep")
        if id(owner) in self._heights:
            return self._heights[id(owner)]
        self._open.add(id(owner))
        children = self._children(owner, ".".join(path))
        height = 1 + max((self.visit(child, (*path, name)) for name, child in children), default=0)
        self._open.discard(id(owner))
        self._heights[id(owner)] = height
        return height

    def _children(self, owner: Any, path: str) -> list[tuple[str, Any]]:
        """Checks the attributes of ``owner``; gives the modules and objects among them with their names."""
        children: list[tuple[str, Any]] = []

        def leaf(value: Any) -> None:
            if type(value) is Pending:
                raise RefusedError("it holds an array or a device without its state")
            if type(value) is Ref:
                raise RefusedError(f"a {type(owner).__name__} in it holds {value.key} where data belong")
            if isinstance(value, Module) or type(value).__module__.startswith("qtrace."):
                children.append((name, value))

        if isinstance(owner, Module):
            self._check_module(owner)
        for name, value in getattr(owner, "__dict__", {}).items():
            if not name.isprintable():
                raise RefusedError(f"a {type(owner).__name__} in it has an attribute called {shown(name)}")
            if name in _GRAPHS and type(owner) is TracedModule:
                _check_graph_map(name, value)
            else:
                weigh(value, self._rules.budget, leaf)
        if isinstance(owner, Module):
            check_attributes(owner, path or type(owner).__name__)
        if isinstance(owner, (QScheme, QParams)):
            _check_quantization(owner)  # its errors show the values, which are known to have an end now
        return children

    def _check_module(self, module: Module) -> None:
        fields, kind = module.__dict__, type(module).__name__
        for name in _HOOKS:
            hooks = fields.get(name)
            if type(hooks) not in DICTS or not all(self._listed(hook) for hook in hooks.values()):
                raise RefusedError(f"a {kind} in it has hooks that are no functions of yours")
        names = fields.get("_modules")
        if type(names) is not list or not all(type(name) is str and name in fields for name in names):
            raise RefusedError(f"a {kind} in it has {shown(names)} for the names of its modules")
        for name, value in _OF_LATER_VERSIONS.items():
            fields.setdefault(name, value)
        if type(fields.get("training")) is not bool:
            raise RefusedError(f"a {kind} in it is neither in training nor not")

    def _listed(self, value: Any) -> bool:
        key = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        return key in self._rules.names.extra


def _check_quantization(value: QScheme | QParams) -> None:
    """Makes a scheme or its parameters again, which checks them."""
    try:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        type(value)(**fields)
    except (SchemeError, TypeError, ValueError, AttributeError, OverflowError):
        raise RefusedError(f"a {type(value).__name__} in it is not one that qtrace makes") from None
