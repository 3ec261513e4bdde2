"""Copies and reads large tensors without a further copy of their values.

MegEngine copies a tensor by its values, and keeps what was read as an array as long as the tensor lives. A
view of a whole tensor is cheaper: it shares the values, and its array goes with it. A write into either does
not reach the other, since MegEngine writes a new value and never into an old one.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.core.ops.builtin import GetVarShape
from megengine.module import Module
from megengine.traced_module.expr import Expr, GetAttr
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

__all__ = [
    "MAX_RANK",
    "PART_BYTES",
    "STAGE_BYTES",
    "count_bytes",
    "holds_large_tensors",
    "large_reads",
    "read_array",
    "shared_copies",
    "shared_copy",
    "stored_tensor",
]

# Bytes of parameters that are held in several copies at once: a large network is gone through in parts of
# this size. A constant, not a share of the free memory: the parts may decide the last bits of values.
PART_BYTES = 64 << 20

STAGE_BYTES = 512 << 20
"""Of values that a stage keeps until others have read them: outputs of layers, or batches that run ahead."""

# Of smaller tensors a copy is as quick, and their roundings are not worth being given back.
_LARGE_BYTES = 2**16
MAX_RANK = int(GetVarShape().axis)  # of MegEngine's tensors: this axis stands for the whole shape
_INPLACE = "MEGENGINE_INPLACE_UPDATE"  # MegEngine's own switch: optimizers write into values then


def count_bytes(node: Node) -> int:
    """Returns the size of a value in float32; 0 for a module, and where the graph records no shape."""
    shape = node.shape if isinstance(node, TensorNode) else None
    return 4 * math.prod(int(n) for n in shape) if shape else 0


def large_reads(graph: InternalGraph) -> dict[Expr, int]:
    """Maps the exprs that read large parameters, and may round them, to the size of these in float32."""
    sizes: dict[Expr, int] = {}
    for expr in graph._exprs:
        size = count_bytes(expr.outputs[0]) if isinstance(expr, GetAttr) else 0
        if size >= _LARGE_BYTES:
            for reader in expr.outputs[0].users:
                sizes[reader] = sizes.get(reader, 0) + size
    return sizes


def read_array(tensor: Tensor) -> np.ndarray:
    """Returns the values of a tensor, which keeps no array of them.

    Args:
        tensor: the tensor; it is not changed.
    """
    array: np.ndarray = (_view(tensor) if _is_large(tensor) else tensor).numpy()
    return array


def stored_tensor(values: np.ndarray, trainable: bool = True) -> Tensor:
    """Returns a new tensor with some values, which keeps no array of them.

    Args:
        values: the values.
        trainable: whether it is a Parameter.
    """
    kind = Parameter if trainable else Tensor
    tensor = kind(values)
    return kind(_view(tensor)) if _is_large(tensor) else tensor


def shared_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor; a large one shares its values with the copy until one of them is written.

    Args:
        tensor: the tensor or parameter; it is not changed.
    """
    if not _is_large(tensor) or os.environ.get(_INPLACE, "0") != "0":
        return copy.deepcopy(tensor)
    return type(tensor)(_view(tensor))


def shared_copies(module: Module) -> dict[int, Any]:
    """Returns a memo for `copy.deepcopy` in which the large tensors of a module are copied already."""
    tensors = (tensor for _, tensor in module.named_tensors())
    return {id(tensor): shared_copy(tensor) for tensor in tensors if _is_large(tensor)}


def holds_large_tensors(value: Any) -> bool:
    """Returns whether ``value`` is a module with tensors that are worth to be shared."""
    return isinstance(value, Module) and any(_is_large(tensor) for _, tensor in value.named_tensors())


def _is_large(tensor: Tensor) -> bool:
    """Returns whether a tensor is large, and a copy needs only its values."""
    dtype = np.dtype(tensor.dtype)
    plain = dtype.kind in "fiub" and dtype.metadata is None and tensor._qparams is None
    return plain and int(np.prod(tensor._tuple_shape, dtype=np.int64)) * dtype.itemsize >= _LARGE_BYTES


def _view(tensor: Tensor) -> Tensor:
    return tensor.detach()[...]
