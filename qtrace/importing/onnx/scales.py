"""Keeps learnable scales and shifts of one number each as parameters.

A stored number becomes a constant argument of an op, as in ``x * 0.1666 + 0.5``. In a scale and shift it was
learned (PP-LCNetV3's LearnableAffineBlock), and so was an initializer with the name of a layer's tensor (the
scales of FCOS' heads). It stays a parameter under the name of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx

from qtrace.graph.flatten import delete_attribute
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs
from qtrace.importing.onnx.model import Graph, OnnxNode, count_readers
from qtrace.importing.onnx.naming import is_anonymous, names_tensor

__all__ = ["drop_unread", "find_scales_and_shifts"]


def find_scales_and_shifts(graph: Graph) -> frozenset[str]:
    """Returns the names of single floats that were learned.

    These are the numbers of each product with a sum after it that both have names, and the factors and
    summands that are initializers with the name of a layer's tensor.

    Args:
        graph: the graph; a product that is read elsewhere is no scale and shift.
    """
    readers = count_readers(graph)
    numbers = {name for name, array in graph.stored.items() if _is_number(array.dtype, array.size)}
    numbers.update(node.outputs[0] for node in graph.nodes if _is_constant_number(node))
    numbers = {name for name in numbers if not is_anonymous(name)}
    scales: dict[str, str] = {}  # product -> the name of its scale
    names: set[str] = set()
    for node in graph.nodes:
        for value, number in _operands(node, numbers):
            if number in graph.stored and names_tensor(number):
                names.add(number)
            if node.op == "Mul" and readers[node.outputs[0]] == 1:
                scales[node.outputs[0]] = number
            elif node.op == "Add" and value in scales:
                names |= {scales[value], number}
    return frozenset(names)


def _operands(node: OnnxNode, numbers: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the computed operand of a product or sum, and its number."""
    if node.op in ("Mul", "Add") and not node.domain and len(node.inputs) == 2:
        for value, number in (node.inputs, node.inputs[::-1]):
            if number in numbers and value not in numbers:
                yield value, number


def _is_constant_number(node: OnnxNode) -> bool:
    tensor = node.attributes.get("value") if node.op == "Constant" and not node.domain else None
    if not isinstance(tensor, onnx.TensorProto) or tensor.data_type != onnx.TensorProto.FLOAT:
        return False
    return _is_number(np.dtype(np.float32), int(np.prod(tensor.dims, dtype=object)))


def _is_number(dtype: np.dtype, size: int) -> bool:
    return dtype == np.float32 and size == 1


def drop_unread(traced: TracedModule, paths: Collection[str]) -> None:
    """Deletes the tensors at ``paths`` that no op reads, since a composite took them as its numbers.

    The tensor of a path may be gone: nothing read it if its op was refused and kept as in the file.
    """
    read = {expr.name for expr in exprs(traced) if isinstance(expr, GetAttr)}
    present = {path for path, _ in traced.named_tensors()}
    for path in paths:
        if path in present and path not in read:
            delete_attribute(traced, path)
