"""Small TFLite networks, in which single ops are timed as LiteRT runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

__all__ = ["LiteNet"]

_SCHEMA_VERSION = 3
# The versions of operators that take int8 and scales for each channel; 2 where it is not listed.
_VERSIONS = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"), 3),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), 3),
    **dict.fromkeys(("HARD_SWISH", "QUANTIZE", "RESHAPE", "DIV", "EXP"), 1),
    "FULLY_CONNECTED": 4,
}
_SCALE = 0.05
_TYPES = {np.dtype(name): getattr(schema.TensorType, name.upper()) for name in ("float32", "int8", "int32")}


class LiteNet:
    """A TFLite network under construction; tensors are numbers, and images have their channels last."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._buffers: list[Any] = [schema.BufferT()]
        self._codes: dict[str, int] = {}
        self._inputs: list[int] = []
        self._random = np.random.default_rng(0)

    def input(self, shape: Sequence[int], integer: bool) -> int:
        """Adds an input of floats or of integers."""
        self._inputs.append(self.tensor(shape, integer))
        return self._inputs[-1]

    def tensor(self, shape: Sequence[int], integer: bool, scale: float = _SCALE, zero: int = 0) -> int:
        """Adds a tensor that an operator fills."""
        kind = np.dtype("int8" if integer else "float32")
        return self._add(shape, kind, 0, ([scale], [zero]) if integer else None)

    def stored(self, shape: Sequence[int], integer: bool) -> int:
        """Adds a stored operand of random values."""
        if not integer:
            return self._store(self._random.normal(0, 0.1, shape).astype(np.float32))
        return self._store(self._random.integers(-127, 128, shape).astype(np.int8), ([_SCALE], [0]))

    def weight(self, shape: Sequence[int], integer: bool, axis: int = 0, per_channel: bool = True) -> int:
        """Adds a stored weight; on integers with one scale for each channel."""
        if not integer:
            return self.stored(shape, False)
        values = self._random.integers(-127, 128, shape).astype(np.int8)
        count = shape[axis] if per_channel else 1
        return self._store(values, ([0.001] * count, [0] * count), axis)

    def bias(self, count: int, integer: bool, per_channel: bool = True) -> int:
        """Adds a stored bias."""
        if not integer:
            return self._store(np.zeros(count, np.float32))
        scales = count if per_channel else 1
        return self._store(np.zeros(count, np.int32), ([_SCALE * 0.001] * scales, [0] * scales))

    def numbers(self, values: Any) -> int:
        """Adds stored int32 numbers, such as axes."""
        return self._store(np.asarray(values, np.int32))

    def _store(self, value: np.ndarray, grid: Any = None, axis: int = 0) -> int:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        self._buffers.append(buffer)
        return self._add(value.shape, value.dtype, len(self._buffers) - 1, grid, axis)

    def _add(self, shape: Sequence[int], kind: np.dtype, buffer: int, grid: Any, axis: int = 0) -> int:
        tensor = _build("Tensor", shape=np.array(shape, np.int32), type=_TYPES[kind], buffer=buffer)
        tensor.name, tensor.hasRank = f"t{len(self._tensors)}".encode(), True
        if grid is not None:
            tensor.quantization = _build(
                "QuantizationParameters",
                scale=np.array(grid[0], np.float32),
                zeroPoint=np.array(grid[1], np.int64),
                quantizedDimension=axis,
            )
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def op(self, code: str, inputs: Sequence[int], output: int, kind: str = "", **options: Any) -> int:
        """Adds an operator that fills ``output``.

        Args:
            code: the operator's name in the schema, such as ``CONV_2D``.
            inputs: the tensors that it reads.
            output: the tensor that it fills.
            kind: the name of its options in the schema; "" when it has none.
            **options: the fields of the options.
        """
        operator = _build("Operator", opcodeIndex=self._codes.setdefault(code, len(self._codes)))
        operator.inputs, operator.outputs = np.array(inputs, np.int32), np.array([output], np.int32)
        if kind:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
            operator.builtinOptions = _build(kind, **options)
        self._operators.append(operator)
        return output

    def serialize(self, outputs: Sequence[int]) -> bytes:
        """Returns the file."""
        graph = _build("SubGraph", name=b"main", tensors=self._tensors, operators=self._operators)
        graph.inputs, graph.outputs = np.array(self._inputs, np.int32), np.array(outputs, np.int32)
        codes = []
        for name in self._codes:
            number = getattr(schema.BuiltinOperator, name)
            code = _build("OperatorCode", builtinCode=number, version=_VERSIONS.get(name, 2))
            code.deprecatedBuiltinCode = min(number, 127)
            codes.append(code)
        model = _build(
            "Model",
            version=_SCHEMA_VERSION,
            description=b"kernels",
            subgraphs=[graph],
            operatorCodes=codes,
            buffers=self._buffers,
        )
        builder = flatbuffers.Builder(4096)
        builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
        return bytes(builder.Output())


def _build(kind: str, **fields: Any) -> Any:
    built = getattr(schema, f"{kind}T")()
    for name, value in fields.items():
        setattr(built, name, value)
    return built
