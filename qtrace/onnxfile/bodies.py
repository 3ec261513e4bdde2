"""The bodies of control flow nodes (If, Loop, Scan): which tensors of the graph around them they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, helper, numpy_helper

__all__ = [
    "MAX_NODES",
    "RANDOM_OPS",
    "bodies_of",
    "captured_names",
    "limit_loops",
    "limit_reached",
    "own_operators",
    "read_names",
    "rename_tensors",
]

RANDOM_OPS = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)
"""ONNX's ops whose results are drawn at random in each run."""

MAX_NODES = 50_000
"""The most nodes of a file, with those of a function at each of its calls, and the most runs of a loop."""

_LIMIT = "qtrace_limit_of_"
_OWN_DOMAINS = ("", "ai.onnx")
# The types of attributes that most nodes have, none of which is a graph.
_PLAIN = frozenset(
    AttributeProto.AttributeType.Value(name)
    for name in ("FLOAT", "INT", "STRING", "TENSOR", "FLOATS", "INTS", "STRINGS", "TENSORS")
)


def bodies_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yields the graphs in the attributes of a node."""
    for attribute in node.attribute:
        kind = attribute.type
        if kind in _PLAIN:
            continue
        if kind == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def own_operators(graph: GraphProto) -> Iterator[str]:
    """Yields the kinds of the nodes of a graph and of its bodies that are ONNX's own."""
    for node in graph.node:
        if node.domain in _OWN_DOMAINS:
            yield node.op_type
        for body in bodies_of(node):
            yield from own_operators(body)


def limit_loops(graph: GraphProto) -> None:
    """Lets each loop of a graph fail in its run number `MAX_NODES`, as values may let it run for ever."""
    for node in graph.node:
        for body in bodies_of(node):
            limit_loops(body)
            if (node.domain, node.op_type) != ("", "Loop"):
                continue
            base, number, going = f"{_LIMIT}{next(filter(None, node.output))}", body.input[0], body.output[0]
            most = numpy_helper.from_array(np.array(MAX_NODES, np.int64), f"{base}_most")
            one = numpy_helper.from_array(np.array([True]), f"{base}_one")
            body.initializer.extend([most, one])
            body.node.extend(
                [
                    helper.make_node("Div", [number.name, most.name], [f"{base}_place"]),
                    helper.make_node("Gather", [one.name, f"{base}_place"], [f"{base}_within"], name=base),
                    helper.make_node("And", [going.name, f"{base}_within"], [base]),
                ]
            )
            going.name = base


def limit_reached(error: Exception) -> str:
    """Says of an error of a runtime that it is the limit of `limit_loops`; "" for another error."""
    return f"a loop runs more than {MAX_NODES:,} times" if _LIMIT in str(error) else ""


def captured_names(node: NodeProto) -> list[str]:
    """Returns the tensors of the graph around ``node`` that its bodies read, each once and in order."""
    names = dict.fromkeys(name for body in bodies_of(node) for name in _free_names(body))
    return list(names)


def read_names(node: NodeProto) -> list[str]:
    """Returns the tensors that a node reads: its inputs, and what its bodies read around it."""
    return [name for name in node.input if name] + captured_names(node)


def rename_tensors(node: NodeProto, names: Mapping[str, str]) -> None:
    """Renames the inputs and outputs of a node, and what its bodies read around it.

    Args:
        node: the node, which is changed.
        names: old name -> new name; other tensors keep their names.
    """
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for body in bodies_of(node):
        own = _own_names(body)
        outer = {old: new for old, new in names.items() if old not in own}
        clashing = own & set(outer.values())
        if clashing:  # a tensor inside has the new name of one outside
            taken = own | set(outer.values()) | set(_all_names(body))
            _rename_own(body, {name: _free_name(name, taken) for name in sorted(clashing)})
        for part in body.node:
            rename_tensors(part, outer)
        for value in body.output:
            value.name = outer.get(value.name, value.name)


def _rename_own(body: GraphProto, names: Mapping[str, str]) -> None:
    for part in body.node:
        rename_tensors(part, names)
    for value in (*body.input, *body.output, *body.initializer, *body.value_info):
        value.name = names.get(value.name, value.name)


def _free_name(base: str, taken: set[str]) -> str:
    count, name = 0, base
    while name in taken:
        count += 1
        name = f"{base}_inner_{count}"
    taken.add(name)
    return name


def _own_names(body: GraphProto) -> set[str]:
    stored = {tensor.name for tensor in body.initializer}
    stored |= {tensor.values.name for tensor in body.sparse_initializer}
    results = {name for part in body.node for name in part.output if name}
    return stored | results | {value.name for value in body.input}


def _all_names(body: GraphProto) -> Iterator[str]:
    yield from _own_names(body)
    for part in body.node:
        yield from part.input
        for inner in bodies_of(part):
            yield from _all_names(inner)


def _free_names(body: GraphProto) -> Iterator[str]:
    own = _own_names(body)
    for part in body.node:
        yield from (name for name in read_names(part) if name not in own)
    yield from (value.name for value in body.output if value.name not in own)
