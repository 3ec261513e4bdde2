"""Chooses the ONNX opset that a model needs, and brings its nodes into the form of that opset."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

__all__ = ["at_opset", "versions"]

# Runtimes fuse opset 13 best. Opset 21 added integers of 4 and 16 bits, opset 16 ops that
# read between pixels (RoiAlign without widening small regions).
_USUAL, _SAMPLING, _WIDE = (13, 8), (16, 8), (21, 10)
_SAMPLERS = ("GridSample", "RoiAlign")
_WIDE_TYPES = (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT16, TensorProto.UINT16)

# Reductions whose axes became an input at opset 18; those of ReduceSum did at 13.
_REDUCTIONS = tuple(
    f"Reduce{n}" for n in ["Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]
)


def versions(stored: Iterable[TensorProto], nodes: Iterable[NodeProto] = ()) -> tuple[int, int]:
    """Returns the opset and the IR version that a model with these initializers and nodes needs.

    Every QuantizeLinear has a zero point, whose type is that of its result.
    """
    if any(t.data_type in _WIDE_TYPES for t in stored):
        return _WIDE
    return _SAMPLING if any(n.op_type in _SAMPLERS for n in nodes) else _USUAL


def at_opset(nodes: list[NodeProto], opset: int) -> tuple[list[NodeProto], list[TensorProto]]:
    """Converts nodes of opset 13 to ``opset``; returns them and the initializers that they add."""
    if opset < 18:
        return nodes, []
    changed: list[NodeProto] = []
    added: dict[str, TensorProto] = {}
    for node in nodes:
        axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
        if node.op_type not in _REDUCTIONS or axes is None:
            changed.append(node)
            continue
        name = "const_axes_" + "_".join(str(axis) for axis in axes)
        added[name] = numpy_helper.from_array(np.array(axes, np.int64), name)
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "axes"}
        inputs = [node.input[0], name]
        changed.append(
            helper.make_node(node.op_type, inputs, list(node.output), name=node.name, **attributes)
        )
    return changed, list(added.values())
