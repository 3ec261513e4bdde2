"""Op rules: one family a file, each with a tuple ``RULES``.

The files are found by name (sorted), never by import order; two rules for one target are an error.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import replace
from typing import Any

from qtrace.gradients import plain
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, is_call_module
from qtrace.ops._infinity import INFINITE, meets_infinity
from qtrace.ops.arguments import UnreadableError
from qtrace.ops.base import OpCall, OpRule, Reading, Role

__all__ = ["OpCall", "OpRule", "Role", "kinds", "read", "rules", "target_key", "unsupported"]

_SHARED_MODULES = ("_infinity", "arguments", "base")  # modules that the families import


@functools.cache
def rules() -> tuple[OpRule, ...]:
    """Returns every rule, in the order of the files' names."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED_MODULES)
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(rule for module in modules for rule in module.RULES)


@functools.cache
def _rules_by_target() -> dict[tuple[str, Any], OpRule]:
    table: dict[tuple[str, Any], OpRule] = {}
    for rule in rules():
        for target in rule.targets:
            if target in table:
                raise RuntimeError(f"two op rules for {target}: {table[target].kind} and {rule.kind}")
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
    return rule, _without_infinity(expr, rule, reading)


def _find_rule(expr: Expr) -> OpRule | None:
    key = target_key(expr)
    return None if key is None else _rules_by_target().get(key)


def _without_infinity(expr: Expr, rule: OpRule, reading: Reading) -> Reading:
    """Returns ``reading``, with the float role if the op would round infinity."""
    if (reading.role or rule.role) in (Role.FLOAT, Role.SHAPE):
        return reading
    if not meets_infinity(expr, rule, reading, _find_rule):
        return reading
    return replace(reading, role=Role.FLOAT, reason=INFINITE)


def read(expr: Expr) -> OpCall | None:
    """Reads ``expr`` by its rule; returns None if it has no rule or its form is not supported."""
    rule, reading = _read(expr)
    if rule is None or isinstance(reading, str):
        return None
    return OpCall.of(expr, rule, reading)


def unsupported(expr: Expr) -> str:
    """Returns the reason why `read` gives None for ``expr``; "" if `read` reads it."""
    reading = _read(expr)[1]
    return reading if isinstance(reading, str) else ""
