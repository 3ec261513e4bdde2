"""Hashable forms of the arguments of a call, equal where the arguments are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.traced_module.node import Node

__all__ = ["freeze"]


def freeze(value: Any, name: Callable[[Node], Hashable]) -> Hashable:
    """Returns a hashable form of an argument, whose numbers keep their types: 1 is not 1.0.

    Args:
        value: an argument, or a tuple, list or dict of arguments.
        name: gives what stands for a node.

    Raises:
        TypeError: when an argument's type has no value to compare.
    """
    if isinstance(value, Node):
        return "node", name(value)
    if isinstance(value, RawTensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return "list", tuple(freeze(v, name) for v in value)
    if isinstance(value, dict):
        return "dict", tuple((key, freeze(v, name)) for key, v in value.items())
    if isinstance(value, slice):
        return "slice", tuple(freeze(v, name) for v in (value.start, value.stop, value.step))
    hash(value)
    return type(value).__name__, value if value == value else "nan"
