"""Which float ops onnxruntime computes in blocks of channels, the layout that its convolutions write."""

from __future__ import annotations

__all__ = ["STEM_CHANNELS", "stays_blocked"]

STEM_CHANNELS = 8
"""With fewer channels than this, a float convolution reads the plain layout."""

_BLOCKED = "MaxPool AveragePool GlobalAveragePool Add Mul Concat Relu Sigmoid Tanh Resize BatchNormalization"
_INTO_CONV = frozenset({"LeakyRelu", "HardSigmoid"})
_OF_EQUAL_SHAPES = frozenset({"Add", "Mul"})


def stays_blocked(op: str, blocked: bool, after_conv: bool, equal_shapes: bool) -> bool:
    """Returns whether a float op reads and writes blocks of channels.

    Args:
        op: its ONNX op.
        blocked: whether all that it reads is in blocks.
        after_conv: whether it reads a convolution, which can take it in.
        equal_shapes: whether it reads computed tensors of only one shape.
    """
    if op in _INTO_CONV:
        return after_conv
    return op in _BLOCKED.split() and blocked and (equal_shapes or op not in _OF_EQUAL_SHAPES)
