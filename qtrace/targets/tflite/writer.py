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

# The version of the schema, and its identifier in the first bytes of a file.
_SCHEMA_VERSION = 3
_IDENTIFIER = b"TFL3"
# Kernels load weights with vector instructions: the schema asks for data at multiples of 16 bytes.
_ALIGNMENT = 16

TYPES = {
    np.dtype(name): getattr(schema.TensorType, name.upper())
    for name in ("float32", "int8", "int16", "int32", "int64", "bool")
}

# Operator -> its options in the schema, which mostly have the operator's name.
_WITH_OPTIONS = """
    ADD SUB MUL DIV CAST QUANTIZE DEQUANTIZE RESHAPE TRANSPOSE TILE PACK CONCATENATION SPLIT SLICE GATHER
    STRIDED_SLICE GATHER_ND PAD MIRROR_PAD CONV_2D CONV_3D DEPTHWISE_CONV_2D TRANSPOSE_CONV FULLY_CONNECTED
    SOFTMAX ARG_MAX ARG_MIN RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR NON_MAX_SUPPRESSION_V5 GELU LEAKY_RELU
"""
_OPTIONS = {
    **{code: f"{code.title().replace('_', '')}Options" for code in _WITH_OPTIONS.split()},
    **dict.fromkeys(("MEAN", "SUM", "REDUCE_PROD", "REDUCE_MAX", "REDUCE_MIN"), "ReducerOptions"),
    **dict.fromkeys(("MAX_POOL_2D", "AVERAGE_POOL_2D"), "Pool2DOptions"),
    **{"PADV2": "PadV2Options", "TOPK_V2": "TopKV2Options", "BATCH_MATMUL": "BatchMatMulOptions"},
}

# The first version of an operator that computes on float32, int8 and int16; 1 where it is not listed.
_VERSIONS = {
    "CONV_2D": (1, 3, 4),
    "DEPTHWISE_CONV_2D": (2, 3, 5),
    "FULLY_CONNECTED": (5, 5, 7),
    "BATCH_MATMUL": (1, 2, 3),
    "QUANTIZE": (1, 1, 3),
    "SUB": (1, 2, 5),
    **dict.fromkeys(("SUM", "LEAKY_RELU"), (1, 2, 2)),
    **dict.fromkeys(("TRANSPOSE_CONV", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), (3, 3, 3)),
    **dict.fromkeys(("MUL", "TRANSPOSE", "STRIDED_SLICE", "SPLIT"), (1, 2, 4)),
    **dict.fromkeys(("GATHER", "MAXIMUM", "MINIMUM"), (1, 2, 4)),
    **dict.fromkeys(("ADD", "CONCATENATION", "DEQUANTIZE", "LOGISTIC", "MAX_POOL_2D", "MEAN"), (1, 2, 3)),
    **dict.fromkeys(("MIRROR_PAD", "PACK", "PAD", "PADV2", "REDUCE_MAX", "REDUCE_MIN"), (1, 2, 3)),
    **dict.fromkeys(("AVERAGE_POOL_2D", "RELU", "RELU6", "TANH", "TILE"), (1, 2, 3)),
}


@dataclass(frozen=True)
class Grid:
    """Scales and zero points of a tensor: ``x = (q - zero_point) * scale``, per tensor or per channel.

    Attributes:
        scale: one scale, or one for each channel.
        zero_point: one zero point per entry of `scale`.
    """

    scale: tuple[float, ...]
    zero_point: tuple[int, ...]

    @classmethod
    def of(cls, qparams: QParams) -> Grid:
        """Builds the grid of ``qparams``."""
        zeros = tuple(int(z) for z in qparams.zero_point.reshape(-1))
        return cls(tuple(float(s) for s in qparams.scale.reshape(-1)), zeros)

    @classmethod
    def symmetric(cls, scale: np.ndarray) -> Grid:
        """Builds a grid whose zero points are 0."""
        scales = tuple(float(s) for s in scale.reshape(-1))
        return cls(scales, (0,) * len(scales))

    def floats(self, integers: np.ndarray) -> np.ndarray:
        """Dequantizes integers of a grid with one scale."""
        return (integers.astype(np.int32) - self.zero_point[0]).astype(np.float32) * np.float32(self.scale[0])

    def integers(self, values: Any, dtype: np.dtype) -> np.ndarray:
        """Quantizes numbers to a grid with one scale, with ties to even."""
        info = np.iinfo(dtype)
        steps = np.rint(np.asarray(values, np.float32) / np.float32(self.scale[0])) + self.zero_point[0]
        return np.clip(steps, info.min, info.max).astype(dtype)


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of the file.

    Attributes:
        index: the tensor's number in the file.
        name: the tensor's name in the file.
        shape: the shape in the file.
        dtype: the type in the file.
        grid: the grid of quantized integers; None for floats and plain numbers.
        value: the content of a constant; None for a tensor that is computed.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    grid: Grid | None = None
    value: np.ndarray | None = None


