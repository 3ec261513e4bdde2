"""Op rules: families of ops in a file, each file with a tuple ``RULES``.

The files are found by name (sorted), never by import order; two rules for one target are an error. A rule of
your own is the attribute ``qtrace_rule`` of its function or module class. It may also be an entry point in
the group ``qtrace.op_rules`` that names an `OpRule` or a tuple of them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from qtrace.errors import ConfigError
from qtrace.gradients import plain
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, is_call_module
from qtrace.ops.arguments import UnreadableError
from qtrace.ops.base import OpCall, OpRule, Reading, Role
from qtrace.plugins import OP_RULES, load_installed

__all__ = ["OpCall", "OpRule", "Role", "kind_of", "kinds", "read", "rules", "target_key", "unsupported"]

_SHARED_MODULES = ("arguments", "base")  # modules that the families import


@functools.cache
def rules() -> tuple[OpRule, ...]:
    """Returns every rule, in the order of the files' names; rules of installed packages are the last.

    Raises:
        ConfigError: when a rule of an installed package cannot be imported, or is no `OpRule`.
    """
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED_MODULES)
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    own = tuple(rule for module in modules for rule in module.RULES)
    return (*own, *load_installed(OP_RULES, OpRule))


@functools.cache
def _rules_by_target() -> dict[tuple[str, Any], OpRule]:
    table: dict[tuple[str, Any], OpRule] = {}
    for rule in rules():
        for target in rule.targets:
            if target in table:
                name, other = getattr(target.callee, "__name__", target.callee), table[target]
                raise ConfigError(
                    f"two op rules read {name}: {other.kind} ({other.source}) and {rule.kind} "
                    f"({rule.source}); keep one."
                )
            table[target] = rule
    return table


def kinds() -> tuple[str, ...]:
    """Returns the names of all op kinds, sorted: the values of a config's ``match: {op: ...}``."""
    return tuple(sorted({rule.kind for rule in rules()}))


def target_key(expr: Expr) -> tuple[str, Any] | None:
    """Returns the callee of ``expr`` as a key of the rule table; None for attributes and constants."""
    if isinstance(expr, CallFunction):
        return ("function", plain(expr.func))
    if isinstance(expr, CallMethod):
        if is_call_module(expr):
            return ("module", type(expr.inputs[0].owner))
        return ("method", expr.method)
    if isinstance(expr, Apply):
        return ("kernel", str(expr.opdef))
    return None


def _read(expr: Expr) -> tuple[OpRule | None, Reading | str]:
    """Returns the rule of ``expr`` with its reading, or with the reason why there is no reading."""
    rule = _find_rule(expr)
    if rule is None:
        return None, "no rule for this op"
    try:
        reading = rule.read(expr)
    except UnreadableError as error:
        return rule, str(error)
    except Exception as error:
        node = expr.outputs[0].name if expr.outputs else expr
        message = f"the rule of {rule.kind} ({rule.source}) has a bug: it fails at {node}"
        raise RuntimeError(message) from error
    return rule, reading


def _find_rule(expr: Expr) -> OpRule | None:
    key = target_key(expr)
    if key is None:
        return None
    rule = _rules_by_target().get(key)
    return _own_rule(key[1]) if rule is None else rule


def _own_rule(callee: Any) -> OpRule | None:
    """Returns the rule that a function or module class of the user's carries; None without one.

    Raises:
        ConfigError: when its attribute is no rule.
    """
    rule = getattr(callee, "qtrace_rule", None)
    if rule is not None and not isinstance(rule, OpRule):
        raise ConfigError(
            f"{callee.__qualname__}.qtrace_rule is of type {type(rule).__name__}: set an OpRule."
        )
    return rule


def read(expr: Expr) -> OpCall | None:
    """Reads ``expr`` by its rule; returns None if it lacks a rule or its form is not supported."""
    rule, reading = _read(expr)
    if rule is None or isinstance(reading, str):
        return None
    return OpCall.of(expr, rule, reading)


def kind_of(expr: Expr) -> str | None:
    """Returns the kind of op that ``expr`` is by its callee, whatever its arguments; None without a rule."""
    rule = _find_rule(expr)
    return None if rule is None else rule.kind


def unsupported(expr: Expr) -> str:
    """Returns the reason why `read` gives None for ``expr``; "" if `read` reads it."""
    reading = _read(expr)[1]
    return reading if isinstance(reading, str) else ""
