"""Reads an index as slices, for composites that join or take parts of a tensor."""

from __future__ import annotations

from typing import Any

from qtrace.graph.operations import read_operation
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import shape_of

__all__ = ["read_slices"]


def read_slices(node: TensorNode, x: TensorNode) -> dict[int, range] | None:
    """Returns axis -> the places that an index of ``x`` by slices takes, of axes that are not taken whole.

    Args:
        node: the result of the index.
        x: what is indexed.

    Returns:
        None for an index by numbers, tensors, or slices whose bounds are computed.
    """
    operation = read_operation(node)
    if operation is None or operation.kind != "getitem":
        return None
    (index,) = operation.settings.values()
    shape = shape_of(x)
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    ranges: dict[int, range] = {}
    for axis, part in enumerate(parts):
        if not isinstance(part, slice) or axis >= len(shape):
            return None
        if not all(b is None or isinstance(b, int) for b in (part.start, part.stop, part.step)):
            return None
        places = range(shape[axis])[part]
        if places != range(shape[axis]):
            ranges[axis] = places
    return ranges
