"""Cuts a graph at named tensors: what is needed for them stays, the rest of the file is left out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Sequence

import onnx

from qtrace.errors import ImportingError
from qtrace.importing.onnx.model import Graph, OnnxNode

__all__ = ["cut", "without_strings"]


def cut(graph: Graph, outputs: Sequence[str]) -> Graph:
    """Returns the part of a graph that computes some tensors, which are its outputs.

    Args:
        graph: the graph of a file.
        outputs: names of tensors in the file. Inputs that none of them needs are left out.

    Raises:
        ImportingError: when the list is empty, names a tensor twice, or one that the file does not have.
    """
    if not isinstance(outputs, (list, tuple)) or not outputs or not all(isinstance(n, str) for n in outputs):
        raise ImportingError(f"outputs={outputs!r} is no list of tensors: write outputs=['name'].")
    computed = {name for node in graph.nodes for name in node.outputs if name}
    known = computed | {value.name for value in graph.inputs} | set(graph.stored)
    for name in outputs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f"names like it are {', '.join(map(repr, near))}" if near else "see its names in a viewer"
            raise ImportingError(f"outputs: the file holds no tensor {name!r}; {hint}.")
    if len(set(outputs)) < len(outputs):
        raise ImportingError(f"outputs={list(outputs)} names a tensor twice.")
    needed = set(outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(_read_by(node))
    dtypes = dict(zip(graph.outputs, graph.output_dtypes, strict=True))
    return dataclasses.replace(
        graph,
        nodes=tuple(reversed(nodes)),
        inputs=tuple(value for value in graph.inputs if value.name in needed),
        outputs=tuple(outputs),
        output_dtypes=tuple(dtypes.get(name) for name in outputs),
    )


def without_strings(graph: Graph, strings: Collection[str]) -> Graph:
    """Returns a graph without nodes that read stored strings, as the names of classes after a classifier.

    Args:
        graph: the graph.
        strings: the initializers of its file that hold strings.

    Raises:
        ImportingError: when outputs need these nodes, with the tensors up to which the file can be read.
    """
    of_strings, last, first = set(strings), list[str](), ""
    results = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        read = _read_by(node)
        if of_strings.isdisjoint(read):
            continue
        first = first or min(read & of_strings)
        of_strings.update(filter(None, node.outputs))
        last += sorted(read - of_strings - set(graph.stored))
    lost = [name for name in graph.outputs if name in of_strings]
    if not lost:
        nodes = tuple(node for node in graph.nodes if of_strings.isdisjoint(_read_by(node)))
        return dataclasses.replace(graph, nodes=nodes)
    kept = [name for name in graph.outputs if name not in of_strings]
    # A ZipMap makes dictionaries of a tensor, which MegEngine lacks, too.
    kept = [results[n].inputs[0] if n in results and results[n].op == "ZipMap" else n for n in kept]
    names = list(dict.fromkeys([*kept, *last]))
    cure = f"read the file by from_onnx(outputs={names}) (--outputs), and make the strings of what that gives"
    raise ImportingError(
        f"{first or lost[0]!r} holds strings, which MegEngine lacks, and output {lost[0]!r} is made of "
        f"them: {cure if names else 'write the file without it'}."
    )


def _read_by(node: OnnxNode) -> set[str]:
    """Returns the tensors that a node reads, in the bodies of control flow, too."""
    return {name for name in (*node.inputs, *_read_in(node.proto)) if name}


def _read_in(proto: onnx.NodeProto) -> Iterable[str]:
    for attribute in proto.attribute:
        for body in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            yield from (value.name for value in body.output)
            for part in body.node:
                yield from part.input
                yield from _read_in(part)
