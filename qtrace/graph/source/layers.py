"""Layers as calls of their constructors: found by trial, and held to the layer that they stand for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import megengine as mge
import numpy as np
from megengine.module import Module

from qtrace.errors import GraphError
from qtrace.graph.source.literals import Literals, shorten_eps
from qtrace.observers.base import Observer

__all__ = ["Construction", "construct", "empty_tensor"]

# What a module has besides the values of its constructor.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_BOOKKEEPING = frozenset(
    ("_modules", "name", "_name", "_short_name", "training", "quantize_disabled", *_HOOKS)
)


@dataclass(frozen=True)
class Construction:
    """The statements that give a layer.

    Attributes:
        call: the call of its constructor.
        changes: what is set behind the constructor: attribute -> expression.
    """

    call: str
    changes: tuple[tuple[str, str], ...] = ()


def construct(layer: Module, literals: Literals) -> Construction:
    """Writes the constructor of a layer.

    The arguments are the attributes of their names. The layer that they make is compared with ``layer``; what
    differs is set behind the constructor. Values of tensors do not count: they are loaded.

    Args:
        layer: a module of MegEngine or qtrace, or of a user's own class that a trace keeps whole.
        literals: collects the imports.

    Raises:
        GraphError: when no arguments make the layer.
    """
    kind = type(layer)
    for squeeze in (True, False):
        arguments = _arguments(layer, squeeze)
        if arguments is None:
            continue
        required, options = arguments
        try:
            trial = kind(*required, **options)
        except Exception:
            continue
        changes = _changes(layer, trial)
        if changes is not None and (not squeeze or not changes):
            written = tuple((name, _expression(value, literals)) for name, value in changes.items())
            call = literals.call(literals.name(kind), required, shorten_eps(kind, (), options)[1])
            return Construction(call, written)
    return _made_by_hand(layer, literals)


def empty_tensor(tensor: mge.Tensor, literals: Literals) -> str:
    """Writes a tensor of this kind, shape and type, with zeros as its values."""
    literals.use("import megengine as mge")
    literals.use("import numpy as np")
    name = "mge.Parameter" if isinstance(tensor, mge.Parameter) else "mge.Tensor"
    shape = literals.write(tuple(int(n) for n in tensor.shape))
    return f'{name}(np.zeros({shape}, "{np.dtype(tensor.dtype).name}"))'


def _arguments(layer: Module, squeeze: bool) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments that the layer's attributes say; None if it lacks one that the constructor needs.

    Args:
        squeeze: whether equal sizes are one number: ``(3, 3)`` is 3.
    """
    required: list[Any] = []
    options: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(type(layer).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "name":
            continue
        value = _attribute(layer, name)
        if value is inspect.Parameter.empty:
            if parameter.default is parameter.empty:
                return None
            continue
        if name == "bias" and (value is None or isinstance(value, mge.Tensor)):
            value = value is not None
        if isinstance(value, mge.Tensor) or (isinstance(value, Module) and name != "observer"):
            if parameter.default is parameter.empty:
                return None
            continue
        if squeeze and type(value) is tuple and len(value) > 1 and len(set(value)) == 1:
            value = value[0]
        if parameter.default is parameter.empty:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                required.append(value)
                continue
        elif _same(value, parameter.default):
            continue
        options[name] = value
    return required, options


def _attribute(layer: Module, name: str) -> Any:
    """The attribute ``name`` of the layer, or of the first of its layers that has it."""
    for module in (layer, *(child for _, child in layer.named_children())):
        if name in vars(module):
            return vars(module)[name]
    return inspect.Parameter.empty


def _changes(layer: Module, trial: Module) -> dict[str, Any] | None:
    """What differs in ``trial``: path of an attribute -> value; None if setting it would not do."""
    changes: dict[str, Any] = {}
    wanted, modules = dict(layer.named_modules()), dict(trial.named_modules())
    if wanted.keys() != modules.keys():
        return None
    for path, module in wanted.items():
        if type(module) is not type(modules[path]):
            return None
        own, other = _state(module), _state(modules[path])
        if other.keys() - own.keys():
            return None
        for name, value in own.items():
            if name not in other or not _same(value, other[name]):
                changes[f"{path}.{name}".lstrip(".")] = value
    return changes


def _state(module: Module) -> dict[str, Any]:
    """The attributes that make the module what it is, without its modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _BOOKKEEPING and not isinstance(value, Module) and not _holds_modules(value)
    }


def _holds_modules(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, Module) or _holds_modules(v) for v in value)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, mge.Tensor):
        return (
            isinstance(other, mge.Tensor)
            and isinstance(value, mge.Parameter) == isinstance(other, mge.Parameter)
            and tuple(value.shape) == tuple(other.shape)
            and value.dtype == other.dtype
        )
    if isinstance(value, Observer):
        return type(value) is type(other) and (value.scheme, value.options) == (other.scheme, other.options)
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False


def _expression(value: Any, literals: Literals) -> str:
    return empty_tensor(value, literals) if isinstance(value, mge.Tensor) else literals.write(value)


def _made_by_hand(layer: Module, literals: Literals) -> Construction:
    """Writes a layer whose constructor takes what it does not keep: its class with its attributes."""
    literals.use_helper("made")
    attributes = []
    for name, value in vars(layer).items():
        if name in _BOOKKEEPING:
            continue
        if _holds_modules(value):
            raise GraphError(f"a {type(layer).__name__} keeps modules in {name}, which no expression gives")
        if isinstance(value, Module):
            inner = construct(value, literals)
            if inner.changes:
                raise GraphError(f"a {type(layer).__name__} keeps a module in {name} that no call makes")
            attributes.append(f"{name}={inner.call}")
        else:
            attributes.append(f"{name}={_expression(value, literals)}")
    return Construction(f"made({', '.join([literals.name(type(layer)), *attributes])})")
