"""A plain traced module in float, for MegEngine without qtrace: its nodes carry the quantization parameters.

``megengine.load`` reads the file in a process without qtrace. It holds no fake quants: it computes the
float network with the converted graph's weights. Each node that is rounded has ``qparams``, MegEngine's own
``QParams``: mode, dtype, scale and zero point, of shape ``()`` or ``(channels,)``. Activations, weights,
biases (``qint32``) and the nodes that carry integers through moves have them.

Its usual suffix is ``.mge``, like the suffix of ``qtrace.save``, so this format has to be named:
``format="traced"``.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from megengine import Tensor

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, float_module
from qtrace.export.format import Format
from qtrace.graph import recurrent
from qtrace.graph.edit import GraphEditor
from qtrace.graph.files.serialize import dump, sealing
from qtrace.graph.function_rule import trace_function
from qtrace.graph.types import CallFunction, Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.ops.arguments import arguments
from qtrace.preparation.model import remove_record


def files(converted: ConvertedGraph, path: Path) -> dict[Path, bytes]:
    """Returns the file.

    Args:
        converted: the graph of a converted module.
        path: the path of the file.

    Raises:
        ExportError: when the graph holds a module or a function that only qtrace has.
    """
    plain = float_module(converted)
    remove_record(plain)
    write_functions(plain)
    stream = io.BytesIO()
    with sealing(stream) as body:
        dump(plain, body)
    return {path: stream.getvalue()}


# Chosen by name: .mge stands for a model that qtrace.save wrote.
FORMAT = Format("traced", files, runs_graph=True, float_types=())


def write_functions(flat: TracedModule) -> None:
    """Replaces the calls of qtrace's own functions by the calls of MegEngine's functions that they make.

    Args:
        flat: a flat traced module; it is edited in place.
    """
    with GraphEditor(flat) as editor:
        for expr in exprs(flat):
            if isinstance(expr, CallFunction) and expr.func.__module__ == recurrent.__name__:
                _write_layer(editor, expr)
            elif isinstance(expr, CallFunction) and expr.func.__module__.partition(".")[0] == "qtrace":
                written = _written(editor, expr)
                written.qparams = expr.outputs[0].qparams
                editor.replace_expr(expr, written)


def _written(editor: GraphEditor, expr: Expr) -> TensorNode:
    """Writes the calls that the function of ``expr`` makes after it; returns the node of the result."""
    values = list(arguments(expr).values())
    examples = [_zeros(v) if isinstance(v, TensorNode) else v for v in values]
    # The tracer sees a function of qtrace under its name only: called as an object, it shows its own calls.
    trace = trace_function(expr.func, examples, expr.func.__name__)
    nodes = {node: values[index] for index, node in trace.inputs.items()}
    after = expr
    for call in trace.exprs:
        copies = editor.copy_expr(call, [nodes[n] for n in call.inputs], after=after)
        nodes.update(zip(call.outputs, copies, strict=True))
        after = copies[0].expr
    return nodes[trace.outputs[0]]


def _write_layer(editor: GraphEditor, expr: CallFunction) -> None:
    """Calls the layer of MegEngine's again whose function `expr` is.

    Raises:
        ExportError: for a layer of an imported graph, whose function only qtrace has.
    """
    a = arguments(expr)
    weights = a.get("weights")
    if weights is None or not isinstance(weights.expr, GetAttr):
        raise ExportError(
            f"{expr.outputs[0].name}: {expr.func.__name__} is a function that MegEngine lacks: export the "
            "network in format onnx."
        )
    path = str(weights.expr.name).rpartition(".")[0]
    states = [a[name] for name in ("hidden", "cell") if a.get(name) is not None]
    hx = () if not states else (states[0],) if "cell" not in a else (tuple(states),)
    y, last = editor.call_module(path, a["x"], *hx, after=expr)
    for new, old in zip((y, *(last if isinstance(last, tuple) else (last,))), expr.outputs, strict=True):
        new.qparams = old.qparams
        editor.put_in_place(new, old)
    editor.remove(expr)


def _zeros(node: TensorNode) -> Tensor:
    return Tensor(np.zeros(tuple(int(n) for n in node.shape), np.dtype(node.dtype)))
