"""``If`` and ``Loop`` whose conditions are constants: the branch that is taken, the loop written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.errors import ImportingError
from qtrace.importing.onnx.layers import Refusal
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.reading import MAX_NODES
from qtrace.importing.onnx.scope import GraphRunner, Scope
from qtrace.importing.onnx.values import Computed, Refused, Stored, Value

__all__ = ["HANDLERS"]

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
