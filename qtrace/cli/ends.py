"""The inputs and outputs of a model, as `trace`, `import` and `export` show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtrace.cli.console import Console

__all__ = ["note_ends"]


def note_ends(model: Any, path: Path, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Notes name, type and shape of each input and output.

    Args:
        model: a traced module, of any stage.
        path: the file that was written; the names and types of an ONNX file are read from it.
        console: prints the note.

    Returns:
        The inputs and outputs as plain data; a free axis is the text that names it.
    """
    ends = _of_onnx(path) if path.suffix.lower() == ".onnx" else _of_graph(model)
    for kind, tensors in ends.items():
        shown = ", ".join(f"{t['name']} {t['dtype']} {'x'.join(map(str, t['shape']))}" for t in tensors)
        console.note(f"{kind}: {shown}")
    return ends


def _of_onnx(path: Path) -> dict[str, list[dict[str, Any]]]:
    import onnx

    from qtrace.onnxfile.reading import read_model

    graph = read_model(path).graph
    ends: dict[str, list[dict[str, Any]]] = {}
    for kind, infos in (("inputs", graph.input), ("outputs", graph.output)):
        ends[kind] = [
            {
                "name": info.name,
                "dtype": onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name,
                "shape": [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim],
            }
            for info in infos
        ]
    return ends


def _of_graph(model: Any) -> dict[str, list[dict[str, Any]]]:
    import numpy as np

    from qtrace.graph.types import TensorNode

    graph = model.graph
    return {
        kind: [
            {"name": n.name, "dtype": np.dtype(n.dtype).name, "shape": list(n.shape or ())}
            for n in nodes
            if isinstance(n, TensorNode)
        ]
        for kind, nodes in (("inputs", graph.inputs[1:]), ("outputs", graph.outputs))
    }
