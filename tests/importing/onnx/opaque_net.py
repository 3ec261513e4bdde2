"""A small network of convolutions around an op that MegEngine lacks, under construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

__all__ = ["SHAPE", "Net"]

SHAPE = (2, 3, 8, 8)
_CHANNELS = 4


class Net:
    """A network under construction: a convolution and a Relu, some nodes, and a tail."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.stored: list[TensorProto] = []
        self.random = np.random.default_rng(0)
        self.domains: dict[str, int] = {}
        weight = self.weights(_CHANNELS, SHAPE[1], 3, 3)
        self.features = self.add("Relu", [self.add("Conv", ["x", weight], pads=[1, 1, 1, 1])])

    def weights(self, *shape: int, scale: float = 0.3) -> str:
        return self.constant(self.random.standard_normal(shape).astype(np.float32) * scale)

    def constant(self, value: Any, dtype: Any = None) -> str:
        name = f"w{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def add(self, op: str, inputs: Sequence[str], count: int = 1, domain: str = "", **attributes: Any) -> Any:
        outputs = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        if domain:
            self.domains[domain] = 3 if domain == "ai.onnx.ml" else 1
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, domain=domain, **attributes))
        return outputs[0] if count == 1 else outputs

    def rows(self, x: str) -> str:
        """A tensor (2, 4, 8, 8) as rows (2, 8, 32)."""
        return self.add("Reshape", [self.add("Transpose", [x], perm=[0, 2, 1, 3]), self.ints(2, 8, 32)])

    def steps(self, x: str) -> str:
        """A tensor (2, 4, 8, 8) as a sequence (8, 2, 32)."""
        return self.add("Transpose", [self.rows(x)], perm=[1, 0, 2])

    def conv(self, x: str, channels: int = _CHANNELS) -> str:
        return self.add("Conv", [x, self.weights(_CHANNELS, channels, 3, 3)], pads=[1, 1, 1, 1])

    def linear(self, x: str, inputs: int) -> str:
        return self.add("MatMul", [x, self.weights(inputs, 5)])

    def model(self, *outputs: str, functions: Sequence[Any] = ()) -> ModelProto:
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
        graph = helper.make_graph(self.nodes, "net", [x], results, self.stored)
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(domain, version) for domain, version in self.domains.items()]
        model = helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)
        if self.opset >= 23:
            model.ir_version = 11
        for value in model.graph.output:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        return model
