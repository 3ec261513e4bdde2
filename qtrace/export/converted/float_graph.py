"""The float model behind a prepared or converted graph.

Formats that keep quantization parameters in another file write it, and calibration may run it elsewhere.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from megengine import Parameter

from qtrace.export.converted.graph import ConvertedGraph
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import LAYERS, BnFold
from qtrace.graph.edit import GraphEditor, set_parameter
from qtrace.graph.flatten import flatten
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.preparation.record import Record, read_record, write_record

__all__ = ["bare_graph", "float_graph"]


def bare_graph(prepared: TracedModule) -> TracedModule:
    """A copy of a prepared graph without fake quants, in float; its nodes have the names of the prepared's.

    A layer whose BatchNorm is kept in training is a layer and a BatchNorm in it, as before `insert`.

    Args:
        prepared: a module made by ``qtrace.prepare``; it is not changed.

    Returns:
        A flat graph that counts as converted, with no sites.
    """
    record = read_record(prepared, "prepared")
    flat = flatten(prepared)
    with GraphEditor(flat) as editor:
        _drop_fake_quants(editor)
        for expr in exprs(flat):
            module = owner(expr)
            if isinstance(module, BnFold):
                _, x, weight, bias, norm, *_ = expr.args
                like = expr.outputs[0]
                layer = editor.call_function(
                    LAYERS[module.kind], x, weight, bias, after=expr, like=like, **module.options
                )
                new = editor.call_module(norm.expr.name, layer, after=layer.expr, like=like)
                editor.replace_expr(expr, new)
    _forget_sites(flat, record)
    return flat


def float_graph(converted: TracedModule) -> TracedModule:
    """A copy without fake quants; its nodes have the names of the converted graph's.

    A weight whose scheme leaves out the lowest integer is clipped to that range: files say how many bits it
    has, and their readers would use that integer.

    Args:
        converted: a module made by ``qtrace.convert``; it is not changed.

    Returns:
        A flat graph that counts as converted, with no sites.
    """
    graph = ConvertedGraph(converted)
    flat = flatten(converted)
    with GraphEditor(flat) as editor:
        _drop_fake_quants(editor)
    paths = {e.outputs[0].name: e.name for e in exprs(flat) if isinstance(e, GetAttr)}
    for site in graph.sites:
        path = paths.get(site.node.name, "")
        if site.sort == "weight" and path and site.qparams.scheme.narrow:
            clipped = _clipped(get_module(flat, path).numpy(), site.fake_quant)
            set_parameter(flat, path, Parameter(clipped))
    _forget_sites(flat, graph.record)
    return flat


def _drop_fake_quants(editor: GraphEditor) -> None:
    for expr in exprs(editor.traced):
        if isinstance(owner(expr), (FakeQuant, BiasQuant)):
            editor.replace_uses(expr.outputs[0], expr.args[1])
            editor.remove(expr)


def _forget_sites(flat: TracedModule, record: Record) -> None:
    annotation = dataclasses.replace(record.annotation, sites=(), carried={}, factors={}, folds=())
    write_record(flat, dataclasses.replace(record, stage="converted", annotation=annotation))


def _clipped(value: np.ndarray, fake_quant: FakeQuant) -> np.ndarray:
    scale, zero = fake_quant.effective_scale().numpy(), fake_quant.zero_point.numpy()
    low, high = ((end - zero) * scale for end in (fake_quant.scheme.qmin, fake_quant.scheme.qmax))
    return np.clip(value, low, high).astype(np.float32)
