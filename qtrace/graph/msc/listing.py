"""MSCGraph as text: the listing that ``print(graph)`` shows, and the prototxt for viewers.

Both have the form of MSC's own printers, the word ``CHILDERN`` included, so that their texts can be compared.
The arguments are the objects of `qtrace.graph.msc.document`, which asks for the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from qtrace.storage.ownership import WRITTEN

__all__ = ["graph_text", "node_text", "prim_text", "prototxt", "tensor_text"]

# MSC lists attributes in the order of a hash table: this is its order for a convolution. Others follow.
_ORDER = "out_dtype strides kernel_layout groups padding data_layout dilation out_layout"
_FIRST = {key: position for position, key in enumerate(_ORDER.split())}


def tensor_text(tensor: Any) -> str:
    """Returns ``x:0(x)<1,3,4,4|float32|NCHW>``, without an alias or a layout if there is none."""
    alias = f"({tensor.alias})" if tensor.alias else ""
    sizes = ",".join(map(str, tensor.shape))
    layout = f"|{tensor.layout}" if tensor.layout else ""
    return f"{tensor.name}{alias}<{sizes}{'|' if tensor.shape else ''}{tensor.dtype}{layout}>"


def node_text(node: Any) -> str:
    """Returns the paragraph of a node."""
    lines = [_head("N", node, node.shared_ref)]
    if node.inputs:
        lines.append(f"  IN: {','.join(map(tensor_text, node.inputs))}")
    lines += [f"  OUT: {','.join(map(tensor_text, node.outputs))}", f"  OPTYPE: {node.optype}"]
    if node.scope:
        lines.append(f"  SCOPE: {'.'.join(node.scope)}")
    if node.attrs:
        lines.append(f"  ATTRS: {_pairs(node.attrs.items())}")
    if node.weights:
        lines.append("  WEIGHTS: ")
        lines += [f"    {kind}: {tensor_text(tensor)}" for kind, tensor in node.weights.items()]
    return "\n".join(lines) + "\n"


def prim_text(prim: Any) -> str:
    """Returns the paragraph of a prim."""
    lines = [_head("P", prim, ""), f"  OPTYPE: {prim.optype}"]
    if prim.attrs:
        lines.append(f"  ATTRS: {_pairs(prim.attrs.items())}")
    return "\n".join(lines) + "\n"


def _head(letter: str, member: Any, shared_ref: str) -> str:
    shared = f"(M: {shared_ref})" if shared_ref else ""
    parents, children = (",".join(m.name for m in each) for each in (member.parents, member.children))
    return f"{letter}_{member.index} {member.name}{shared} <PARENTS: {parents}| CHILDERN: {children}>"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    ordered = sorted(pairs, key=lambda pair: _FIRST.get(pair[0], len(_FIRST)))
    return "".join(f"{key}={text} " for key, text in ordered)


def graph_text(graph: Any) -> str:
    """Returns the listing of a graph: its ends, its prims and its nodes."""
    inputs, outputs = ",".join(graph.inputs), ",".join(graph.outputs)
    paragraphs = [*map(prim_text, graph.prims), *map(node_text, graph.nodes)]
    return f"{graph.name} <INPUTS: {inputs}| OUTPUTS: {outputs}>\n" + "".join(f"{p}\n" for p in paragraphs)


def prototxt(graph: Any) -> str:
    """Writes the nodes as layers: viewers show bottoms and tops as edges, ``layer_param`` as a table."""
    lines = [f"# {WRITTEN}.", f"name: {_quoted(graph.name)}"]
    for node in graph.nodes:
        kind = node.optype.replace(".", "_")
        lines += ["layer {", f"  name: {_quoted(node.name)}", f"  type: {_quoted(kind)}"]
        lines.append(f"  top: {_quoted(node.name)}")
        lines += [f"  bottom: {_quoted(parent.name)}" for parent in node.parents]
        lines += ["  layer_param {", f"    idx: {node.index}"]
        rows = [(f"input_{i}", tensor_text(t)) for i, t in enumerate(node.inputs)]
        rows += [(f"output_{i}", tensor_text(t)) for i, t in enumerate(node.outputs)]
        rows += [(f"param_{key}", tensor_text(t)) for key, t in node.weights.items()]
        rows += list(node.attrs.items())
        lines += [f"    {key}: {_quoted(text)}" for key, text in rows]
        lines += ["  }", "}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)
