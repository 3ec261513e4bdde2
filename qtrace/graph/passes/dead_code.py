"""Removes exprs whose results nothing uses, and attributes that no expr reads."""

from __future__ import annotations

from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Expr, GetAttr

from qtrace.graph.finish import finish
from qtrace.graph.passes.base import FLAT, SOUND, Condition, GraphPass, PassReport
from qtrace.graph.walk import exprs, get_module

__all__ = ["NO_DEAD_CODE", "RemoveDeadCode"]


class RemoveDeadCode(GraphPass):
    """Removes exprs that no output depends on, and parameters, buffers and modules that no expr reads.

    An expr without outputs stays, and so does one whose removal MegEngine forbids: it may act on a module.
    """

    requires = (FLAT,)

    def change(self, traced: TracedModule) -> PassReport:
        """Removes all dead code at once."""
        dead = _dead_exprs(traced)
        changed = [f"{_name(e)}: nothing uses it" for e in dead if not isinstance(e, GetAttr)]
        finish(traced)
        for module, name, path in _unread_attributes(traced):
            delattr(module, name)
            changed.append(f"{path}: no expr reads it")
        return PassReport(self.name, tuple(changed))


def _dead_exprs(traced: TracedModule) -> list[Expr]:
    """Returns the exprs that no output depends on, in order."""
    live = set(traced.graph.outputs)
    dead: list[Expr] = []
    for expr in reversed(exprs(traced)):
        if expr._disable_remove or not expr.outputs or any(node in live for node in expr.outputs):
            live.update(expr.inputs)
        else:
            dead.append(expr)
    return dead[::-1]


def _unread_attributes(traced: TracedModule) -> list[tuple[Module, str, str]]:
    """Returns module, name and path of each tensor and submodule of which no expr reads anything.

    A tensor that is read under another name stays: the names of one tensor belong together.
    """
    read = {str(e.name) for e in exprs(traced) if isinstance(e, GetAttr)}
    parents = {path.rsplit(".", i)[0] for path in read for i in range(1, path.count(".") + 1)}
    values = {id(get_module(traced, path)) for path in read}
    unread: list[tuple[Module, str, str]] = []
    stack: list[tuple[str, Module]] = [("", traced)]
    while stack:
        prefix, module = stack.pop()
        for name, value in sorted(vars(module).items()):
            path = f"{prefix}{name}"
            if not isinstance(value, (Module, Tensor)) or path in read or id(value) in values:
                continue
            if path in parents:
                stack.append((f"{path}.", value))
            else:
                unread.append((module, name, path))
    return unread


def _name(expr: Expr) -> str:
    return ", ".join(str(node.name) for node in expr.outputs)


def _find(traced: TracedModule) -> list[str]:
    dead = [f"nothing uses {_name(e)}" for e in _dead_exprs(traced)]
    return dead + [f"no expr reads {path}" for *_, path in _unread_attributes(traced)]


NO_DEAD_CODE = Condition("has no dead code", _find, "run RemoveDeadCode first.")
RemoveDeadCode.ensures = (NO_DEAD_CODE, SOUND)
