"""Writes the roundings of an ONNX model as float arithmetic, which no runtime takes for quantization.

``QuantizeLinear`` is ``clip(round(x / scale) + zero_point, qmin, qmax)`` and ``DequantizeLinear`` is
``(q - zero_point) * scale`` (ONNX operators, version 13). Integers of up to 16 bits are exact in float32. A
runtime that changes what it recognizes as quantization, even with these transformations disabled, computes
the spelled-out model op by op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qtrace.graph.walk import unused_name

__all__ = ["spell_out_roundings"]

# TensorProto.DataType -> the smallest and the largest integer.
_RANGES = {2: (0, 255), 3: (-128, 127), 4: (0, 65535), 5: (-32768, 32767), 21: (0, 15), 22: (-8, 7)}


def spell_out_roundings(model: Any) -> None:
    """Replaces the QuantizeLinear and DequantizeLinear nodes of ``model``; tensors keep their names.

    Integers between the two become floats that hold the same numbers, outputs of the model included. A weight
    or bias that is stored as integers is dequantized.

    Args:
        model: an ONNX model with all of its tensors; it is changed in place.
    """
    from onnx import shape_inference

    graph = shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = ((value.name, value.type.tensor_type) for value in values)
    ranks = {name: len(kind.shape.dim) for name, kind in types if kind.HasField("shape")}
    _Speller(model.graph, ranks).run()


class _Speller:
    def __init__(self, graph: Any, ranks: Mapping[str, int]) -> None:
        self.graph, self.ranks = graph, ranks
        self.stored = {tensor.name: tensor for tensor in graph.initializer}
        self.floats: set[str] = set()  # tensors of integers that are floats now
        self.nodes: list[Any] = []
        self.names = {name for node in graph.node for name in (*node.input, *node.output)}
        self.names.update(value.name for value in (*graph.input, *graph.initializer))
        self.as_floats: dict[str, str] = {}  # stored tensor of integers -> the tensor of their floats

    def run(self) -> None:
        from onnx import TensorProto

        for node in self.graph.node:
            scaled = node.op_type in ("QuantizeLinear", "DequantizeLinear") and self._is_plain(node)
            if scaled and node.op_type == "QuantizeLinear":
                self._spell_quantize(node)
            elif scaled and node.input[0] in self.stored:
                self._store_dequantized(node)
            elif scaled:
                self._spell_dequantize(node)
            else:
                self._move(node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        for value in (*self.graph.output, *self.graph.value_info):
            if value.name in self.floats:
                value.type.tensor_type.elem_type = TensorProto.FLOAT

    def _is_plain(self, node: Any) -> bool:
        """Returns whether scale and zero point are stored and not given for blocks of values."""
        blocks = any(attribute.name == "block_size" and attribute.i for attribute in node.attribute)
        return not blocks and all(name in self.stored for name in node.input[1:] if name)

    def _spell_quantize(self, node: Any) -> None:
        source, (target,) = node.input[0], node.output
        scale, zero = self._parameters(node)
        kind = self.stored[node.input[2]].data_type if len(node.input) > 2 else 2
        ends = [
            self._store(self._name(f"{target}_{name}"), np.array(number, np.float32))
            for name, number in zip(("low", "high"), _RANGES[kind], strict=True)
        ]
        scaled = self._add("Div", [source, scale], self._name(f"{target}_scaled"))
        rounded = self._add("Round", [scaled], self._name(f"{target}_rounded"))
        shifted = self._add("Add", [rounded, zero], self._name(f"{target}_shifted"))
        self._add("Clip", [shifted, *ends], target)
        self.floats.add(target)

    def _spell_dequantize(self, node: Any) -> None:
        (target,) = node.output
        scale, zero = self._parameters(node)
        centered = self._add("Sub", [node.input[0], zero], self._name(f"{target}_centered"))
        self._add("Mul", [centered, scale], target)

    def _store_dequantized(self, node: Any) -> None:
        integers = _array(self.stored[node.input[0]])
        scale, zero = self._values(node, integers.ndim)
        number = (integers.astype(np.int64) - zero.astype(np.int64)).astype(np.float32) * scale
        self._store(node.output[0], number.astype(np.float32))

    def _move(self, node: Any) -> None:
        """Keeps a node; one that moves integers has float results, and reads stored integers as floats."""
        if self.floats.intersection(node.input) and node.op_type not in ("Cast", "Shape"):
            for index, name in enumerate(node.input):
                if name in self.stored and self.stored[name].data_type in _RANGES:
                    node.input[index] = self._as_floats(name)
            self.floats.update(node.output)
        self.nodes.append(node)

    def _as_floats(self, name: str) -> str:
        """Stores the numbers of a tensor of integers as floats, once, and returns the name of the floats."""
        if name not in self.as_floats:
            numbers = _array(self.stored[name]).astype(np.float32)
            self.as_floats[name] = self._store(self._name(f"{name}_float"), numbers)
        return self.as_floats[name]

    def _parameters(self, node: Any) -> tuple[str, str]:
        """Stores scale and zero point in a shape that multiplies the tensor, and returns their names."""
        rank = self._rank(node)
        scale, zero = self._values(node, rank)
        base = node.output[0]
        zeros = zero.astype(np.float32)
        return self._store(self._name(f"{base}_s"), scale), self._store(self._name(f"{base}_z"), zeros)

    def _values(self, node: Any, rank: int | None) -> tuple[np.ndarray, np.ndarray]:
        scale = _array(self.stored[node.input[1]])
        zero = _array(self.stored[node.input[2]]) if len(node.input) > 2 else np.zeros_like(scale)
        if scale.ndim == 0 or rank is None:
            return scale, np.broadcast_to(zero, scale.shape)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % rank
        shape = [-1 if i == axis else 1 for i in range(rank)] if scale.size > 1 else [1] * rank
        return scale.reshape(shape), np.broadcast_to(zero, scale.shape).reshape(shape)

    def _rank(self, node: Any) -> int | None:
        """Returns the number of axes of what ``node`` rounds; None where the scale is one number."""
        scale = _array(self.stored[node.input[1]])
        if scale.size == 1:
            return None
        return next((self.ranks[name] for name in (node.input[0], node.output[0]) if name in self.ranks), 4)

    def _store(self, name: str, value: np.ndarray) -> str:
        from onnx import numpy_helper

        tensor = numpy_helper.from_array(np.asarray(value), name)
        self.stored[name] = tensor
        self.graph.initializer.append(tensor)
        return name

    def _add(self, op: str, inputs: list[str], output: str) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(op, inputs, [output]))
        return output

    def _name(self, name: str) -> str:
        """Returns a name that no tensor of the model has, like ``name``."""
        free = unused_name(name, self.names.__contains__)
        self.names.add(free)
        return free


def _array(tensor: Any) -> np.ndarray:
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor)
