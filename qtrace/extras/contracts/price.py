"""What a run of a file asks of a device, in products by width and in bytes that are moved besides.

No table of an NPU's times is public. These are counts of the file: an int16 layer costs more than an int8 one
on every device. What is rounded to another width or leaves the device is read and written once more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import NodeProto, TensorProto

from qtrace.display import format_bytes
from qtrace.errors import ExportError
from qtrace.extras.contracts.base import FloatOp
from qtrace.extras.contracts.prediction import conversions
from qtrace.extras.contracts.qdq_graph import LAYERS, QdqGraph
from qtrace.onnxfile.bodies import read_names
from qtrace.onnxfile.external_data import skeleton
from qtrace.onnxfile.model import infer_shapes

__all__ = ["RunPrice", "price_run"]

FLOAT = "float"
_BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4), 4),
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8), 8),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), 16),
}
_FLOAT_BYTES = 4

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RunPrice:
    """What a run of one batch asks of a device.

    Attributes:
        products: the bits of the wider operand that a layer computes, or "float" -> its multiplications.
        converted_bytes: the integers that are written where a tensor is rounded again to another width.
        copied_bytes: the floats that ops on the CPU read and write.
        unknown: the number of layers and of moved tensors whose sizes the file does not tell, left out here.
    """

    products: Mapping[str, int] = field(default_factory=dict)
    converted_bytes: int = 0
    copied_bytes: int = 0
    unknown: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the price as plain data."""
        return {
            "products": dict(self.products),
            "converted_bytes": self.converted_bytes,
            "copied_bytes": self.copied_bytes,
            "unknown": self.unknown,
        }

    def text(self) -> str:
        """Returns the price in a line."""
        total = max(sum(self.products.values()), 1)
        widths = []
        for width in sorted(self.products, key=lambda name: (name == FLOAT, len(name), name)):
            count = self.products[width]
            kind = "in float" if width == FLOAT else f"of {width} bits"
            widths.append(f"{count / 1e6:.3g} M {kind} ({count / total:.0%})")
        parts = [f"products: {', '.join(widths) if widths else 'none'}"]
        if self.converted_bytes:
            parts.append(f"{format_bytes(self.converted_bytes)} rounded again to another width")
        if self.copied_bytes:
            parts.append(f"{format_bytes(self.copied_bytes)} between the device and the CPU")
        if self.unknown:
            parts.append(f"not counted, for want of sizes in the file: {self.unknown}")
        return "a run, open batches as 1: " + "; ".join(parts)


def price_run(graph: QdqGraph, floats: Iterable[FloatOp], path: Path) -> RunPrice:
    """Counts what a run of a file asks of a device.

    Args:
        graph: the graph.
        floats: its ops in float, of which those that leave the device count.
        path: the file, for messages.
    """
    shapes, unknown = _shapes(graph, path), 0
    products: Counter[str] = Counter()
    for node in graph.nodes(*LAYERS):
        count = _count_products(graph, node, shapes)
        if count is None:
            unknown += 1
        else:
            products[_width(graph, node)] += count
    rounded = conversions(graph)
    sizes = [_numel(shapes, node.output[0]) for node in rounded]
    widths = [_BITS.get(graph.type_of(node.output[0]), 8) // 8 for node in rounded]
    leaving = {op.node for op in floats if op.falls_back}
    moved = [
        _numel(shapes, name)
        for node in graph.nodes()
        if node.output and (node.name or node.output[0]) in leaving
        for name in (*(n for n in read_names(node) if n not in graph.stored), *filter(None, node.output))
    ]
    unknown += sizes.count(None) + moved.count(None)
    converted = sum((size or 0) * width for size, width in zip(sizes, widths, strict=True))
    copied = sum(filter(None, moved)) * _FLOAT_BYTES
    return RunPrice(dict(products), converted, copied, unknown)


def _shapes(graph: QdqGraph, path: Path) -> Shapes:
    """Returns the shapes that follow from the input shapes; {} if more than their first axis is open."""
    try:
        return infer_shapes(skeleton(graph.model), {}, path).shapes()
    except ExportError:  # what it says of the file, the rules of the contract do not need
        return {}


def _width(graph: QdqGraph, node: NodeProto) -> str:
    """Returns the bits of the wider integers that a layer reads; "float" if it reads floats."""
    widths = []
    for index in (0, 1):
        operand = graph.operand(node, index)
        if operand is None or operand.dequantize is None:
            return FLOAT
        widths.append(_BITS.get(operand.dequantize.type, 8))
    return str(max(widths))


def _count_products(graph: QdqGraph, node: NodeProto, shapes: Shapes) -> int | None:
    """Returns the multiplications of a layer for one batch; None where a size is not known."""
    data, weight = (_shape(graph, name, shapes) for name in node.input[:2])
    result = _shape(graph, node.output[0], shapes)
    if not data or not weight or result is None:
        return None
    if node.op_type == "Conv":
        return math.prod(result) * math.prod(weight[1:])
    if node.op_type == "ConvTranspose":
        return math.prod(data) * math.prod(weight[1:])
    transposed = node.op_type == "Gemm" and any(a.name == "transA" and a.i for a in node.attribute)
    return math.prod(result) * data[0 if transposed else -1]


def _shape(graph: QdqGraph, name: str, shapes: Shapes) -> tuple[int, ...] | None:
    stored = graph.stored.get(name)
    return shapes.get(name) if stored is None else tuple(stored.dims)


def _numel(shapes: Shapes, name: str) -> int | None:
    """Returns the number of values of a tensor; None if its shape is not known."""
    return math.prod(shapes[name]) if name in shapes else None
