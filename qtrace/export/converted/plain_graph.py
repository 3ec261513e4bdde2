"""A plain traced module, read as exporters read a converted graph: float ops with the names of modules."""

from __future__ import annotations

import re
from collections import Counter

from megengine.module import Module

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.graph.flatten import flatten
from qtrace.graph.renewal import renew_all
from qtrace.graph.tracing.refusals import debugging_marks, native_quantization
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, module_path, owner
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.identity import graph_hash
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.biases import align_biases
from qtrace.preparation.passes.compose import write_pieces
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.fuse_bn import fuse_bn
from qtrace.preparation.passes.fuse_scale import fuse_scale
from qtrace.preparation.record import Record, is_quantized

__all__ = ["PlainGraph", "is_plain"]


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
