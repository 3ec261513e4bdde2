"""``If`` and ``Loop`` whose conditions are constants, and sequences that are split and picked from at once.

The branch that is taken, or the loop written out, takes the place of the node. PyTorch's exporter writes
``chunk`` and ``split`` as sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import megengine.functional as F
import numpy as np
import onnx

from qtrace.errors import ImportingError
from qtrace.importing.onnx.call import Call
from qtrace.importing.onnx.layers import Layers, Refusal
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.scope import GraphRunner, Scope
from qtrace.importing.onnx.values import Computed, Refused, SplitTensors, Stored, Value
from qtrace.onnxfile.model import MAX_NODES

__all__ = ["HANDLERS", "SEQUENCE_OPS", "lower_sequence"]

_MAX_WRITTEN = 20_000  # nodes of all loops that are written out


def _branch(runner: GraphRunner, node: OnnxNode, values: Sequence[Value | None], scope: Scope) -> list[Value]:
    condition = _constant(values[0], "branches on a value that depends on the input")
    body = runner.subgraph(node.attributes["then_branch" if bool(condition) else "else_branch"])
    return runner.run(body, scope.inner({}))


def _loop(runner: GraphRunner, node: OnnxNode, values: Sequence[Value | None], scope: Scope) -> list[Value]:
    count, condition, *carried = values
    trips = None if count is None else int(_constant(count, "runs as often as a value says"))
    going = condition is None or bool(_constant(condition, "runs while a value says so"))
    body = runner.subgraph(node.attributes["body"])
    if len(body.inputs) != len(values) or not len(body.outputs) - 1 == len(node.outputs) >= len(carried):
        raise Refusal("has other numbers of inputs or outputs than its body")
    collected: list[list[Value]] = [[] for _ in body.outputs[1 + len(carried) :]]
    iteration = 0
    state: list[Value] = [value for value in carried if value is not None]
    while going and (trips is None or iteration < trips):
        runner.written += 1 + len(body.nodes)
        if runner.written > _MAX_WRITTEN:
            raise _too_long(node, trips, 1 + len(body.nodes), scope)
        counters = [Stored(np.array(iteration, np.int64), ""), Stored(np.array(True), "")]
        names = [value.name for value in body.inputs]
        results = runner.run(body, scope.inner(dict(zip(names, [*counters, *state], strict=True))))
        if any(isinstance(result, Refused) for result in results):
            return [Refused() for _ in node.outputs]
        going = bool(_constant(results[0], "runs while a value says so"))
        state = results[1 : 1 + len(carried)]
        for items, result in zip(collected, results[1 + len(carried) :], strict=True):
            items.append(result)
        iteration += 1
    outputs = zip(collected, node.outputs[len(carried) :], strict=True)
    return [*state, *(_stacked(runner, items, name) for items, name in outputs)]


def _too_long(node: OnnxNode, trips: int | None, nodes: int, scope: Scope) -> Exception:
    """Returns a `Refusal` of a loop that a runtime can run; else an error, since the file may never end."""
    if scope.outer is None and trips is not None and trips * nodes <= MAX_NODES:
        return Refusal(f"runs {trips:,} times")
    return ImportingError(f"{node.label}: its loops run more than {MAX_NODES:,} nodes: shorten or cut them.")


def _stacked(runner: GraphRunner, items: Sequence[Value], name: str) -> Value:
    if not items:
        raise Refusal("never runs, but gives results of its iterations")
    if all(isinstance(item, Stored) for item in items):
        return Stored(np.stack([item.array for item in items if isinstance(item, Stored)]), name)
    nodes: list[Any] = []
    for item in items:
        if not isinstance(item, (Computed, Stored)):
            raise Refusal("collects sizes that depend on an open axis")
        nodes.append(item.node if isinstance(item, Computed) else runner.layers.tensor(item))
    dtype = next(item.dtype for item in items if isinstance(item, Computed))
    return Computed(runner.builder.call_function(F.stack, nodes, axis=0, name=name), dtype)


def _constant(value: Value | None, reason: str) -> Any:
    if not isinstance(value, Stored) or value.array.size != 1:
        raise Refusal(f"{reason}: a traced graph cannot branch")
    return value.array.reshape(()).item()


Handler = Callable[[GraphRunner, OnnxNode, Sequence["Value | None"], Scope], "list[Value]"]
HANDLERS: dict[str, Handler] = {"If": _branch, "Loop": _loop}


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
