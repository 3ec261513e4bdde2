"""Values that the names of a file stand for while its graph is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from qtrace.graph.origin import Move
from qtrace.graph.types import TensorNode
from qtrace.onnxfile.fragment import FragmentTensor
from qtrace.preparation.passes.quantized_file import StoredGrid

__all__ = [
    "Computed",
    "OpaqueValue",
    "QuantizedIntegers",
    "Refused",
    "Sizes",
    "SplitTensors",
    "Stored",
    "Value",
    "is_float",
]


@dataclass(frozen=True, eq=False)
class Stored:
    """Numbers that are the same for every input.

    Attributes:
        array: the numbers, in the file's dtype.
        name: the name of the value in the file.
        learned: whether they are an initializer, which may be trained, and not a constant of the graph.
        moves: what made these numbers of the initializer ``name``, if they are a part of it or are ordered
            otherwise.
    """

    array: np.ndarray
    name: str
    learned: bool = False
    moves: tuple[Move, ...] = ()

    @cached_property
    def identity(self) -> Any:
        """A key of these numbers; a transposed tensor of the same name has another.

        The numbers are read once: those that are mapped from a file come into memory by it.
        """
        values = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        return self.name, self.moves, self.array.shape, hashlib.blake2b(values.data).digest()


@dataclass(frozen=True, eq=False)
class Sizes:
    """Numbers that are computed from shapes and depend on open axes.

    Attributes:
        arrays: the numbers for the recorded sizes, and for the other ones at which the builder runs.
        numbers: an array of objects of the same shape: a `Size` where a number depends on an open axis.
    """

    arrays: tuple[np.ndarray, ...]
    numbers: np.ndarray


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that the graph computes.

    Attributes:
        node: the node of the tensor.
        dtype: the dtype in the file, such as int64 where the node is int32.
    """

    node: TensorNode
    dtype: np.dtype


@dataclass(frozen=True, eq=False)
class QuantizedIntegers:
    """Integers that QuantizeLinear gives, and that ops move.

    Attributes:
        node: the node of the floats that they stand for.
        dtype: the type of the integers.
        grid: their scale and zero point.
    """

    node: TensorNode
    dtype: np.dtype
    grid: StoredGrid


@dataclass(frozen=True, eq=False)
class SplitTensors:
    """A sequence of tensors that a tensor was split into.

    Attributes:
        values: the tensors.
    """

    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class OpaqueValue:
    """A result of a kept node that no traced graph holds: a sequence, text, a shape that values decide.

    Attributes:
        part: the node, as `OpaqueNodes` keeps it.
        index: the place of the output.
        kinds: type and shape for the recorded sizes, and for the other ones at which the builder runs.
    """

    part: Any
    index: int
    kinds: Sequence[FragmentTensor]


@dataclass(frozen=True, eq=False)
class Refused:
    """A tensor that cannot be computed, since its node or one before it was refused."""


Value = Stored | Sizes | Computed | QuantizedIntegers | SplitTensors | OpaqueValue | Refused


def is_float(dtype: np.dtype) -> bool:
    """Returns whether tensors of ``dtype`` are floats, which a graph carries as float32.

    numpy lacks a bfloat16 of its own: the one of ONNX's package is of the kind of raw bytes.
    """
    return dtype.kind == "f" or dtype.name == "bfloat16"
