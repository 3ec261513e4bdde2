"""Operands of an op: nodes, numbers and arrays, of one type and with their axes in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.targets.tflite.build import Builder, allowing
from qtrace.targets.tflite.layout import Order, natural
from qtrace.targets.tflite.store import OrderedTensor
from qtrace.targets.tflite.writer import FileTensor, Grid

Kinds = np.dtype | Sequence[np.dtype] | None

__all__ = ["as_type", "common_order", "number", "operands"]


def common_order(sources: Sequence[OrderedTensor]) -> Order:
    """Returns the order of most values; constants do not count, since they are rearranged for free."""
    counts: Counter[Order] = Counter()
    for source in sources:
        counts[source.order] += 0 if source.tensor.value is not None else int(np.prod(source.tensor.shape))
    return counts.most_common(1)[0][0]


def operands(b: Builder, call: OpCall, values: Sequence[Any], kind: Kinds) -> tuple[list[FileTensor], Order]:
    """Returns operands with as many axes as the result of their op. Single numbers are without axes.

    Args:
        b: the file.
        call: the op.
        values: nodes, numbers and arrays.
        kind: the type of all operands, or one type for each; None for integers on their grids.

    Returns:
        The operands, and the order of the result's axes.
    """
    rank = b.rank(call.out)
    kinds = [kind] * len(values) if kind is None or isinstance(kind, np.dtype) else list(kind)
    each = list(zip(values, kinds, strict=True))
    read = [None if _is_number(v) else _read(b, call, v, k) for v, k in each]
    sources = [b.widened(h, rank) for h in read if h is not None]
    # Operands that are broadcast follow the order of the others.
    full = [
        h
        for h, before in zip(sources, (h for h in read if h is not None), strict=True)
        if len(before.order) == rank
    ]
    order = common_order(full or sources) if sources else natural(rank)
    arranged = iter([b.arrange(h, order) for h in sources])
    return [number(b, call, v, k) if _is_number(v) else next(arranged) for v, k in each], order


def as_type(b: Builder, tensor: FileTensor, kind: np.dtype) -> FileTensor:
    """Converts a tensor to ``kind``."""
    tensor = b.as_floats(tensor)
    if tensor.dtype == kind:
        return tensor
    if tensor.value is not None:
        return b.writer.constant(tensor.name, tensor.value.astype(kind))
    result = b.writer.tensor(f"{tensor.name}_{kind.name}", tensor.shape, kind)
    b.writer.op("CAST", [tensor], [result], "CastOptions")
    return result


def _is_number(value: Any) -> bool:
    return not isinstance(value, TensorNode) and np.size(value) == 1


def _read(b: Builder, call: OpCall, value: Any, kind: np.dtype | None) -> OrderedTensor:
    if isinstance(value, TensorNode):
        source = b.get(value)
        return source if kind is None else OrderedTensor(as_type(b, source.tensor, kind), source.order)
    if kind is None:
        raise ExportError(
            f"{call.out.name}: its operand is an array that is not quantized: make it a Tensor or Parameter "
            f"of the module, or {allowing(call.kind)}"
        )
    array = np.asarray(value, kind)
    return OrderedTensor(b.writer.constant(f"{call.out.name}_operand", array), natural(array.ndim))


def number(b: Builder, call: OpCall, value: Any, kind: np.dtype | None) -> FileTensor:
    """Writes a single number as a tensor without axes."""
    scalar = np.asarray(value).reshape(())
    if kind is not None:
        return b.writer.constant(f"number_{scalar.item()}", scalar.astype(kind))
    # One step of a grid whose scale is the number: nothing is rounded.
    real = np.float32(scalar.item())
    steps = np.array(np.sign(real), b.get(call.inputs[0]).tensor.dtype)
    return b.writer.constant(f"number_{real:g}_int", steps, Grid((float(abs(real)) or 1.0,), (0,)))
