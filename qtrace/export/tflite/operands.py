"""Operands of an op: nodes, numbers and arrays, of one type and with their axes in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Build, Held, allowing
from qtrace.export.tflite.layout import Order, natural
from qtrace.export.tflite.writer import Grid, Stored
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

Kinds = np.dtype | Sequence[np.dtype] | None

__all__ = ["as_type", "common_order", "number", "operands"]


def common_order(held: Sequence[Held]) -> Order:
    """The order of most values; fixed ones follow."""
    counts: Counter[Order] = Counter()
    for one in held:
        counts[one.order] += 0 if one.stored.value is not None else int(np.prod(one.stored.shape))
    return counts.most_common(1)[0][0]


def operands(b: Build, call: OpCall, given: Sequence[Any], kind: Kinds) -> tuple[list[Stored], Order]:
    """Operands with as many axes as the result of their op. Single numbers have none, and fit everything.

    Args:
        b: the file.
        call: the op.
        given: nodes, numbers and arrays.
        kind: the type that they shall have, or one for each; None for integers on their grids.

    Returns:
        The operands, and the order of the result's axes.
    """
    rank = b.rank(call.out)
    kinds = [kind] * len(given) if kind is None or isinstance(kind, np.dtype) else list(kind)
    each = list(zip(given, kinds, strict=True))
    read = [None if _is_number(v) else _read(b, call, v, k) for v, k in each]
    held = [b.widened(h, rank) for h in read if h is not None]
    # What is broadcast follows what is not.
    full = [
        h
        for h, before in zip(held, (h for h in read if h is not None), strict=True)
        if len(before.order) == rank
    ]
    order = common_order(full or held) if held else natural(rank)
    arranged = iter([b.arrange(h, order) for h in held])
    return [number(b, call, v, k) if _is_number(v) else next(arranged) for v, k in each], order


def as_type(b: Build, stored: Stored, kind: np.dtype) -> Stored:
    """A tensor as another type."""
    stored = b.as_floats(stored)
    if stored.dtype == kind:
        return stored
    if stored.value is not None:
        return b.writer.constant(stored.name, stored.value.astype(kind))
    made = b.writer.tensor(f"{stored.name}_{kind.name}", stored.shape, kind)
    b.writer.op("CAST", [stored], [made], "CastOptions")
    return made


def _is_number(value: Any) -> bool:
    return not isinstance(value, TensorNode) and np.size(value) == 1


def _read(b: Build, call: OpCall, value: Any, kind: np.dtype | None) -> Held:
    if isinstance(value, TensorNode):
        held = b.get(value)
        return held if kind is None else Held(as_type(b, held.stored, kind), held.order)
    if kind is None:
        raise ExportError(
            f"{call.out.name}: its operand is an array that is not quantized: make it a Tensor or Parameter "
            f"of the module, or {allowing(call.kind)}"
        )
    array = np.asarray(value, kind)
    return Held(b.writer.constant(f"{call.out.name}_operand", array), natural(array.ndim))


def number(b: Build, call: OpCall, value: Any, kind: np.dtype | None) -> Stored:
    """A single number as a tensor without axes."""
    found = np.asarray(value).reshape(())
    if kind is not None:
        return b.writer.constant(f"number_{found.item()}", found.astype(kind))
    # One step of a grid that is as wide as the number: nothing is rounded.
    real = np.float32(found.item())
    steps = np.array(np.sign(real), b.get(call.inputs[0]).stored.dtype)
    return b.writer.constant(f"number_{real:g}_int", steps, Grid((float(abs(real)) or 1.0,), (0,)))
