"""Names and places of nodes that PyTorch's exporters keep: the path of the module, and the line of its code.

The exporter of `torch.export` writes them as metadata of each node, the older one as the node's name, in
which the name of a list stands twice: ``/layer4/layer4.1/conv1/Conv``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict

import onnx

from qtrace.importing.onnx.model import Graph, OnnxNode

__all__ = ["name_by_scopes", "source_line", "undoubled"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\w+)')
_MAX_TEXT = 4000  # characters of one name or trace; more is not of an exporter
_COUNTER = re.compile(r"_\d+$")


def name_by_scopes(graph: Graph) -> Graph:
    """Returns the graph whose nodes are titled by the path of their module in the source.

    A module that calls one op gives its own path, ``layer1.0.conv1``. One that calls several gives the path
    and the op, ``layer1.0.add``.

    Args:
        graph: the graph; nodes without such a path get no title.
    """
    scopes = [_scope(node) for node in graph.nodes]
    calls: dict[str, set[str]] = defaultdict(set)
    last: dict[tuple[str, str], int] = {}
    for index, scope in enumerate(scopes):
        if scope is not None:
            calls[scope[0]].add(scope[1])
            last[scope] = index
    nodes = []
    for index, (node, scope) in enumerate(zip(graph.nodes, scopes, strict=True)):
        if scope is not None:
            path, call = scope
            kind = _COUNTER.sub("", call).strip("_") or node.op.lower()
            title = path if path and len(calls[path]) == 1 else f"{path}.{kind}" if path else kind
            if last[scope] != index:  # a part of what the source calls
                title = f"{title}.{node.op.lower()}"
            node = dataclasses.replace(node, title=title)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def source_line(proto: onnx.NodeProto) -> str:
    """Returns ``FILE:LINE`` of the call in the source; "" if the file does not say it.

    Frames of torch's own modules are left out, unless there are no others.
    """
    text = next((item.value for item in proto.metadata_props if item.key == _STACK), "")
    frames = _FRAME.findall(text[-_MAX_TEXT:])
    own = [frame for frame in frames if "/torch/nn/" not in frame[0].replace("\\", "/")] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def undoubled(name: str) -> str:
    """Returns a name of the older exporter, in which each list stands once: ``/layer4.1/conv1/Conv``."""
    parts = name.split("/")
    kept = [
        part
        for part, following in zip(parts, [*parts[1:], ""], strict=True)
        if not part or not following.startswith(f"{part}.")
    ]
    return "/".join(kept)


def _scope(node: OnnxNode) -> tuple[str, str] | None:
    """Returns the path of the module that calls the op, and the name of the call."""
    text = next((item.value for item in node.proto.metadata_props if item.key == _SCOPES), "")
    if text and len(text) <= _MAX_TEXT:
        try:
            scopes = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if isinstance(scopes, list) and len(scopes) > 1 and all(isinstance(s, str) for s in scopes):
            return scopes[-2], scopes[-1]
        return None
    if node.proto.name.startswith("/") and "/" in node.proto.name[1:] and not node.domain:
        path, _, call = undoubled(node.proto.name).rpartition("/")
        return path.strip("/").replace("/", "."), call
    return None
