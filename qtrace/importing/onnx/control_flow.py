"""Nodes that are written out: ``If`` and ``Loop`` with constant conditions, sequences, function bodies.

The branch that is taken, or the loop written out, takes the place of the node. PyTorch's exporter writes
``chunk`` and ``split`` as sequences.

Many ops of ONNX have a function body: LayerNormalization, Attention, the losses. If qtrace lacks a lowering
of its own, it adds the nodes of the body instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megengine.functional as F
import numpy as np
import onnx

from qtrace.errors import ImportingError
from qtrace.importing.onnx.call import Call
from qtrace.importing.onnx.layers import GraphRunner, Layers, Refusal, Scope
from qtrace.importing.onnx.model import Computed, OnnxNode, Refused, SplitTensors, Stored, Value
from qtrace.onnxfile.model import MAX_NODES, bodies_of, rename_tensors

_MAX_WRITTEN = 20_000  # nodes of all loops that are written out: a longer one is kept, and runs faster so


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


@dataclass(frozen=True)
class Expansion:
    """The body of an op for one of its nodes.

    Attributes:
        graph: the nodes, whose values are named after the first output of the node.
        opsets: the versions of the domains that the body means.
        inputs: name of a parameter in ``graph`` -> the index of the node's input.
        outputs: the names in ``graph`` of the node's outputs.
    """

    graph: onnx.GraphProto
    opsets: Mapping[str, int]
    inputs: Mapping[str, int]
    outputs: tuple[str, ...]


def expand(
    node: OnnxNode, types: Sequence[tuple[np.dtype[Any], Sequence[int]] | None], opset: int
) -> Expansion | None:
    """Returns the body of a node's op; None if ONNX defines none.

    Args:
        node: the node.
        types: dtype and shape of each input; None for one that is left out.
        opset: the opset that the model imports.
    """
    body = _body(node, types, opset)
    if body is None:
        return None
    prefix = next(name for name in node.outputs if name)
    present = {f"{prefix}/{formal}": i for i, formal in enumerate(body.input) if i < len(types) and types[i]}
    names = {formal: f"{prefix}/{formal}" for formal in body.input if f"{prefix}/{formal}" in present}
    names.update({formal: "" for formal in body.input if formal not in names})
    for part in body.node:
        for output in part.output:
            if output:
                names[output] = f"{prefix}/{output}"
    # The results keep the names that the file gives them.
    names.update({f: name for f, name in zip(body.output, node.outputs, strict=False) if name})
    graph = onnx.GraphProto()
    schema: Any = onnx.defs.get_schema(node.op, node.version, node.domain)
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type}
    defaults.update({attribute.name: attribute for attribute in body.attribute_proto})
    attributes = {**defaults, **{attribute.name: attribute for attribute in node.proto.attribute}}
    for part in body.node:
        graph.node.append(_renamed(part, names, attributes))
    opsets = {("" if i.domain == "ai.onnx" else i.domain): i.version for i in body.opset_import}
    pairs = zip(body.output, node.outputs, strict=False)
    outputs = tuple(names.get(formal, "") if name else "" for formal, name in pairs)
    return Expansion(graph, opsets, present, outputs)


def titled_parts(node: OnnxNode, parts: Sequence[OnnxNode]) -> list[OnnxNode]:
    """Returns the nodes of a body with the title of the node that it stands for, if that has one."""
    if not node.title:
        return list(parts)
    whole = set(node.outputs)
    return [
        replace(part, title=node.title if whole & {*part.outputs} else f"{node.title}.{part.op.lower()}")
        for part in parts
    ]


def _body(
    node: OnnxNode, types: Sequence[tuple[np.dtype[Any], Sequence[int]] | None], opset: int
) -> onnx.FunctionProto | None:
    schema: Any = onnx.defs.get_schema(node.op, node.version, node.domain)
    body = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        kinds = [_type(kind) for kind in types]
        try:
            text = schema.get_context_dependent_function_with_opset_version(
                _registered(schema.context_dependent_function_opset_versions, opset),
                node.proto.SerializeToString(),
                kinds,
            )
        except (RuntimeError, ValueError):  # ONNX builds no body for these types
            return None
        if not text:
            return None
        body.ParseFromString(text)
        return body
    if schema.has_function:
        version = _registered(schema.function_opset_versions, opset)
        body.ParseFromString(schema.get_function_with_opset_version(version))
        return body
    return None


def _registered(versions: Sequence[int], opset: int) -> int:
    """Returns the newest of the opsets for which a body is written that is not newer than ``opset``."""
    return max((v for v in versions if v <= opset), default=min(versions))


def _type(kind: tuple[np.dtype[Any], Sequence[int]] | None) -> bytes:
    if kind is None:
        return onnx.TypeProto().SerializeToString()
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind[0]))
    return onnx.helper.make_tensor_type_proto(element, list(kind[1])).SerializeToString()


def _renamed(
    part: onnx.NodeProto, names: Mapping[str, str], attributes: Mapping[str, onnx.AttributeProto]
) -> onnx.NodeProto:
    """Copies a node of a body with the names and attributes of the call."""
    result = onnx.NodeProto()
    result.CopyFrom(part)
    rename_tensors(result, names)
    _bind(result, attributes)
    return result


def _bind(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> None:
    """Gives a node, and the nodes of its bodies, the attributes of the call that they name."""
    node.name = ""
    for attribute in list(node.attribute):
        bound, name = attributes.get(attribute.ref_attr_name), attribute.name
        if bound is not None:
            attribute.CopyFrom(bound)
            attribute.name = name
        elif attribute.ref_attr_name:  # an optional attribute that the call leaves out
            node.attribute.remove(attribute)
    for body in bodies_of(node):
        for part in body.node:
            _bind(part, attributes)
