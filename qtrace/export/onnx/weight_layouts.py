"""Where ONNX has the channels of a layer's weight."""

from __future__ import annotations

import numpy as np

from qtrace import ops
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.walk import owner, users
from qtrace.ops import OpCall

__all__ = ["CONVS", "TRANSPOSED", "has_blocks", "keeps_rows", "weight_layout"]

# Kind -> the number of axes along which it moves its window.
CONVS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
TRANSPOSED = {"conv_transpose2d": 2, "conv_transpose3d": 3}


def weight_layout(call: OpCall, weight: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns a layer's weight in ONNX's layout, and the axis of its output channels there."""
    if call.kind in CONVS:
        return weight.reshape(-1, *weight.shape[-CONVS[call.kind] - 1 :]), 0
    if call.kind in TRANSPOSED:
        return weight.reshape(-1, *weight.shape[-TRANSPOSED[call.kind] - 1 :]), 1
    if call.kind == "linear" and not keeps_rows(call):
        return weight.T, 1
    return weight, 0


def keeps_rows(call: OpCall) -> bool:
    """Whether the weight of a linear layer is stored as MegEngine has it: outputs x inputs.

    Gemm reads it so, and all that is no linear layer. Else it is stored as MatMul reads it.
    """
    assert call.weight is not None
    if has_blocks(call):
        return False  # runtimes have kernels for blocks in the layout of MatMul
    calls = [ops.read(user) for user in users(call.weight)]
    matrices = [c is not None and c.weight is call.weight and len(c.inputs[0].shape) == 2 for c in calls]
    return all(matrices) or any(c is None or c.weight is not call.weight for c in calls)


def has_blocks(call: OpCall) -> bool:
    """Whether the weight of a linear layer has a scale per block of inputs."""
    assert call.weight is not None
    rounding = owner(call.weight.expr)
    return isinstance(rounding, FakeQuant) and rounding.scheme.block is not None
