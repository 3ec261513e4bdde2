"""Layers of which only weights are integers, or which round by the range of each batch, as float layers.

MatMulNBits of the domain com.microsoft becomes a product with a float weight. So does all that
onnxruntime.quantization.quantize_dynamic and the optimizer of onnxruntime make of layers: MatMulInteger and
ConvInteger with the Cast and the Mul after them, DynamicQuantizeMatMul, MatMulIntegerToFloat and
DynamicQuantizeLSTM. Nothing in such a file is rounded by a stored scale, so the network is a float one with
rounded weights. A weight after a Cast and a Mul becomes a stored float. So does one after a DequantizeLinear
with blocks, or of 4 bits and less where no activation is rounded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import numpy_helper

from qtrace.errors import shorten_list
from qtrace.importing.onnx.model import Graph, OnnxNode, load_model, node_like, read_graph
from qtrace.importing.onnx.quantization import PACKED, bits_of
from qtrace.onnxfile.model import read_names

_LOG = logging.getLogger("qtrace")
# What onnxruntime.quantization.quantize_dynamic and the optimizer of onnxruntime write.
_KEPT = {
    *("ConvInteger", "MatMulInteger", "MatMulNBits", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"),
    *("MatMulIntegerToFloat", "QAttention", "QEmbedLayerNormalization", "GatherBlockQuantized"),
}
_ROUNDS = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
_FLOAT_OPS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def with_float_weights(graph: Graph, opsets: Mapping[str, int]) -> Graph:
    """Returns the graph with products of floats instead of these layers; the logger says how many there were.

    Args:
        graph: the graph; nodes of another form stay.
        opsets: the versions that the model imports.
    """
    rewriter = _Rewriter(graph, opsets)
    result = rewriter.graph_of_floats()
    _log_counts(rewriter.counts, result.nodes)
    _log_kept(result.nodes)
    return result


def read_unrounded(path: Path) -> bytes | None:
    """Reads a file whose layers round what they read by the range of each batch, as the import reads it.

    Returns:
        The model with float layers in their place, serialized; None if the file lacks such layers.

    Raises:
        ImportingError: when the file is missing or damaged.
    """
    model, stored = load_model(path)
    if all(node.op_type not in _ROUNDS for node in model.graph.node):
        return None
    opsets = {"" if o.domain == "ai.onnx" else o.domain: int(o.version) for o in model.opset_import}
    graph = _Rewriter(read_graph(model.graph, opsets, stored), opsets).graph_of_floats()
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.extend(node.proto for node in graph.nodes)
    read = {name for node in model.graph.node for name in read_names(node)} | set(graph.outputs)
    tensors = ((name, array) for name, array in graph.stored.items() if name in read)
    model.graph.initializer.extend(numpy_helper.from_array(np.array(array), name) for name, array in tensors)
    return bytes(model.SerializeToString())


def _log_counts(counts: Mapping[str, int], nodes: Sequence[OnnxNode]) -> None:
    """Says how many layers come in as float layers, and how they are quantized again."""
    if any(is_static(node) or node.op == "DequantizeLinear" for node in nodes):
        for method, count in counts.items():
            _LOG.warning(
                f"{count} layers of the file are quantized by {method}, and others have stored scales: in "
                "the prepared graph they are float layers with the rounded weights of the file, and an "
                "export leaves them in float. To keep the method, prepare the float network that the file "
                f"was made of with a rule {{match: ..., method: {method}}} for them."
            )
        return
    for method, count in counts.items():
        _LOG.info(
            f"{count} layers of the file are quantized by {method}: they are imported as float layers with "
            f"the rounded weights of the file; a rule {{match: {{op: linear}}, method: {method}}} quantizes "
            "linear ones again."
        )


def _log_kept(nodes: Sequence[OnnxNode]) -> None:
    """Names the nodes on integers that no float layer stands for."""
    labels = [node.label for node in nodes if node.op in _KEPT]
    if labels:
        _LOG.warning(
            f"{len(labels)} nodes compute with integers in a form that qtrace cannot turn into float layers: "
            f"{shorten_list(labels)}. They and the ops that round their inputs stay as in the "
            "file: qtrace neither trains nor quantizes them, and an ONNX export copies them. Import the "
            "float network of this file to quantize all of it."
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
        self._taken: set[str] = set()
        self._layouts: dict[tuple[str, ...], str] = {}
        self.counts: Counter[str] = Counter()
        self.is_static = any(is_static(node) for node in graph.nodes)
        others = {name for n in graph.nodes if n.op != "Gather" for name in read_names(n.proto)}
        self.tables = {n.inputs[0] for n in graph.nodes if n.op == "Gather"} - others - set(graph.outputs)

    def graph_of_floats(self) -> Graph:
        """Returns the graph with float layers."""
        nodes = [part for node in self.graph.nodes for part in self.rewritten(node)]
        if nodes == list(self.graph.nodes):
            return self.graph
        nodes = _without_unread(nodes, self.graph.outputs)
        return replace(self.graph, nodes=tuple(nodes), stored={**self.graph.stored, **self.stored})

    def rewritten(self, node: OnnxNode) -> list[OnnxNode]:
        """Returns the nodes in the place of ``node``."""
        writers = {"MatMulNBits": self._blocks, "DynamicQuantizeLSTM": self._lstm}
        writers |= dict.fromkeys(("DynamicQuantizeMatMul", "MatMulIntegerToFloat"), self._whole)
        if node.domain == "com.microsoft" and node.op in writers:
            return writers[node.op](node) or [node]
        if (node.domain, node.op) == ("", "Mul"):
            return [] if self._stores_scaled(node) else self._dynamic(node) or [node]
        if node.op == "DequantizeLinear" and self._stores_dequantized(node):
            return []
        return [node]

    def _stores_dequantized(self, node: OnnxNode) -> bool:
        """Stores the floats of a DequantizeLinear whose integers no site has: blocks, or only few bits."""
        stored, block = self.graph.stored, node.attributes.get("block_size", 0)
        if not all(name in stored for name in node.inputs if name):
            return False
        integers, scale = stored[node.inputs[0]], stored[node.inputs[1]]
        table = node.outputs[0] in self.tables and (scale.size > 1 or not self.is_static)
        if not block and not table and (integers.dtype.name not in PACKED or self.is_static):
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
        """Stores the floats of integers after a Cast, at times a Sub, and the Mul ``node``."""
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
        value, integers, scales, zeros, order, bias = _inputs(node, 6)
        known = all(name in self.graph.stored for name in (integers, scales, *([zeros] if zeros else [])))
        if not known or order or node.attributes.get("bits", 4) not in (4, 8):
            return []
        stored = self.graph.stored
        weight = _dequantized(node.attributes, stored[integers], stored[scales], stored.get(zeros))
        name = self._store(f"{integers}_float", weight)
        self.counts["weight_only"] += 1
        return self._with_bias(node, [value, name], bias)

    def _dynamic(self, node: OnnxNode) -> list[OnnxNode]:
        """Returns the layer for the Mul after an op on integers; [] if ``node`` is another one."""
        for cast, factor in (node.inputs, node.inputs[::-1]):
            product = self._made_by(cast, "Cast")
            layer = product and self._made_by(product.inputs[0], *_FLOAT_OPS)
            if not layer:
                continue
            scaling = self._made_by(factor, "Mul")
            scales = [factor] if scaling is None else list(scaling.inputs)
            op, moves = _FLOAT_OPS[layer.op], list[OnnxNode]()
            zeros = _inputs(layer, 4)[2:]
            inputs = [
                self._operand(op, *parts, scales, moves) for parts in zip(layer.inputs, zeros, strict=False)
            ]
            if all(inputs) and not scales:
                self.counts["dynamic"] += 1
                float_layer = node_like(layer, op, inputs, node.outputs[0], self.opsets, **layer.attributes)
                return [*moves, float_layer]
        return []

    def _whole(self, node: OnnxNode) -> list[OnnxNode]:
        """Returns the product for one node that rounds or scales what it multiplies."""
        moves: list[OnnxNode] = []
        if node.op == "DynamicQuantizeMatMul":
            value, weight, scale, zero, bias = _inputs(node, 5)
        else:
            integers, weight, own, scale, offset, zero, bias = _inputs(node, 7)
            value = self._operand("MatMul", integers, offset, [own], moves)
        weight = self._operand("MatMul", weight, zero, [scale], moves)
        if not value or not weight:
            return []
        self.counts["dynamic"] += 1
        return [*moves, *self._with_bias(node, [value, weight], bias)]

    def _lstm(self, node: OnnxNode) -> list[OnnxNode]:
        value, weight, recurrent, *others = _inputs(node, 12)
        weights = [
            self._floats(node.op, integers, zero, [scale])
            for integers, scale, zero in ((weight, *others[5:7]), (recurrent, *others[7:]))
        ]
        if not all(weights):
            return []
        self.counts["dynamic"] += 1
        inputs = [value, *weights, *others[:5]]
        return [node_like(node, "LSTM", inputs, node.outputs, self.opsets, **node.attributes)]

    def _operand(self, op: str, integers: str, zero: str, scales: list[str], moves: list[OnnxNode]) -> str:
        """Returns the float of an input of a layer; "" without one.

        Args:
            op: the layer.
            integers: the input.
            zero: its zero point; "" for 0.
            scales: the names of factors, of which the input's is taken out.
            moves: gets the node that moves the floats, if the file moves the integers.
        """
        move = self._made_by(integers, "Gather", "Transpose")
        if move is None:
            return self._rounded(integers, zero, scales) or self._floats(op, integers, zero, scales)
        source, *places = move.inputs
        source = self._rounded(source, zero, scales) or self._floats("", source, zero, scales)
        name = self._unused(f"{integers}_float")
        moves.append(node_like(move, move.op, [source, *places], name, self.opsets, **move.attributes))
        return source and name

    def _rounded(self, integers: str, zero: str, scales: list[str]) -> str:
        """Returns what was rounded by its own range, and takes its scale out of ``scales``; "" if nothing."""
        rounding = self._made_by(integers, "DynamicQuantizeLinear")
        if rounding is None or rounding.outputs[2] != zero or rounding.outputs[1] not in scales:
            return ""
        scales.remove(rounding.outputs[1])
        return rounding.inputs[0]

    def _floats(self, op: str, integers: str, zero: str, scales: list[str]) -> str:
        """Stores the floats of integers, and takes their scales out of ``scales``; "" if these do not fit.

        Args:
            op: the layer that reads them, which says what axis has the channels; "" if there is one scale.
            integers: the name of the integers.
            zero: the name of their zero points; "" for 0.
            scales: the names of factors.
        """
        stored = self.graph.stored
        own = [name for name in scales if name in stored and (op or stored[name].size == 1)]
        if integers not in stored or (zero and zero not in stored):
            return ""
        levels = stored[integers].astype(np.float32)
        if op == "DynamicQuantizeLSTM":
            levels = levels.swapaxes(1, 2)
        values = levels
        for part in ([zero] if zero else []) + own:
            numbers = _by_channel(op, stored[part].astype(np.float32), levels.shape)
            of_columns = op == "Conv" and part != zero and stored[part].ndim == 1 < stored[part].size
            if numbers is None or of_columns:
                return ""
            values = values - numbers if part == zero else values * numbers
        scales[:] = [name for name in scales if name not in own]
        key = (op, integers, zero, *own)
        if key not in self._layouts:
            self._layouts[key] = self._store(f"{integers}_float", values)
        return self._layouts[key]

    def _made_by(self, name: str, *ops: str) -> OnnxNode | None:
        """Returns the node that gives ``name`` if it is one of these ops of ONNX's own."""
        node = self.producers.get(name)
        return node if node is not None and not node.domain and node.op in ops else None

    def _unused(self, name: str) -> str:
        """Returns a name that no tensor has, and takes it."""
        while name in self.graph.stored or name in self.producers or name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _store(self, name: str, weight: np.ndarray) -> str:
        name = self._unused(name)
        self.stored[name] = np.ascontiguousarray(weight, np.float32)
        return name

    def _with_bias(self, node: OnnxNode, inputs: list[str], bias: str) -> list[OnnxNode]:
        """Returns the product of matrices, and the Add of a bias if there is one."""
        output = node.outputs[0]
        product = f"{output}_product" if bias else output
        nodes = [node_like(node, "MatMul", inputs, product, self.opsets)]
        return [*nodes, node_like(node, "Add", [product, bias], output, self.opsets)] if bias else nodes


def _inputs(node: OnnxNode, count: int) -> list[str]:
    """Returns the inputs of a node, with "" for those that are left out."""
    return [*node.inputs, *[""] * (count - len(node.inputs))]


def _by_channel(op: str, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns scales or zero points in a shape that goes with the weight; None if they do not fit."""
    if op != "DynamicQuantizeLSTM":
        return _spread(numbers.reshape(-1), shape, {"MatMul": -1, "Conv": 0}.get(op, len(shape)), 0)
    if numbers.size not in (1, shape[0], shape[0] * shape[1]):
        return None
    return numbers.reshape(() if numbers.size == 1 else (shape[0], -1, 1))


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
    if part.shape != shape[axis : axis + 1]:
        return None
    return part.reshape([-1 if i == axis else 1 for i in range(len(shape))])


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
    read, remaining = set(outputs), []
    for node in reversed(nodes):
        ours = node.op in ("DynamicQuantizeLinear", *_FLOAT_OPS, "Cast", "Mul")
        if ours and read.isdisjoint(node.outputs):
            continue
        read.update(read_names(node.proto))
        remaining.append(node)
    return remaining[::-1]
