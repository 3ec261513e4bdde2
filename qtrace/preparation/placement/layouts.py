"""The layout in which float kernels of onnxruntime write each value of a graph: plain, or blocks of channels.

`qtrace.benchmarking.layouts` follows the same rules through the nodes of an ONNX file.
"""

from __future__ import annotations

from collections.abc import Sequence

from qtrace.graph.types import Expr, Node
from qtrace.graph.walk import shape_of
from qtrace.ops import OpCall

__all__ = ["FloatLayouts"]

_STEM = 8  # fewer channels than this are read in the plain layout by convolutions
_IN_BLOCKS = (
    "max_pool2d avg_pool2d adaptive_avg_pool2d mean add mul concat relu relu6 clip sigmoid tanh interpolate "
    "batch_norm"
)
_INTO_CONV = frozenset({"leaky_relu", "hsigmoid", "hard_sigmoid"})
_OF_EQUAL_SHAPES = frozenset({"add", "mul"})
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
            if (*shape_of(call.inputs[0]), 0, 0)[1] >= _STEM:  # a graph may say anything of shapes
                self.block_readers.add(call.expr)
            self._convs.update(results)
            self._blocked.update(results)
        elif self._stays_blocked(call, inputs):
            self.block_readers.add(call.expr)
            self._blocked.update(results)

    def _stays_blocked(self, call: OpCall, inputs: Sequence[Node]) -> bool:
        """Returns whether an op has a kernel for blocks, and reads nothing else."""
        if call.kind in _INTO_CONV:
            return self._convs.issuperset(inputs)
        if call.kind not in _IN_BLOCKS.split() or not inputs or not self._blocked.issuperset(inputs):
            return False
        if call.kind not in _OF_EQUAL_SHAPES:
            return True
        return len(call.inputs) == len(inputs) == 2 and len({shape_of(node) for node in inputs}) == 1
