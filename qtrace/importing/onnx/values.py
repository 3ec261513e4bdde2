"""Values that the names of a file stand for while its graph is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qtrace.graph.types import TensorNode
from qtrace.preparation.passes.given.tensors import GivenGrid

__all__ = ["BatchMultiple", "Computed", "Quantized", "Refused", "Sizes", "Stored", "Value"]


@dataclass(frozen=True, eq=False)
class Stored:
    """Numbers that are the same for every input.

    Attributes:
        array: the numbers, in the file's dtype.
        name: the name of the value in the file.
        learned: whether they are an initializer, which may be trained, and not a constant of the graph.
    """

    array: np.ndarray
    name: str
    learned: bool = False


@dataclass(frozen=True, eq=False)
class Sizes:
    """Integers that are computed from shapes and depend on the batch.

    Attributes:
        arrays: the integers for the recorded batch, and for one sample more.
    """

    arrays: tuple[np.ndarray, ...]


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
class Quantized:
    """Integers that QuantizeLinear gives, and that ops move.

    Attributes:
        node: the node of the floats that they stand for.
        dtype: the type of the integers.
        grid: their scale and zero point.
    """

    node: TensorNode
    dtype: np.dtype
    grid: GivenGrid


@dataclass(frozen=True, eq=False)
class Refused:
    """A tensor that cannot be computed, since its node or one before it was refused."""


@dataclass(frozen=True)
class BatchMultiple:
    """A size that is a multiple of the batch.

    Attributes:
        factor: the multiple.
        recorded: the size for the recorded batch.
    """

    factor: int
    recorded: int


Value = Stored | Sizes | Computed | Quantized | Refused
