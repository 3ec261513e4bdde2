"""Ops with integers inside, such as QLinearConv, as DequantizeLinear, the float op and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qtrace.importing.onnx.model import Graph, OnnxNode, node_like

__all__ = ["with_pairs"]


class _Rewriter:
    """Writes one op as several.

    Args:
        node: the op.
        opsets: the versions that the model imports.
        used: the names of all values of the graph.
    """

    def __init__(self, node: OnnxNode, opsets: Mapping[str, int], used: Container[str]) -> None:
        self.node, self.opsets, self.used = node, opsets, used
        self.nodes: list[OnnxNode] = []

    def input(self, index: int) -> str:
        """Returns the name of an input; "" if it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Adds a node of ONNX's own and returns its output."""
        new = node_like(self.node, op, inputs, output, self.opsets, **attributes)
        self.nodes.append(replace(new, title=""))
        return output

    def floats(self, index: int, axis: int = 1) -> str:
        """Adds the DequantizeLinear of the integers, scale and zero point at ``index``."""
        inputs = [self.input(index), self.input(index + 1), self.input(index + 2)]
        return self._dequantized(inputs, f"{self.node.outputs[0]}_input_{index}", axis)

    def _dequantized(self, inputs: list[str], output: str, axis: int) -> str:
        return self.add("DequantizeLinear", inputs, output, axis=axis)

    def bias(self, index: int, scales: tuple[int, int]) -> list[str]:
        """Adds the DequantizeLinear of an int32 bias, whose scale is a product; none if it is left out."""
        if not self.input(index):
            return []
        out = self.node.outputs[0]
        scale = self.add("Mul", [self.input(i) for i in scales], f"{out}_bias_scale")
        return [self._dequantized([self.input(index), scale], f"{out}_bias", 0)]

    def result(self, index: int, op: str, inputs: list[str], **attributes: Any) -> None:
        """Adds the float op and the QuantizeLinear with scale and zero point at ``index``."""
        out = self.node.outputs[0]
        if not self.input(index):
            self.add(op, inputs, out, **attributes)
            return
        plain = out.removesuffix("_quantized")
        name = plain if plain not in self.used else f"{out}_float"
        value = self.add(op, inputs, name, **attributes)
        pair = [value, self.input(index), self.input(index + 1)]
        self.add("QuantizeLinear", [name for name in pair if name], out)


def _conv(new: _Rewriter) -> None:
    inputs = [new.floats(0), new.floats(3, axis=0), *new.bias(8, (1, 4))]
    new.result(6, "Conv", inputs, **new.node.attributes)


def _matmul(new: _Rewriter) -> None:
    new.result(6, "MatMul", [new.floats(0), new.floats(3, axis=1)])


def _gemm(new: _Rewriter) -> None:
    axis = 0 if new.node.attributes.get("transB", 0) else 1
    inputs = [new.floats(0), new.floats(3, axis=axis), *new.bias(6, (1, 4))]
    new.result(7, "Gemm", inputs, **new.node.attributes)


def _binary(op: str) -> Callable[[_Rewriter], None]:
    return lambda new: new.result(6, op, [new.floats(0), new.floats(3)])


def _sigmoid(new: _Rewriter) -> None:
    new.result(3, "Sigmoid", [new.floats(0)])


def _leaky_relu(new: _Rewriter) -> None:
    new.result(3, "LeakyRelu", [new.floats(0)], **new.node.attributes)


def _global_pool(new: _Rewriter) -> None:
    new.result(3, "GlobalAveragePool", [new.floats(0)], **_without(new, "channels_last"))


def _average_pool(new: _Rewriter) -> None:
    new.result(3, "AveragePool", [new.floats(0)], **_without(new, "channels_last"))


def _softmax(new: _Rewriter) -> None:
    new.result(3, "Softmax", [new.floats(0)], **_without(new, "opset"))


def _concat(new: _Rewriter) -> None:
    inputs = [new.floats(index) for index in range(2, len(new.node.inputs), 3)]
    new.result(0, "Concat", inputs, **new.node.attributes)


def _without(new: _Rewriter, name: str) -> dict[str, Any]:
    """Returns the attributes of the op without one that its float op lacks; unless 0, it is refused later."""
    attributes = dict(new.node.attributes)
    if name == "opset" or not attributes.get(name, 0):
        attributes.pop(name, None)
    return attributes


_REWRITES: dict[tuple[str, str], Callable[[_Rewriter], None]] = {
    ("", "QLinearConv"): _conv,
    ("", "QLinearMatMul"): _matmul,
    ("com.microsoft", "QGemm"): _gemm,
    ("com.microsoft", "QLinearAdd"): _binary("Add"),
    ("com.microsoft", "QLinearMul"): _binary("Mul"),
    ("com.microsoft", "QLinearSigmoid"): _sigmoid,
    ("com.microsoft", "QLinearLeakyRelu"): _leaky_relu,
    ("com.microsoft", "QLinearSoftmax"): _softmax,
    ("com.microsoft", "QLinearConcat"): _concat,
    ("com.microsoft", "QLinearGlobalAveragePool"): _global_pool,
    ("com.microsoft", "QLinearAveragePool"): _average_pool,
}


# Ops whose result is integers if their first input is.
_MOVES = {
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Concat"),
    *("MaxPool", "Pad", "Expand", "Tile", "Gather", "DepthToSpace", "SpaceToDepth"),
}


def with_pairs(graph: Graph, opsets: Mapping[str, int]) -> Graph:
    """Returns the graph with pairs of QuantizeLinear and DequantizeLinear instead of ops on integers.

    An op stays whose integers the graph takes as an input or gives as an output: no float stands for them.
    """
    integers = {value.name for value in graph.inputs if value.dtype in (np.int8, np.uint8)}
    outputs = {*graph.outputs}
    nodes: list[OnnxNode] = []
    used = {*graph.stored, *(i.name for i in graph.inputs), *(o for n in graph.nodes for o in n.outputs)}
    for node in graph.nodes:
        rewrite = _REWRITES.get((node.domain, node.op))
        if rewrite is None or integers.intersection(node.inputs) or outputs.intersection(node.outputs):
            if node.inputs and node.inputs[0] in integers and (rewrite is not None or node.op in _MOVES):
                integers.update(node.outputs)
            nodes.append(node)
            continue
        new = _Rewriter(node, opsets, used)
        rewrite(new)
        nodes += new.nodes
    return replace(graph, nodes=tuple(nodes))
