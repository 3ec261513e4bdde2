"""Collects the tensors and operators of one TFLite file, and writes it with the schema's own classes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from qtrace.scheme import QParams

__all__ = ["TYPES", "Grid", "Stored", "TfliteWriter"]

# The version of the schema, and its mark in the first bytes of a file.
_SCHEMA_VERSION = 3
_IDENTIFIER = b"TFL3"
# Kernels load weights with vector instructions: the schema asks for data at multiples of 16 bytes.
_ALIGNMENT = 16

TYPES = {
    np.dtype(np.float32): schema.TensorType.FLOAT32,
    np.dtype(np.int8): schema.TensorType.INT8,
    np.dtype(np.int16): schema.TensorType.INT16,
    np.dtype(np.int32): schema.TensorType.INT32,
    np.dtype(np.int64): schema.TensorType.INT64,
    np.dtype(np.bool_): schema.TensorType.BOOL,
}

# The first version of an operator that computes on float32, int8 and int16; 1 where it is not listed.
_VERSIONS = {
    "CONV_2D": (1, 3, 4),
    "DEPTHWISE_CONV_2D": (2, 3, 5),
    "FULLY_CONNECTED": (5, 5, 7),
    "TRANSPOSE_CONV": (3, 3, 3),
    "BATCH_MATMUL": (1, 2, 3),
    "QUANTIZE": (1, 1, 3),
    "DEQUANTIZE": (1, 2, 3),
    "MUL": (1, 2, 4),
    "SUB": (1, 2, 5),
    "TRANSPOSE": (1, 2, 4),
    "STRIDED_SLICE": (1, 2, 4),
    "SPLIT": (1, 2, 4),
    "SLICE": (1, 2, 4),
    "GATHER": (1, 2, 4),
    "MAXIMUM": (1, 2, 4),
    "MINIMUM": (1, 2, 4),
    "RESIZE_BILINEAR": (3, 3, 3),
    "RESIZE_NEAREST_NEIGHBOR": (3, 3, 3),
    "BROADCAST_TO": (2, 3, 3),
    "SUM": (1, 2, 2),
    "LEAKY_RELU": (1, 2, 2),
    **dict.fromkeys(
        (
            *("ADD", "CONCATENATION", "LOGISTIC", "MAX_POOL_2D", "MEAN", "MIRROR_PAD"),
            *("PACK", "PAD", "PADV2", "REDUCE_MAX", "REDUCE_MIN", "RELU", "RELU6", "TANH", "TILE"),
        ),
        (1, 2, 3),
    ),
}


@dataclass(frozen=True)
class Grid:
    """What the integers of a tensor mean: ``x = (q - zero_point) * scale``, per tensor or per channel.

    Attributes:
        scale: one number, or one for each channel.
        zero_point: as many.
    """

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]

    @classmethod
    def of(cls, qparams: QParams) -> Grid:
        """That of some parameters."""
        zeros = tuple(int(z) for z in qparams.zero_point.reshape(-1))
        return cls(tuple(float(s) for s in qparams.scale.reshape(-1)), zeros)

    @classmethod
    def symmetric(cls, scale: np.ndarray) -> Grid:
        """Without zero points."""
        found = tuple(float(s) for s in scale.reshape(-1))
        return cls(found, (0,) * len(found))

    def floats(self, integers: np.ndarray) -> np.ndarray:
        """The numbers that integers of one scale mean."""
        return (integers.astype(np.int32) - self.zero_point[0]).astype(np.float32) * np.float32(self.scale[0])

    def integers(self, values: Any, dtype: np.dtype) -> np.ndarray:
        """The integers of a type that are nearest to numbers, ties to the even one."""
        info = np.iinfo(dtype)
        steps = np.rint(np.asarray(values, np.float32) / np.float32(self.scale[0])) + self.zero_point[0]
        return np.clip(steps, info.min, info.max).astype(dtype)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the file.

    Attributes:
        index: its number there.
        name: its name there.
        shape: its shape there.
        dtype: its type.
        grid: what its integers mean; None for floats and plain numbers.
        value: its numbers, if the file holds them.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    grid: Grid | None = None
    value: np.ndarray | None = None


class _Buffer(schema.BufferT):
    """A buffer that is packed at once and aligned; the generated code copies byte by byte."""

    def Pack(self, builder: flatbuffers.Builder) -> int:
        if self.data is None:
            return super().Pack(builder)
        content = bytes(self.data)
        builder.StartVector(1, len(content), _ALIGNMENT)
        builder.head = builder.head - len(content)
        builder.Bytes[builder.Head() : builder.Head() + len(content)] = content
        data = builder.EndVector()
        schema.BufferStart(builder)
        schema.BufferAddData(builder, data)
        return schema.BufferEnd(builder)


class TfliteWriter:
    """One subgraph in the making. Names of tensors are made unique by a number behind them."""

    def __init__(self) -> None:
        self.stored: list[Stored] = []
        self.tensors: list[schema.TensorT] = []
        self.operators: list[schema.OperatorT] = []
        self.buffers: list[_Buffer] = [_Buffer()]  # the first one is empty and stands for "no data"
        self.codes: dict[tuple[int, int], int] = {}
        self.names: set[str] = set()
        self.same: dict[tuple[Any, ...], Stored] = {}
        self.counter = 1
        self.kept: set[int] = set()

    def keep(self, stored: Stored) -> None:
        """Writes a tensor although no operator may use it."""
        self.kept.add(stored.index)

    def unique(self, name: str) -> str:
        """``name``, or ``name__2`` and so on when another tensor has it."""
        found = name
        while found in self.names:
            self.counter += 1
            found = f"{name}__{self.counter}"
        self.names.add(found)
        return found

    def tensor(
        self, name: str, shape: Sequence[int], dtype: Any = np.float32, grid: Grid | None = None
    ) -> Stored:
        """Adds a tensor that an operator, or the caller of the model, fills."""
        index, kind = len(self.tensors), np.dtype(dtype)
        made = Stored(index, self.unique(name), tuple(int(n) for n in shape), kind, grid)
        self._add(made, 0, 0)
        return made

    def constant(self, name: str, value: Any, grid: Grid | None = None, axis: int = 0) -> Stored:
        """Adds a tensor that the file holds; one of the same content and meaning is taken again.

        Args:
            name: its name, if it is new.
            value: its numbers, of the type that the file shall have.
            grid: what its integers mean.
            axis: the axis of its channels, for a grid per channel.
        """
        array = np.array(value, order="C")
        content = array.tobytes()
        key = (hashlib.sha256(content).digest(), array.dtype.str, array.shape, grid, axis)
        if key not in self.same:
            buffer = _Buffer()
            buffer.data = content
            self.buffers.append(buffer)
            made = Stored(len(self.tensors), self.unique(name), array.shape, array.dtype, grid, array)
            self._add(made, len(self.buffers) - 1, axis)
            self.same[key] = made
        return self.same[key]

    def ints(self, values: Sequence[int]) -> Stored:
        """An int32 vector that the file holds."""
        return self.constant("ints_" + "_".join(str(v) for v in values), np.array(values, np.int32))

    def _add(self, made: Stored, buffer: int, axis: int) -> None:
        tensor = schema.TensorT()
        tensor.name, tensor.shape = made.name.encode(), np.array(made.shape, np.int32)
        tensor.type, tensor.buffer, tensor.hasRank = TYPES[made.dtype], buffer, True
        if made.grid is not None:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale = np.array(made.grid.scale, np.float32)
            tensor.quantization.zeroPoint = np.array(made.grid.zero_point, np.int64)
            tensor.quantization.quantizedDimension = axis
        self.stored.append(made)
        self.tensors.append(tensor)

    def add(
        self,
        code: str,
        inputs: Sequence[Stored | Sequence[int]],
        name: str,
        shape: Sequence[int],
        dtype: Any = np.float32,
        grid: Grid | None = None,
        **options: Any,
    ) -> Stored:
        """Adds an operator and the tensor that it fills; see `tensor` and `op`."""
        result = self.tensor(name, shape, dtype, grid)
        self.op(code, inputs, [result], **options)
        return result

    def op(
        self,
        code: str,
        inputs: Sequence[Stored | Sequence[int]],
        outputs: Sequence[Stored],
        kind: str = "",
        version: int = 0,
        **options: Any,
    ) -> None:
        """Adds an operator.

        Args:
            code: its name in the schema, such as ``CONV_2D``.
            inputs: the tensors that it reads; numbers are a vector that the file holds.
            outputs: what it fills.
            kind: the name of its options there, such as ``Conv2DOptions``; "" when it has none.
            version: the first version that has all that is used of it; 0 to go by the types.
            **options: their fields.
        """
        read = [t if isinstance(t, Stored) else self.ints(t) for t in inputs]
        number = getattr(schema.BuiltinOperator, code), version or _version(code, read, outputs)
        operator = schema.OperatorT()
        operator.opcodeIndex = self.codes.setdefault(number, len(self.codes))
        operator.inputs, operator.outputs = (
            np.array([t.index for t in side], np.int32) for side in (read, outputs)
        )
        if kind:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
            operator.builtinOptions = getattr(schema, f"{kind}T")()
            for field, value in options.items():
                if field not in vars(operator.builtinOptions):
                    raise AttributeError(f"{kind} has no field {field}")
                setattr(operator.builtinOptions, field, value)
        self.operators.append(operator)

    def prune(self, outputs: Sequence[Stored]) -> set[str]:
        """Drops operators whose results nobody reads; returns the names of the tensors that are left."""
        read = {t.index for t in outputs}
        kept = []
        for operator in reversed(self.operators):
            if any(int(i) in read for i in operator.outputs):
                kept.append(operator)
                read.update(int(i) for i in operator.inputs)
        self.operators = kept[::-1]
        read.update(int(i) for operator in kept for i in operator.outputs)
        return {t.name for t in self.stored if t.index in read}

    def finish(
        self,
        inputs: Sequence[tuple[str, Stored]],
        outputs: Sequence[tuple[str, Stored]],
        metadata: dict[str, Any],
        description: str,
        batch: int | None,
    ) -> bytes:
        """The file, without tensors that no operator uses.

        Args:
            inputs: names and tensors of what the model takes.
            outputs: names and tensors of what it gives.
            metadata: plain data by name, written as JSON.
            description: who made it.
            batch: the size of a first axis of inputs and outputs that may have any size; None for none.
        """
        for held in [t for _, t in (*inputs, *outputs)]:
            if batch is not None and held.shape and held.shape[0] == batch:
                self.tensors[held.index].shapeSignature = np.array([-1, *held.shape[1:]], np.int32)
        graph = schema.SubGraphT()
        graph.name, graph.operators = b"main", self.operators
        model = schema.ModelT()
        model.metadata = [self._metadata(name, value) for name, value in metadata.items()]
        place = self._compact(self.kept | {t.index for _, t in (*inputs, *outputs)})
        graph.tensors = [self.tensors[i] for i in place]
        graph.inputs = np.array([place[t.index] for _, t in inputs], np.int32)
        graph.outputs = np.array([place[t.index] for _, t in outputs], np.int32)
        model.version, model.description = _SCHEMA_VERSION, description
        model.subgraphs, model.operatorCodes = [graph], [_operator_code(*key) for key in self.codes]
        sides = [[_tensor_map(name, place[t.index]) for name, t in side] for side in (inputs, outputs)]
        model.signatureDefs = [_signature(*sides)]
        model.buffers = self.buffers
        builder = flatbuffers.Builder(sum(len(b.data or b"") for b in self.buffers) + 65536)
        builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
        return bytes(builder.Output())

    def _compact(self, kept: set[int]) -> dict[int, int]:
        """Drops tensors and buffers that nothing uses; returns old -> new number of a tensor."""
        used = kept | {int(i) for o in self.operators for i in (*o.inputs, *o.outputs)}
        place = {old: new for new, old in enumerate(sorted(used))}
        for operator in self.operators:
            operator.inputs, operator.outputs = (
                np.array([place[int(i)] for i in side], np.int32)
                for side in (operator.inputs, operator.outputs)
            )
        # Metadata comes last and stays: the buffers between are those of tensors.
        last = max((self.tensors[i].buffer for i in range(len(self.tensors))), default=0)
        read = {self.tensors[i].buffer for i in place}
        for number in range(1, last + 1):
            if number not in read:
                self.buffers[number] = _Buffer()
        return place

    def _metadata(self, name: str, value: Any) -> schema.MetadataT:
        buffer = _Buffer()
        buffer.data = json.dumps(value, sort_keys=True).encode()
        self.buffers.append(buffer)
        made = schema.MetadataT()
        made.name, made.buffer = name, len(self.buffers) - 1
        return made


def _version(code: str, inputs: Sequence[Stored], outputs: Sequence[Stored]) -> int:
    kinds = {t.dtype for t in (*inputs, *outputs) if t.grid is not None}
    place = 2 if np.dtype(np.int16) in kinds else 1 if np.dtype(np.int8) in kinds else 0
    return _VERSIONS.get(code, (1, 1, 1))[place]


def _operator_code(number: int, version: int) -> schema.OperatorCodeT:
    made = schema.OperatorCodeT()
    # Old readers know the narrow field only, which ends at this number.
    made.deprecatedBuiltinCode = min(number, schema.BuiltinOperator.PLACEHOLDER_FOR_GREATER_OP_CODES)
    made.builtinCode, made.version = number, version
    return made


def _signature(inputs: list[schema.TensorMapT], outputs: list[schema.TensorMapT]) -> schema.SignatureDefT:
    made = schema.SignatureDefT()
    made.signatureKey, made.subgraphIndex = "serving_default", 0
    made.inputs, made.outputs = inputs, outputs
    return made


def _tensor_map(name: str, index: int) -> schema.TensorMapT:
    made = schema.TensorMapT()
    made.name, made.tensorIndex = name, index
    return made
