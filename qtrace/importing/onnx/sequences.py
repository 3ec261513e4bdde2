"""Sequences that are split and picked from at once: PyTorch's exporter writes ``chunk`` and ``split`` so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx

from qtrace.importing.onnx.call import Call
from qtrace.importing.onnx.layers import Layers, Refusal
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.values import SplitTensors, Stored, Value

__all__ = ["SEQUENCE_OPS", "lower_sequence"]

SEQUENCE_OPS = {"SplitToSequence", "SequenceAt"}

Lower = Callable[[OnnxNode, Sequence[Value | None]], Sequence[Value]]


def lower_sequence(
    node: OnnxNode, values: Sequence[Value | None], layers: Layers, lower: Lower
) -> Sequence[Value]:
    """Returns what a node of `SEQUENCE_OPS` gives.

    Args:
        node: the node.
        values: its inputs.
        layers: the layers of the graph.
        lower: lowers the Split that stands for a SplitToSequence.

    Raises:
        Refusal: when the places are not stored, or the tensor is split along an open axis.
    """
    call = Call(node, [Stored(np.zeros(1), "") if isinstance(v, SplitTensors) else v for v in values], layers)
    if node.op == "SequenceAt":
        pieces, place = values[0], int(call.scalar(1))
        if not isinstance(pieces, SplitTensors) or not -len(pieces.values) <= place < len(pieces.values):
            raise Refusal("reads a sequence that no SplitToSequence gives, or a place that it does not have")
        return [pieces.values[place]]
    if not call.attribute("keepdims", 1):
        raise Refusal("drops the axis along which it splits (keepdims)")
    axis = call.axis(call.attribute("axis", 0), call.rank(0))
    call.refuse_open(0, [axis], "splits an input")
    total = call.shape(0)[axis]
    sizes = call.array(1, np.array(1))
    step = int(sizes.reshape(-1)[0])
    if sizes.ndim == 0 and step < 1:
        raise Refusal(f"splits into parts of {step}")
    parts = [min(step, total - n) for n in range(0, total, step)] if sizes.ndim == 0 else sizes.tolist()
    if len(parts) == 1:
        return [SplitTensors((values[0],))] if values[0] is not None else [SplitTensors(())]
    names = tuple(f"{node.outputs[0]}_{index}" for index in range(len(parts)))
    split = dataclasses.replace(
        node,
        op="Split",
        inputs=(node.inputs[0], f"{node.outputs[0]}_sizes"),
        outputs=names,
        attributes={"axis": axis},
        version=13,
        proto=onnx.helper.make_node("Split", [node.inputs[0], f"{node.outputs[0]}_sizes"], names, axis=axis),
    )
    stored = Stored(np.array(parts, np.int64), split.inputs[1])
    return [SplitTensors(tuple(lower(split, [values[0], stored])))]
