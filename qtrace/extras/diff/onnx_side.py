"""An ONNX file as a comparison reads it: without the roundings between its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from onnx import NodeProto, ValueInfoProto, defs, helper

from qtrace.onnxfile.model import OnnxModel

__all__ = ["FileGrid", "OnnxSide", "attributes_of", "describe_value"]

_ROUNDINGS = ("QuantizeLinear", "DequantizeLinear")
_ONES, _ZEROS = ("strides", "dilations"), ("pads",)


@dataclass(frozen=True)
class FileGrid:
    """The integers of a tensor.

    Attributes:
        type: the type of the integers, such as ``uint8``.
        scale: one scale, or one for each channel.
        zero_point: one zero point for each scale.
        axis: the axis of the channels.
    """

    type: str
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int

    def __str__(self) -> str:
        """Returns the grid in words."""
        if self.scale.size != 1:
            return f"{self.type}, {self.scale.size} scales along axis {self.axis}"
        scale, zero = float(self.scale.reshape(-1)[0]), int(self.zero_point.reshape(-1)[0])
        return f"{self.type}, scale {scale:.4g}, zero point {zero}"


class OnnxSide(OnnxModel):
    """One of two files.

    Args:
        model: the model with its tensors.
    """

    @cached_property
    def computing(self) -> list[NodeProto]:
        """The nodes that compute, without roundings and constants."""
        own = [n for n in self.model.graph.node if n.op_type not in _ROUNDINGS]
        return [n for n in own if n.op_type != "Constant" or n.output[0] not in self.stored]

    def source(self, name: str) -> str:
        """Returns the tensor that ``name`` is a rounding of, and ``name`` itself where it is none."""
        for _ in range(len(self.model.graph.node)):
            node = self.producers.get(name)
            if node is None or node.op_type not in _ROUNDINGS or node.input[0] in self.stored:
                return name
            name = node.input[0]
        return name

    def read_grid(self, name: str) -> FileGrid | None:
        """Returns the integers that ``name`` is dequantized from; None for other tensors."""
        node = self.producers.get(name)
        return None if node is None or node.op_type != "DequantizeLinear" else self._grid(node)

    def written_grid(self, name: str) -> FileGrid | None:
        """Returns the integers that ``name`` is rounded to for all of its readers; None for other tensors."""
        readers = self.readers.get(name, [])
        if len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
            return None
        return self._grid(readers[0])

    def roundings(self) -> Iterator[tuple[str, FileGrid]]:
        """Yields each tensor that is rounded, with its integers."""
        for node in self.model.graph.node:
            if node.op_type == "QuantizeLinear" and (grid := self._grid(node)) is not None:
                yield self.source(node.input[0]), grid

    @cached_property
    def parameters_by_name(self) -> dict[str, tuple[tuple[int, ...], str, np.ndarray | None]]:
        """Name -> shape, type in words, and values, of each stored tensor that a node reads.

        Integers with a scale have the name and the values of the tensor that is dequantized from them. The
        values are None where they lie in a file that is too large to be loaded.
        """
        result: dict[str, tuple[tuple[int, ...], str, np.ndarray | None]] = {}
        for name, tensor in self.stored.items():
            readers = self.readers.get(name, [])
            plain = [n for n in readers if n.op_type not in _ROUNDINGS]
            shape, kind = tuple(tensor.dims), _type_name(tensor.data_type)
            if plain:
                result[name] = shape, kind, self.value(name)
            for node in readers:
                if node.op_type == "DequantizeLinear" and node.input[0] == name:
                    grid = self._grid(node)
                    text = kind if grid is None else str(grid) if grid.scale.size > 1 else grid.type
                    result[node.output[0]] = shape, text, _dequantized(self.value(name), grid)
        return result

    def _grid(self, node: NodeProto) -> FileGrid | None:
        zero = self.stored.get(node.input[2]) if len(node.input) > 2 else None
        factors = self.value(node.input[1])
        if factors is None:
            return None
        offsets = np.zeros(factors.shape, np.int64) if zero is None else self.value(node.input[2])
        kind = "uint8" if zero is None else _type_name(zero.data_type)
        axis = next((int(a.i) for a in node.attribute if a.name == "axis"), 1)
        return FileGrid(kind, factors, np.asarray(offsets).astype(np.int64), axis)


def _dequantized(values: np.ndarray | None, grid: FileGrid | None) -> np.ndarray | None:
    if values is None or grid is None:
        return values
    shape = [-1 if axis == grid.axis % max(values.ndim, 1) else 1 for axis in range(values.ndim)]
    scale, zero = grid.scale, grid.zero_point
    if scale.size > 1:
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (values.astype(np.float64) - zero) * scale


def _type_name(kind: int) -> str:
    try:
        return str(np.dtype(helper.tensor_dtype_to_np_dtype(kind)).name)
    except (KeyError, TypeError, ValueError):
        return f"type {kind}"


def describe_value(info: ValueInfoProto) -> str:
    """Returns type and shape of an input or output: ``float32 [N, 3, ?, ?]``."""
    tensor = info.type.tensor_type
    sizes = [d.dim_param or (str(d.dim_value) if d.dim_value > 0 else "?") for d in tensor.shape.dim]
    shape = f"[{', '.join(sizes)}]" if tensor.HasField("shape") else "of any shape"
    return f"{_type_name(tensor.elem_type)} {shape}"


def attributes_of(node: NodeProto, opset: int) -> Mapping[str, Any]:
    """Returns the attributes of a node that say something else than its defaults."""
    try:
        schema = defs.get_schema(node.op_type, max_inclusive_version=max(opset, 1), domain=node.domain)
        defaults = {name: a.default_value for name, a in schema.attributes.items()}
    except defs.SchemaError:
        defaults = {}
    result: dict[str, Any] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        default = defaults.get(attribute.name)
        if default is not None and default.type and value == helper.get_attribute_value(default):
            continue
        ones, zeros = attribute.name in _ONES, attribute.name in _ZEROS
        if (ones and all(n == 1 for n in value)) or (zeros and not any(value)):
            continue
        result[attribute.name] = value
    return result
