"""By how much an ONNX file is larger than the one that it was made of, and through which tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from qtrace.display import format_bytes
from qtrace.onnxfile.external_data import count_bytes
from qtrace.onnxfile.reading import read_model

__all__ = ["describe_growth"]


def describe_growth(path: Path, source: Path) -> str:
    """Says that a file is larger than its source, by how much, and through which tensors; "" if it is not.

    Args:
        path: the file.
        source: the file that it was made of.
    """
    graphs = [read_model(file).graph for file in (path, source)]
    sizes = [_count_all(*pair) for pair in zip((path, source), graphs, strict=True)]
    if sizes[0] <= sizes[1]:
        return ""
    known = defaultdict[int, list[int]](list)
    for tensor in _tensors(graphs[1]):
        known[math.prod(tensor.dims)].append(count_bytes(tensor))
    grown = []
    for tensor in graphs[0].initializer:
        equal = known[math.prod(tensor.dims)]
        grown.append((count_bytes(tensor) - (equal.pop() if equal else 0), tensor.name))
    grown = sorted((pair for pair in grown if pair[0] > 0), reverse=True)
    shown = ", ".join(f"{name} (+{format_bytes(more)})" for more, name in grown[:3]) or "its nodes"
    own, before = map(format_bytes, sizes)
    return f"size: {own}, {sizes[0] / sizes[1]:.2f} times the {before} of {source.name}, through {shown}"


def _count_all(path: Path, graph: Any) -> int:
    """Returns the bytes of a file and of the tensors that it keeps in others."""
    return path.stat().st_size + sum(count_bytes(t) for t in graph.initializer if t.data_location)


def _tensors(graph: Any) -> list[Any]:
    """Returns the stored tensors of a graph; some files have them as nodes."""
    constants = (a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute)
    return [*graph.initializer, *(tensor for tensor in constants if tensor.data_type)]