# The inputs of an operator; a sequence of numbers becomes a constant int32 vector.
Inputs = Sequence[FileTensor | Sequence[int]]


class _Buffer(schema.BufferT):
    """A buffer that is packed in one step and aligned; the schema's class copies byte by byte."""

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
    """Collects one subgraph. Numbers after them make the names of tensors unique."""

    def __init__(self) -> None:
        self.file_tensors: list[FileTensor] = []
        self.tensors: list[schema.TensorT] = []
        self.operators: list[schema.OperatorT] = []
        self.buffers: list[_Buffer] = [_Buffer()]  # the first one is empty and stands for "no data"
        self.codes: dict[tuple[int, int], int] = {}
        self.names: set[str] = set()
        self.same: dict[tuple[Any, ...], FileTensor] = {}
        self.counter = 1
        self.kept_tensors: set[int] = set()

    def keep(self, stored: FileTensor) -> None:
        """Keeps a tensor in the file even if no operator uses it."""
        self.kept_tensors.add(stored.index)

    def unique(self, name: str) -> str:
        """Returns ``name``, or ``name__2`` and so on if another tensor has it."""
        unused = name
        while unused in self.names:
            self.counter += 1
            unused = f"{name}__{self.counter}"
        self.names.add(unused)
        return unused

    def tensor(
        self, name: str, shape: Sequence[int], dtype: Any = np.float32, grid: Grid | None = None
    ) -> FileTensor:
        """Adds a tensor that an operator or the caller of the model fills."""
        index, kind = len(self.tensors), np.dtype(dtype)
        tensor = FileTensor(index, self.unique(name), tuple(int(n) for n in shape), kind, grid)
        self._add(tensor, 0, 0)
        return tensor

    def constant(self, name: str, value: Any, grid: Grid | None = None, axis: int = 0) -> FileTensor:
        """Adds a constant, or returns an earlier one of the same content and grid.

        Args:
            name: the name of a new tensor.
            value: the content, in the type of the file.
            grid: the grid of quantized integers; None for plain numbers.
            axis: the axis of the channels, for a grid per channel.
        """
        array = np.array(value, order="C")
        content = array.tobytes()
        key = (hashlib.sha256(content).digest(), array.dtype.str, array.shape, grid, axis)
        if key not in self.same:
            tensor = FileTensor(len(self.tensors), self.unique(name), array.shape, array.dtype, grid, array)
            self._add(tensor, self._buffer(content), axis)
            self.same[key] = tensor
        return self.same[key]

    def _buffer(self, content: bytes) -> int:
        """Adds a buffer and returns its number."""
        self.buffers.append(_Buffer())
        self.buffers[-1].data = content
        return len(self.buffers) - 1

    def ints(self, values: Sequence[int]) -> FileTensor:
        """Adds a constant int32 vector."""
        return self.constant("ints_" + "_".join(str(v) for v in values), np.array(values, np.int32))

    def _add(self, stored: FileTensor, buffer: int, axis: int) -> None:
        tensor = _build("Tensor", name=stored.name.encode(), shape=np.array(stored.shape, np.int32))
        tensor.type, tensor.buffer, tensor.hasRank = TYPES[stored.dtype], buffer, True
        if stored.grid is not None:
            tensor.quantization = _build(
                "QuantizationParameters",
                scale=np.array(stored.grid.scale, np.float32),
                zeroPoint=np.array(stored.grid.zero_point, np.int64),
                quantizedDimension=axis,
            )
        self.file_tensors.append(stored)
        self.tensors.append(tensor)

    def add(
        self,
        code: str,
        inputs: Inputs,
        name: str,
        shape: Sequence[int],
        dtype: Any = np.float32,
        grid: Grid | None = None,
        **options: Any,
    ) -> FileTensor:
        """Adds an operator and the tensor that it fills; see `tensor` and `op`."""
        result = self.tensor(name, shape, dtype, grid)
        self.op(code, inputs, [result], **options)
        return result

    def op(
        self,
        code: str,
        inputs: Inputs,
        outputs: Sequence[FileTensor],
        version: int = 0,
        kind: str = "",
        **options: Any,
    ) -> None:
        """Adds an operator.

        Args:
            code: the operator's name in the schema, such as ``CONV_2D``.
            inputs: the tensors that it reads.
            outputs: the tensors that it fills.
            version: the operator version that the options need; 0 for the version that the types need.
            kind: the name of its options in the schema, such as ``Conv2DOptions``; "" if its code says it.
            **options: the fields of the options.
        """
        read = [t if isinstance(t, FileTensor) else self.ints(t) for t in inputs]
        number = getattr(schema.BuiltinOperator, code), version or _version(code, read, outputs)
        operator = _build("Operator", opcodeIndex=self.codes.setdefault(number, len(self.codes)))
        operator.inputs, operator.outputs = (
            np.array([t.index for t in side], np.int32) for side in (read, outputs)
        )
        if kind := kind or _OPTIONS.get(code, ""):
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
            operator.builtinOptions = _build(kind, **options)
        self.operators.append(operator)

    def prune(self, outputs: Sequence[FileTensor]) -> set[str]:
        """Drops operators whose results nothing reads; returns the names of the remaining tensors."""
        read = {t.index for t in outputs}
        operators = []
        for operator in reversed(self.operators):
            if any(int(i) in read for i in operator.outputs):
                operators.append(operator)
                read.update(int(i) for i in operator.inputs)
        self.operators = operators[::-1]
        read.update(int(i) for operator in operators for i in operator.outputs)
        return {t.name for t in self.file_tensors if t.index in read}

    def finish(
        self,
        inputs: Sequence[tuple[str, FileTensor]],
        outputs: Sequence[tuple[str, FileTensor]],
        metadata: dict[str, Any],
        description: str,
        batch: int | None,
    ) -> bytes:
        """Returns the content of the file, without tensors that no operator uses.

        Args:
            inputs: names and tensors of the model's inputs.
            outputs: names and tensors of the model's outputs.
            metadata: plain data by name, written as JSON.
            description: the program that wrote the file.
            batch: the size of the first axis of inputs and outputs that is left free; None for none.
        """
        for tensor in [t for _, t in (*inputs, *outputs)]:
            if batch is not None and tensor.shape and tensor.shape[0] == batch:
                self.tensors[tensor.index].shapeSignature = np.array([-1, *tensor.shape[1:]], np.int32)
        graph = _build("SubGraph", name=b"main", operators=self.operators)
        listed = [self._metadata(name, value) for name, value in metadata.items()]
        place = self._compact(self.kept_tensors | {t.index for _, t in (*inputs, *outputs)})
        graph.tensors = [self.tensors[i] for i in place]
        graph.inputs = np.array([place[t.index] for _, t in inputs], np.int32)
        graph.outputs = np.array([place[t.index] for _, t in outputs], np.int32)
        sides = (
            [_build("TensorMap", name=n, tensorIndex=place[t.index]) for n, t in s] for s in (inputs, outputs)
        )
        signature = dict(zip(("inputs", "outputs"), sides, strict=True), signatureKey="serving_default")
        model = _build(
            "Model",
            version=_SCHEMA_VERSION,
            description=description,
            metadata=listed,
            subgraphs=[graph],
            operatorCodes=[_operator_code(*key) for key in self.codes],
            signatureDefs=[_build("SignatureDef", subgraphIndex=0, **signature)],
            buffers=self.buffers,
        )
        builder = flatbuffers.Builder(sum(len(b.data or b"") for b in self.buffers) + 65536)
        builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
        return bytes(builder.Output())

    def _compact(self, kept_tensors: set[int]) -> dict[int, int]:
        """Drops unused tensors and buffers; returns the old -> new number of each tensor."""
        used = kept_tensors | {int(i) for o in self.operators for i in (*o.inputs, *o.outputs)}
        place = {old: new for new, old in enumerate(sorted(used))}
        for operator in self.operators:
            operator.inputs, operator.outputs = (
                np.array([place[int(i)] for i in side], np.int32)
                for side in (operator.inputs, operator.outputs)
            )
        # Metadata comes last and stays: the buffers between belong to tensors.
        last = max((self.tensors[i].buffer for i in range(len(self.tensors))), default=0)
        read = {self.tensors[i].buffer for i in place}
        for number in range(1, last + 1):
            if number not in read:
                self.buffers[number] = _Buffer()
        return place

    def _metadata(self, name: str, value: Any) -> schema.MetadataT:
        content = json.dumps(value, sort_keys=True).encode()
        return _build("Metadata", name=name, buffer=self._buffer(content))


def _build(kind: str, **fields: Any) -> Any:
    """Builds an object of the schema, such as a ``Tensor``, with some of its fields."""
    instance = getattr(schema, f"{kind}T")()
    for field, value in fields.items():
        if field not in vars(instance):
            raise AttributeError(f"{kind} lacks field {field}")
        setattr(instance, field, value)
    return instance


def _version(code: str, inputs: Sequence[FileTensor], outputs: Sequence[FileTensor]) -> int:
    kinds = {t.dtype for t in (*inputs, *outputs) if t.grid is not None}
    place = 2 if np.dtype(np.int16) in kinds else 1 if np.dtype(np.int8) in kinds else 0
    return _VERSIONS.get(code, (1, 1, 1))[place]


def _operator_code(number: int, version: int) -> schema.OperatorCodeT:
    # Old readers know only the narrow field, which ends at this number.
    narrow = min(number, schema.BuiltinOperator.PLACEHOLDER_FOR_GREATER_OP_CODES)
    return _build("OperatorCode", deprecatedBuiltinCode=narrow, builtinCode=number, version=version)
