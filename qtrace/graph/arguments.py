"""Arguments of an expr: their structure, and the parameters of MegEngine's functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node
from megengine.traced_module.pytree import tree_flatten

__all__ = ["argument_spec", "set_arguments", "signature"]


def set_arguments(expr: Expr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives ``expr`` its arguments, and its nodes one more user."""
    leaves, expr.arg_def = tree_flatten((tuple(args), kwargs))
    expr.inputs, expr.const_val = [], []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Node):
            expr.inputs.append(leaf)
            leaf.users.append(expr)
        else:
            expr.const_val.append((index, leaf))


@functools.lru_cache(maxsize=256)
def signature(func: Callable[..., Any]) -> inspect.Signature:
    """Returns the cached signature of a MegEngine function, which `inspect` takes a millisecond to find."""
    return inspect.signature(inspect.unwrap(func))


@functools.lru_cache(maxsize=256)
def argument_spec(func: Callable[..., Any]) -> inspect.FullArgSpec:
    """Returns the cached argument names and defaults of a MegEngine function."""
    return inspect.getfullargspec(inspect.unwrap(func))
