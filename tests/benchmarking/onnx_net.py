"""Small ONNX networks, in which single ops are timed as onnxruntime runs them inside a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MIDDLE", "SCALE", "Net"]

_OPSET, _IR_VERSION = 13, 8
SCALE = 0.05
"""The scale of tensors for which it does not matter."""
MIDDLE = 128
"""The zero point of a tensor with values of both signs."""


class Net:
    """An ONNX network under construction. Tensors are named; `measure` names what is timed.

    Attributes:
        inputs: input name -> shape.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[int, ...]] = {}
        self._nodes: list[Any] = []
        self._stored: list[Any] = []
        self._random = np.random.default_rng(0).normal(0.0, 0.1, 4099).astype(np.float32)
        self._prefix = ""
        self._count = 0

    def measure(self, prefix: str) -> None:
        """Names the nodes that follow, and their results, by ``prefix``; "" for nodes that are not timed."""
        self._prefix = prefix

    def _fresh(self, word: str) -> str:
        self._count += 1
        return f"{self._prefix or 'context'}.{word}{self._count}"

    def input(self, shape: Sequence[int]) -> str:
        """Adds a float input."""
        name = f"input{len(self.inputs)}"
        self.inputs[name] = tuple(shape)
        return name

    def store(self, value: Any) -> str:
        """Adds a stored tensor."""
        from onnx import numpy_helper

        name = f"stored{len(self._stored)}"
        self._stored.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def random(self, shape: Sequence[int]) -> str:
        """Adds a stored float tensor of random values."""
        return self.store(np.resize(self._random, tuple(shape)))

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Adds a node and returns its first output."""
        from onnx import helper

        names = [self._fresh(op) for _ in range(outputs)]
        self._nodes.append(helper.make_node(op, list(inputs), names, name=names[0], **attributes))
        return names[0]

    def quantize(self, x: str, scale: float = SCALE, zero_point: int = MIDDLE) -> str:
        """Adds QuantizeLinear and DequantizeLinear, which are not timed."""
        return self.dequantize(self.only_quantize(x, scale, zero_point), scale, zero_point)

    def only_quantize(self, x: str, scale: float = SCALE, zero_point: int = MIDDLE) -> str:
        """Adds a QuantizeLinear."""
        return self.node("QuantizeLinear", [x, *self._grid(scale, zero_point)])

    def dequantize(self, x: str, scale: float = SCALE, zero_point: int = MIDDLE) -> str:
        """Adds a DequantizeLinear."""
        return self.node("DequantizeLinear", [x, *self._grid(scale, zero_point)])

    def _grid(self, scale: float, zero_point: int) -> list[str]:
        return [self.store(np.float32(scale)), self.store(np.uint8(zero_point))]

    def weight(self, shape: Sequence[int], axis: int = 0) -> str:
        """Adds a stored weight of int8, with one scale for each channel, and its DequantizeLinear."""
        integers = np.clip(np.rint(self._random * 400), -127, 127).astype(np.int8)
        values = self.store(np.resize(integers, tuple(shape)))
        count = shape[axis]
        grid = [self.store(np.full(count, 0.01, np.float32)), self.store(np.zeros(count, np.int8))]
        return self.node("DequantizeLinear", [values, *grid], axis=axis)

    def stored_integers(self, shape: Sequence[int]) -> str:
        """Adds a stored tensor of uint8 with one scale, and its DequantizeLinear."""
        values = self.store(np.full(tuple(shape), 200, np.uint8))
        return self.dequantize(values)

    def bias(self, count: int, scale: float = SCALE * 0.01) -> str:
        """Adds a stored bias of int32 and its DequantizeLinear."""
        grid = [self.store(np.full(count, scale, np.float32)), self.store(np.zeros(count, np.int32))]
        return self.node("DequantizeLinear", [self.store(np.zeros(count, np.int32)), *grid], axis=0)

    def serialize(self, *outputs: str) -> bytes:
        """Returns the model."""
        from onnx import TensorProto, helper

        infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in self.inputs.items()]
        results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
        graph = helper.make_graph(self._nodes, "net", infos, results, self._stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
        model.ir_version = _IR_VERSION
        return bytes(model.SerializeToString())
