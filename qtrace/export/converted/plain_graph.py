"""A plain traced module, read as exporters read a converted graph: float ops with the names of modules.

The float model of a prepared or converted graph.

Formats with a separate file of quantization parameters write this model; calibration may run it elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
from megengine import Parameter
from megengine.module import Module

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import LAYERS, BnFold, BnFoldCall
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import flatten, set_parameter
from qtrace.graph.renewal import renew_all
from qtrace.graph.tracing.hazards import debugging_marks, native_quantization
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, module_path, owner
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.model import QuantizedModel, Record, graph_hash, is_quantized, write_record
from qtrace.preparation.passes.compose import write_pieces
from qtrace.preparation.passes.expand import align_biases, expand
from qtrace.preparation.passes.folding import fuse_bn, fuse_scale

__all__ = ["PlainGraph", "bare_graph", "float_graph", "float_module", "is_plain"]


def is_plain(module: Module) -> bool:
    """Returns whether ``module`` is a traced module that was not prepared or converted."""
    return isinstance(module, TracedModule) and not is_quantized(module)


class PlainGraph(ConvertedGraph):
    """A plain traced module without sites: a flat copy, in which layers are functions of their parameters.

    Args:
        traced: a traced module that was not prepared; it is not changed.
        pieces: whether composites such as attention are written as their pieces.
        folded: whether a BatchNorm, or a stored scale and shift, becomes part of the layer before it, as for
            runtimes that do not fold them when they load a file.

    Attributes:
        scopes: expr -> the path of the module that it calls, or in whose ``forward`` it was recorded. It
            ends in the number of the call from the second call of a module on: ``stage.conv_1``.

    Raises:
        ExportError: when MegEngine's own quantization changed the module, or its outputs were moved.
    """

    def __init__(self, traced: TracedModule, pieces: bool = False, folded: bool = False) -> None:
        problem = debugging_marks(traced) or native_quantization(traced)
        if problem:
            raise ExportError(f"the model cannot be exported: {problem}")
        flat = flatten(traced)
        renew_all(flat)  # a user may have changed a layer
        called = _called_scopes(flat)
        expand(flat)
        if pieces:
            write_pieces(flat)
        align_biases(flat)
        self._unfolded = graph_hash(flat) if folded else ""
        if folded:
            fuse_scale(flat, fuse_bn(flat).norms)
        record = Record("converted", Annotation("", (), ()), {}, ())
        super().__init__(QuantizedModel(flat, record=record))
        self.scopes = _expanded_scopes(flat, called)
        tensors = [(name, tensor) for name, tensor in flat.named_tensors()]
        self._keys = {id(tensor): name for name, tensor in reversed(tensors)}

    @property
    def hash(self) -> str:
        """The hash of the graph before anything was folded."""
        return self._unfolded or super().hash

    def parameter_key(self, source: Node | str) -> str | None:
        """Returns the key of a parameter or buffer in the module's ``state_dict``.

        Args:
            source: the node that reads the parameter, or a path of the parameter.

        Returns:
            The key; None for a node of another kind.
        """
        if isinstance(source, Node):
            if not isinstance(source.expr, GetAttr) or not isinstance(source, TensorNode):
                return None
            source = source.expr.name
        return self._keys.get(id(get_module(self.module, source)), source)


def _called_scopes(flat: TracedModule) -> dict[str, str]:
    """Maps the name of each output of a flat graph to the scope of its expr, before layers are expanded."""
    used = {name for name, _ in flat.named_modules()}
    calls: Counter[str] = Counter()
    scopes: dict[str, str] = {}
    for expr in exprs(flat):
        path = module_path(expr)
        if owner(expr) is not None:
            attribute = expr.inputs[0].expr
            path = attribute.name if isinstance(attribute, GetAttr) else path
            calls[path] += 1
            if calls[path] > 1:
                path = _numbered(path, calls[path] - 1, used)
        scopes.update((node.name, path) for node in expr.outputs)
    return scopes


def _numbered(path: str, number: int, used: set[str]) -> str:
    """Returns ``path`` with the number of a call; never the path of another module."""
    scope = f"{path}_{number}"
    while scope in used:
        number += 1
        scope = f"{path}_{number}"
    return scope


def _expanded_scopes(flat: TracedModule, called: dict[str, str]) -> dict[Expr, str]:
    """Maps each expr of an expanded graph to its scope.

    The last expr of an expanded module has the name of the module's output. The exprs before it get the scope
    of that module, or of the part of it whose parameters they read: ``block.conv`` of the fused ``block``.
    """
    scopes: dict[Expr, str] = {}
    scope = ""
    for expr in reversed(exprs(flat)):
        scope = called.get(expr.outputs[0].name, scope) if expr.outputs else scope
        scopes[expr] = _part(expr, scope)
    return scopes


def _part(expr: Expr, scope: str) -> str:
    """Returns the scope of the part of a fused module whose parameters ``expr`` reads, else ``scope``."""
    call = ops.read(expr)
    if call is not None and call.kind == "batch_norm" and owner(expr) is not None:
        path = module_path(expr)
    elif call is not None and call.weight is not None and isinstance(call.weight.expr, GetAttr):
        path = call.weight.expr.name.rpartition(".")[0]
    else:
        return scope
    parent, _, name = path.rpartition(".")
    if re.fullmatch(rf"{re.escape(parent)}(_\d+)?", scope):
        return f"{scope}.{name}" if scope else name
    return scope


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
