"""Layers whose weights alone are integers, or which round by the range of each batch, as float layers.

MatMulNBits of the domain com.microsoft becomes a product with a float weight. So do DynamicQuantizeLinear and
MatMulInteger with the Cast and the Mul behind it, as onnxruntime.quantization.quantize_dynamic writes them:
nothing in such a file is rounded by a stored scale, so the network is a float one with rounded weights. A
weight behind a Cast and a Mul becomes a stored float, and so does one behind a DequantizeLinear with blocks,
or of 4 bits and less where no activation is rounded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from qtrace.importing.onnx.model import Graph, OnnxNode, read_version
from qtrace.importing.onnx.quantization.grids import PACKED, bits_of
from qtrace.onnxfile.bodies import captured_names

__all__ = ["with_float_weights"]

_LOG = logging.getLogger("qtrace")
_SHOWN = 10
# What onnxruntime.quantization.quantize_dynamic and the optimizer of onnxruntime write.
_KEPT = {
    *("ConvInteger", "MatMulInteger", "MatMulNBits", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"),
    *("MatMulIntegerToFloat", "QAttention", "QEmbedLayerNormalization", "GatherBlockQuantized"),
}


def with_float_weights(graph: Graph, opsets: Mapping[str, int]) -> Graph:
    """Returns the graph with products of floats instead of these layers; the logger says how many there were.

    Args:
        graph: the graph; nodes of another form stay.
        opsets: the versions that the model imports.
    """
    rewriter = _Rewriter(graph, opsets)
    nodes = [part for node in graph.nodes for part in rewriter.rewritten(node)]
    if rewriter.stored:
        nodes = _without_unread(nodes, graph.outputs)
    _log_counts(rewriter.counts, nodes)
    _log_kept(nodes)
    if not rewriter.stored:
        return graph
    return replace(graph, nodes=tuple(nodes), stored={**graph.stored, **rewriter.stored})


def _log_counts(counts: Mapping[str, int], nodes: Sequence[OnnxNode]) -> None:
    """Says how many layers come in as float layers, and how they are quantized again."""
    if any(is_static(node) or node.op == "DequantizeLinear" for node in nodes):
        for method, count in counts.items():
            _LOG.warning(
                f"{count} layers of the file are quantized by {method}, beside others with stored scales: in "
                "the prepared graph they are float layers with the rounded weights of the file, and an "
                "export leaves them in float. To keep the method, prepare the float network that the file "
                f"was made of with a rule {{match: ..., method: {method}}} for them."
            )
        return
    for method, count in counts.items():
        _LOG.info(
            f"{count} layers of the file are quantized by {method}: they are imported as float layers with "
            f"the rounded weights of the file; a rule {{match: {{op: linear}}, method: {method}}} quantizes "
            "them again."
        )


def _log_kept(nodes: Sequence[OnnxNode]) -> None:
    """Names the nodes on integers that no float layer stands for."""
    kept = [node.label for node in nodes if node.op in _KEPT]
    if kept:
        more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
        _LOG.warning(
            f"{len(kept)} nodes compute with integers in a form that qtrace makes no float layer of: "
            f"{', '.join(kept[:_SHOWN])}{more}. They stay as they are in the file, with what rounds their "
            "inputs: they are neither trained nor quantized anew, and an ONNX export copies them. The float "
            "network that the file was made of comes in whole."
        )


class _Rewriter:
    """Writes one layer at a time as a product of floats.

    Attributes:
        stored: the float weights, by name.
        counts: method -> the number of layers.
    """

    def __init__(self, graph: Graph, opsets: Mapping[str, int]) -> None:
        self.graph, self.opsets = graph, opsets
        self.producers = {name: node for node in graph.nodes for name in node.outputs}
        self.stored: dict[str, np.ndarray] = {}
        self.counts: Counter[str] = Counter()
        self.is_static = any(is_static(node) for node in graph.nodes)

    def rewritten(self, node: OnnxNode) -> list[OnnxNode]:
        """Returns the nodes in the place of ``node``."""
        if (node.domain, node.op) == ("com.microsoft", "MatMulNBits"):
            return self._blocks(node) or [node]
        if (node.domain, node.op) == ("", "Mul"):
            return [] if self._stores_scaled(node) else self._dynamic(node) or [node]
        if node.op == "DequantizeLinear" and self._stores_dequantized(node):
            return []
        return [node]

    def _stores_dequantized(self, node: OnnxNode) -> bool:
        """Stores the floats of a DequantizeLinear whose integers no site has: blocks, and few bits alone."""
        stored, block = self.graph.stored, node.attributes.get("block_size", 0)
        if not all(name in stored for name in node.inputs if name):
            return False
        integers, scale = stored[node.inputs[0]], stored[node.inputs[1]]
        if not block and (integers.dtype.name not in PACKED or self.is_static):
            return False
        zero = (
            stored[node.inputs[2]] if node.inputs[2:] and node.inputs[2] else np.zeros(scale.shape, np.int64)
        )
        axis = node.attributes.get("axis", 1)
        zeros, factors = (
            _spread(part.astype(np.float32), integers.shape, axis, block) for part in (zero, scale)
        )
        if zeros is None or factors is None:
            return False  # the importer says what does not fit
        self._replace(node, (integers.astype(np.float32) - zeros) * factors, scale.dtype)
        return True

    def _stores_scaled(self, node: OnnxNode) -> bool:
        """Stores the floats of integers behind a Cast, at times a Sub, and the Mul ``node``."""
        for value, scale in (node.inputs, node.inputs[::-1]):
            before, zero = self.producers.get(value), None
            if before is not None and (before.domain, before.op) == ("", "Sub"):
                zero = self.graph.stored.get(before.inputs[1])
                before = self.producers.get(before.inputs[0]) if zero is not None else None
            if before is None or (before.domain, before.op, before.attributes.get("to")) != ("", "Cast", 1):
                continue
            integers, factor = self.graph.stored.get(before.inputs[0]), self.graph.stored.get(scale)
            if integers is None or factor is None or factor.dtype != np.float32:
                continue
            if not 0 < bits_of(integers.dtype.name) <= 8:
                continue
            zero = np.zeros((), np.float32) if zero is None else zero
            try:
                values = (integers.astype(np.float32) - zero) * factor
            except ValueError:  # shapes that do not fit: the importer says so
                continue
            if values.shape != integers.shape:
                continue
            self._replace(node, values, factor.dtype)
            return True
        return False

    def _replace(self, node: OnnxNode, values: np.ndarray, dtype: np.dtype[Any]) -> None:
        """Stores floats under the name of what ``node`` gives."""
        self.stored[node.outputs[0]] = np.ascontiguousarray(values, dtype)
        self.counts["weight_only"] += 1

    def _blocks(self, node: OnnxNode) -> list[OnnxNode]:
        inputs = [*node.inputs, *[""] * (6 - len(node.inputs))]
        value, integers, scales, zeros, order, bias = inputs
        known = all(name in self.graph.stored for name in (integers, scales, *([zeros] if zeros else [])))
        if not known or order or node.attributes.get("bits", 4) not in (4, 8):
            return []
        stored = self.graph.stored
        weight = _dequantized(node.attributes, stored[integers], stored[scales], stored.get(zeros))
        name = self._store(f"{integers}_float", weight)
        self.counts["weight_only"] += 1
        if not bias:
            return [self._node(node, "MatMul", [value, name], node.outputs[0])]
        product = f"{node.outputs[0]}_product"
        return [
            self._node(node, "MatMul", [value, name], product),
            self._node(node, "Add", [product, bias], node.outputs[0]),
        ]

    def _dynamic(self, node: OnnxNode) -> list[OnnxNode]:
        """Returns the product for the Mul behind a MatMulInteger; [] if ``node`` is another one."""
        for cast, factor in (node.inputs, node.inputs[::-1]):
            product = self._before(self._before(cast, "Cast", 0), "MatMulInteger", 0)
            scales = self.producers.get(factor)
            if product is None or scales is None or (scales.domain, scales.op) != ("", "Mul"):
                continue
            layer = self.producers[product]
            rounding = self.producers.get(layer.inputs[0])
            if rounding is None or rounding.op != "DynamicQuantizeLinear":
                continue
            scale = [name for name in scales.inputs if name != rounding.outputs[1]]
            parts = (layer.inputs[1], *layer.inputs[3:4], *scale)
            if len(scale) != 1 or layer.inputs[2:3] != rounding.outputs[2:3]:
                continue
            if all(name in self.graph.stored for name in parts):
                integers = self.graph.stored[layer.inputs[1]].astype(np.float32)
                zeros = self.graph.stored[layer.inputs[3]] if len(layer.inputs) > 3 else np.zeros(())
                weight = (integers - zeros.astype(np.float32)) * self.graph.stored[scale[0]].astype(
                    np.float32
                )
                name = self._store(f"{layer.inputs[1]}_float", weight)
                self.counts["dynamic"] += 1
                return [self._node(layer, "MatMul", [rounding.inputs[0], name], node.outputs[0])]
        return []

    def _before(self, name: str | None, op: str, index: int) -> str | None:
        """Returns the input of the node that makes ``name`` if it is a Cast, its result if it is ``op``."""
        node = self.producers.get(name or "")
        if node is None or (node.domain, node.op) != ("", op):
            return None
        return node.inputs[index] if op == "Cast" else name

    def _store(self, name: str, weight: np.ndarray) -> str:
        while name in self.graph.stored or name in self.producers:
            name += "_"
        self.stored[name] = np.ascontiguousarray(weight, np.float32)
        return name

    def _node(self, node: OnnxNode, op: str, inputs: list[str], output: str) -> OnnxNode:
        proto = onnx.helper.make_node(op, inputs, [output], name=node.name)
        version = read_version(op, "", self.opsets.get("", 1)) or 1
        return OnnxNode(op, "", node.name, tuple(inputs), (output,), {}, version, proto, node.title)


def is_static(node: OnnxNode) -> bool:
    """Whether a node rounds an activation by scales that the file stores."""
    return node.op == "QuantizeLinear" or node.op.startswith("QLinear") or node.op == "QGemm"


def _spread(part: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray | None:
    """Returns scales or zero points in a shape that goes with the integers; None if they do not fit.

    Args:
        part: one number for all, one for each channel, or one for each block.
        shape: the shape of the integers.
        axis: the axis of the channels or of the blocks.
        block: the integers of a block; 0 if there are no blocks.
    """
    if part.size == 1 and not block:
        return part.reshape(())
    if not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    if block:
        if part.ndim != len(shape):
            return None
        part = np.repeat(part, block, axis).take(np.arange(shape[axis]), axis, mode="clip")
        return part if part.shape == shape else None
    return (
        part.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        if part.shape == shape[axis : axis + 1]
        else None
    )


def _dequantized(
    attributes: Mapping[str, int], integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
) -> np.ndarray:
    """Returns the weight (inputs, outputs) of a MatMulNBits."""
    bits, outputs, inputs = attributes.get("bits", 4), attributes["N"], attributes["K"]
    count = -(-inputs // attributes["block_size"])
    levels = _unpacked(integers.reshape(outputs, count, -1), bits).astype(np.float32)
    offset: np.ndarray = np.full((outputs, count), 1 << (bits - 1), np.float32)
    if zeros is not None and zeros.dtype == np.uint8:
        offset = _unpacked(zeros.reshape(outputs, -1), bits)[:, :count].astype(np.float32)
    elif zeros is not None:
        offset = zeros.reshape(outputs, count).astype(np.float32)
    values = (levels - offset[..., None]) * scales.reshape(outputs, count, 1).astype(np.float32)
    return values.reshape(outputs, -1)[:, :inputs].T


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns the integers of bytes along the last axis: of two in a byte the lower half comes first."""
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _without_unread(nodes: list[OnnxNode], outputs: tuple[str, ...]) -> list[OnnxNode]:
    """Leaves out the roundings and products of integers that nothing reads any more."""
    read, kept = set(outputs), []
    for node in reversed(nodes):
        ours = node.op in ("DynamicQuantizeLinear", "MatMulInteger", "Cast", "Mul")
        if ours and read.isdisjoint(node.outputs):
            continue
        read.update(node.inputs)
        read.update(captured_names(node.proto))
        kept.append(node)
    return kept[::-1]
