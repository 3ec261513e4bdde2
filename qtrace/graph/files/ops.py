"""The ops of Apply exprs: made of values that were held to the types and ranges of the op first.

MegEngine's ``__setstate__`` of an op hands each value to C++, where one of another type ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from megengine.core._imperative_rt import OpDef

from qtrace.graph.files.names import RefusedError, shown

_STRATEGIES = frozenset(("HEURISTIC", "PROFILE", "REPRODUCIBLE", "OPTIMIZED"))
_ITEM = (int, bool, bool, bool, bool)  # of an indexing op: axis; whether begin, end, step and index are given
_SLICE_ITEM = (int, int, int, int)


@lru_cache(maxsize=256)
def _schema(cls: Callable[[], OpDef]) -> dict[str, Any]:
    """The state of an op as it is made, which has a value of the right type for each name."""
    return cls().__getstate__()


def op_state(cls: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a saved state that the op has, after each value was checked.

    Args:
        cls: the class of the op.
        state: name -> value, as the file has it.

    Raises:
        RefusedError: naming the op, the name and the value.
    """
    trial, known = cls(), {}
    for name, example in _schema(cls).items():
        if name not in state:
            continue  # an older version did not have it
        value = state[name]
        if not _fits(name, value, example):
            raise _refuse(cls, name, value)
        try:
            setattr(trial, name, value)  # here C++ says what it takes, in an exception
        except Exception:
            raise _refuse(cls, name, value) from None
        known[name] = value
    return known


def make_op(cls: type[OpDef], state: dict[str, Any]) -> OpDef:
    """The op with a state from `op_state`."""
    op = cls()
    op.__setstate__(state)
    return op


def _refuse(cls: type[OpDef], name: str, value: Any) -> RefusedError:
    return RefusedError(f"it gives the op {cls.__name__} the {name} {shown(value)}, which that does not take")


def _fits(name: str, value: Any, example: Any) -> bool:
    """Whether a value is of the type of the example."""
    kind = type(example)
    if name == "dtype":
        return value is None or isinstance(value, np.dtype)
    if name == "strategy":
        return (
            type(value) is tuple and bool(value) and all(type(n) is str and n in _STRATEGIES for n in value)
        )
    if name == "items":
        return _all_items(value, _ITEM)
    if name == "slice_items":
        return _all_items(value, _SLICE_ITEM)
    if kind is list:
        return type(value) in (list, tuple) and all(type(item) is int for item in value)
    if kind is float:
        return type(value) in (float, int)
    return type(value) is kind


def _all_items(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in (list, tuple) and all(
        type(item) is tuple and tuple(map(type, item)) == kinds for item in value
    )
