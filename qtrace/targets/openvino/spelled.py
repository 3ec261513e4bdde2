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
from ml_dtypes import iinfo
from onnx import TensorProto, helper, numpy_helper, shape_inference

from qtrace.onnxfile.model import OnnxEditor

_TYPES = [TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (4, 8, 16)]


def spell_out_roundings(model: Any) -> None:
    """Replaces the QuantizeLinear and DequantizeLinear nodes of ``model``; tensors keep their names.

    Integers between the two become floats that hold the same numbers, outputs of the model included. A weight
    or bias that is stored as integers is dequantized.

    Args:
        model: an ONNX model with all of its tensors; it is changed in place.
    """
    graph = shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = ((value.name, value.type.tensor_type) for value in values)
    ranks = {name: len(kind.shape.dim) for name, kind in types if kind.HasField("shape")}
    _Speller(model, ranks).run()


class _Speller(OnnxEditor):
    def __init__(self, model: Any, ranks: Mapping[str, int]) -> None:
        super().__init__(model)
        self.ranks = ranks
        self.floats: set[str] = set()  # tensors of integers that are floats now
        self.as_floats: dict[str, str] = {}  # stored tensor of integers -> the tensor of their floats

    def run(self) -> None:
        for node in self.nodes():
            scaled = node.op_type in ("QuantizeLinear", "DequantizeLinear") and self._is_plain(node)
            if scaled and node.op_type == "QuantizeLinear":
                self._spell_quantize(node)
            elif scaled and node.input[0] in self.stored:
                self._store_dequantized(node)
            elif scaled:
                self._spell_dequantize(node)
            else:
                self._move(node)
        self.finish()
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
        limits = iinfo(helper.tensor_dtype_to_np_dtype(kind))  # type: ignore[no-untyped-call]
        ends = [self.store(f"{target}_{end}", np.float32(getattr(limits, end))) for end in ("min", "max")]
        names = ("scaled", "rounded", "shifted")
        scaled, rounded, shifted = (self.fresh(f"{target}_{name}") for name in names)
        self.replace(
            node,
            helper.make_node("Div", [source, scale], [scaled]),
            helper.make_node("Round", [scaled], [rounded]),
            helper.make_node("Add", [rounded, zero], [shifted]),
            helper.make_node("Clip", [shifted, *ends], [target]),
        )
        self.floats.add(target)

    def _spell_dequantize(self, node: Any) -> None:
        (target,) = node.output
        scale, zero = self._parameters(node)
        centered = self.fresh(f"{target}_centered")
        self.replace(
            node,
            helper.make_node("Sub", [node.input[0], zero], [centered]),
            helper.make_node("Mul", [centered, scale], [target]),
        )

    def _store_dequantized(self, node: Any) -> None:
        integers = numpy_helper.to_array(self.stored[node.input[0]])
        scale, zero = self._values(node, integers.ndim)
        number = (integers.astype(np.int64) - zero.astype(np.int64)).astype(np.float32) * scale
        self.graph.initializer.append(numpy_helper.from_array(number.astype(np.float32), node.output[0]))
        self.replace(node)

    def _move(self, node: Any) -> None:
        """Keeps a node; one that moves integers has float results, and reads stored integers as floats."""
        if self.floats.intersection(node.input) and node.op_type not in ("Cast", "Shape"):
            for index, name in enumerate(node.input):
                if name in self.stored and self.stored[name].data_type in _TYPES:
                    node.input[index] = self._as_floats(name)
            self.floats.update(node.output)

    def _as_floats(self, name: str) -> str:
        """Stores the numbers of a tensor of integers as floats, once, and returns the name of the floats."""
        if name not in self.as_floats:
            numbers = numpy_helper.to_array(self.stored[name]).astype(np.float32)
            self.as_floats[name] = self.store(f"{name}_float", numbers)
        return self.as_floats[name]

    def _parameters(self, node: Any) -> tuple[str, str]:
        """Stores scale and zero point in a shape that multiplies the tensor, and returns their names."""
        rank = self._rank(node)
        scale, zero = self._values(node, rank)
        base = node.output[0]
        zeros = zero.astype(np.float32)
        return self.store(f"{base}_s", scale), self.store(f"{base}_z", zeros)

    def _values(self, node: Any, rank: int | None) -> tuple[np.ndarray, np.ndarray]:
        scale = numpy_helper.to_array(self.stored[node.input[1]])
        zero = (
            numpy_helper.to_array(self.stored[node.input[2]]) if len(node.input) > 2 else np.zeros_like(scale)
        )
        if scale.ndim == 0 or rank is None:
            return scale, np.broadcast_to(zero, scale.shape)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % rank
        shape = [-1 if i == axis else 1 for i in range(rank)] if scale.size > 1 else [1] * rank
        return scale.reshape(shape), np.broadcast_to(zero, scale.shape).reshape(shape)

    def _rank(self, node: Any) -> int | None:
        """Returns the number of axes of what ``node`` rounds; None where the scale is one number."""
        scale = numpy_helper.to_array(self.stored[node.input[1]])
        if scale.size == 1:
            return None
        return next((self.ranks[name] for name in (node.input[0], node.output[0]) if name in self.ranks), 4)
