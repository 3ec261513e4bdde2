"""Op rules: one family a file, each with a tuple ``RULES``.

The files are found by name (sorted), never by import order; two rules for one target are an error.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, is_call_module
from qtrace.ops.base import OpCall, OpRule, Role

__all__ = ["OpCall", "OpRule", "Role", "kinds", "read", "rules", "target_key", "unsupported"]


@functools.cache
def rules() -> tuple[OpRule, ...]:
    """Every rule, in the order of the files' names."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(rule for module in modules for rule in module.RULES)


@functools.cache
def _table() -> dict[tuple[str, Any], OpRule]:
    table: dict[tuple[str, Any], OpRule] = {}
    for rule in rules():
        for target in rule.targets:
            if target.key in table:
                raise RuntimeError(f"two op rules for {target}: {table[target.key].kind} and {rule.kind}")
            table[target.key] = rule
    return table


def kinds() -> tuple[str, ...]:
    """The names of all op kinds, sorted: what a config's ``match: {op: ...}`` may say."""
    return tuple(sorted({rule.kind for rule in rules()}))


def target_key(expr: Expr) -> tuple[str, Any] | None:
    """What ``expr`` calls, as the key of the rule table; None for attributes and constants."""
    if isinstance(expr, CallFunction):
        return ("function", expr.func)
    if isinstance(expr, CallMethod):
        if is_call_module(expr):
            return ("module", type(expr.inputs[0].owner))
        return ("method", expr.method)
    if isinstance(expr, Apply) and type(expr.opdef).__name__ == "Elemwise":
        return ("kernel", str(expr.opdef))
    return None


def _lookup(expr: Expr) -> OpRule | None:
    key = target_key(expr)
    return None if key is None else _table().get(key)


def read(expr: Expr) -> OpCall | None:
    """Reads ``expr`` by its rule; None when it has no rule or its form is not supported."""
    rule = _lookup(expr)
    if rule is None:
        return None
    reading = rule.read(expr)
    return None if isinstance(reading, str) else OpCall.of(expr, rule, reading)


def unsupported(expr: Expr) -> str:
    """Why `read` gives None for ``expr``."""
    rule = _lookup(expr)
    if rule is None:
        return "no rule for this op"
    reading = rule.read(expr)
    return reading if isinstance(reading, str) else ""
