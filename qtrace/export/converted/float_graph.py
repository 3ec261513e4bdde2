"""The float model of a prepared or converted graph.

Formats with a separate file of quantization parameters write this model; calibration may run it elsewhere.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from megengine import Parameter

from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.plain_graph import PlainGraph
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import LAYERS, BnFold, BnFoldCall
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import flatten
from qtrace.graph.module_tree import set_parameter
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.record import Record, write_record

__all__ = ["bare_graph", "float_graph", "float_module"]


def bare_graph(prepared: TracedModule) -> ConvertedGraph:
    """Copies a prepared graph without fake quants, in float; the nodes keep their names.

    A layer whose BatchNorm is kept in training becomes a layer and a BatchNorm, as before `insert`.

    Args:
        prepared: a module made by ``qtrace.prepare``; it is not changed.

    Returns:
        A flat graph that counts as converted, with no sites.
    """
    model = QuantizedModel(prepared, "prepared")
    flat = flatten(prepared)
    with GraphEditor(flat, renews_record=True) as editor:
        _drop_fake_quants(editor)
        for expr in exprs(flat):
            module = owner(expr)
            if isinstance(module, BnFold):
                call, like = BnFoldCall(*expr.args), expr.outputs[0]
                nodes = (call.x, call.weight, call.bias)
                layer = editor.call_function(
                    LAYERS[module.kind], *nodes, after=expr, like=like, **module.options
                )
                new = editor.call_module(call.norm.expr.name, layer, after=layer.expr, like=like)
                editor.replace_expr(expr, new)
    return _without_sites(flat, model.record)


def float_graph(graph: ConvertedGraph) -> ConvertedGraph:
    """Copies a converted graph without fake quants; the nodes keep their names.

    A weight whose scheme leaves out the lowest integer is clipped to that range: files say only the number of
    bits, and their readers would use the lowest integer.

    Args:
        graph: the converted graph; it is not changed. A plain graph is returned as it is.

    Returns:
        A flat graph that counts as converted, with no sites.
    """
    if isinstance(graph, PlainGraph):
        return graph
    flat = float_module(graph)
    paths = {e.outputs[0].name: e.name for e in exprs(flat) if isinstance(e, GetAttr)}
    for site in graph.sites:
        path = paths.get(site.node.name, "")
        if site.sort == "weight" and path and site.qparams.scheme.narrow:
            clipped = _clipped(get_module(flat, path).numpy(), site.fake_quant)
            set_parameter(flat, path, Parameter(clipped))
    return _without_sites(flat, graph.model.record)


def float_module(graph: ConvertedGraph) -> TracedModule:
    """Copies the module of a converted graph without its fake quants; the nodes keep their names."""
    flat = flatten(graph.module)
    with GraphEditor(flat, renews_record=True) as editor:
        _drop_fake_quants(editor)
    return flat


def _drop_fake_quants(editor: GraphEditor) -> None:
    for expr in exprs(editor.traced):
        if isinstance(owner(expr), (FakeQuant, BiasQuant, DynamicQuant)):
            editor.replace_uses(expr.outputs[0], expr.args[1])
            editor.remove(expr)


def _without_sites(flat: TracedModule, record: Record) -> ConvertedGraph:
    """Writes the record of a converted graph without sites into ``flat``, and reads the graph."""
    annotation = dataclasses.replace(record.annotation, notes=(), sites=(), carried={}, factors={}, folds=())
    record = dataclasses.replace(record, stage="converted", annotation=annotation)
    write_record(flat, record)
    return ConvertedGraph(QuantizedModel(flat, record=record))


def _clipped(value: np.ndarray, fake_quant: FakeQuant) -> np.ndarray:
    scale, zero = fake_quant.grid_of(value.shape)
    low, high = ((end - zero) * scale for end in (fake_quant.scheme.qmin, fake_quant.scheme.qmax))
    return np.clip(value, low, high).astype(np.float32)
