"""The layout in which onnxruntime's float kernels write a value of a graph: plain, or blocks of channels."""

from __future__ import annotations

from collections.abc import Sequence

from qtrace.graph.types import Expr, Node
from qtrace.graph.walk import shape_of
from qtrace.onnxfile.kernel_layouts import STEM_CHANNELS, stays_blocked
from qtrace.ops import OpCall

__all__ = ["FloatLayouts"]

_ONNX_OPS = {
    **{"max_pool2d": "MaxPool", "avg_pool2d": "AveragePool", "add": "Add", "mul": "Mul", "concat": "Concat"},
    **dict.fromkeys(("adaptive_avg_pool2d", "mean"), "GlobalAveragePool"),
    **dict.fromkeys(("relu", "relu6", "clip"), "Relu"),
    **{"sigmoid": "Sigmoid", "tanh": "Tanh", "interpolate": "Resize", "batch_norm": "BatchNormalization"},
    **{"leaky_relu": "LeakyRelu", "hsigmoid": "HardSigmoid", "hard_sigmoid": "HardSigmoid"},
}
"""Kind of an op -> the ONNX op whose layout it has."""
_READ_TWICE = frozenset({"silu", "mish", "hswish"})


class FloatLayouts:
    """Follows the layouts through a graph, op by op, as if all ops were float.

    Attributes:
        block_readers: the ops that read blocks.
        double_readers: the ops that are written as two nodes, both of which read the input.
    """

    def __init__(self) -> None:
        self.block_readers: set[Expr] = set()
        self.double_readers: set[Expr] = set()
        self._convs: set[Node] = set()
        self._blocked: set[Node] = set()

    def __contains__(self, node: Node) -> bool:
        """Returns whether the value of ``node`` is written in blocks."""
        return node in self._blocked

    def add(self, call: OpCall, inputs: Sequence[Node], results: Sequence[Node]) -> None:
        """Adds the next op.

        Args:
            call: the op.
            inputs: the values that it reads, before moves.
            results: the values that it gives, or the kernel that it is the first op of.
        """
        if call.kind in _READ_TWICE:
            self.double_readers.add(call.expr)
        if not results or len(shape_of(results[0])) != 4:
            return
        if call.kind == "conv2d":
            if (*shape_of(call.inputs[0]), 0, 0)[1] >= STEM_CHANNELS:  # a graph may say anything of shapes
                self.block_readers.add(call.expr)
            self._convs.update(results)
            self._blocked.update(results)
        elif self._stays_blocked(call, inputs):
            self.block_readers.add(call.expr)
            self._blocked.update(results)

    def _stays_blocked(self, call: OpCall, inputs: Sequence[Node]) -> bool:
        """Returns whether an op has a kernel for blocks, and reads nothing else."""
        return stays_blocked(
            _ONNX_OPS.get(call.kind, ""),
            blocked=bool(inputs) and self._blocked.issuperset(inputs),
            after_conv=self._convs.issuperset(inputs),
            equal_shapes=len(call.inputs) == len(inputs) == 2
            and len({shape_of(node) for node in inputs}) == 1,
        )
