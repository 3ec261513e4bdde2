"""Convert: freezes a calibrated graph and records the quantization parameters on its nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.core.tensor.dtype import QuantDtypeMeta, _builtin_quant_dtypes
from megengine.quantization.utils import QParams as NodeQParams
from megengine.quantization.utils import QuantMode, create_qparams

from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.graph.flatten import flatten
from qtrace.graph.types import GetAttr, ModuleNode, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.passes.insert import CONTAINER
from qtrace.prepared import bias_quants, fake_quants, read_record, write_record
from qtrace.scheme import QScheme

__all__ = ["convert", "dtype_meta"]


def convert(prepared: TracedModule) -> TracedModule:
    """Returns a frozen copy of a calibrated module, ready to export.

    It has no observers and no learned ranges, and computes exactly what ``prepared`` computes in the phase
    ``quantize``. Every site's node, and every node that carries its integers, has ``qparams``.

    Args:
        prepared: a calibrated module; it is not changed.

    Returns:
        A converted ``TracedModule``.

    Raises:
        GraphError: when the module is not prepared.
        CalibrationError: when a site was never calibrated, naming it.
    """
    record = read_record(prepared, "prepared")
    for fq in fake_quants(prepared):
        fq.qparams()
    model = flatten(prepared)
    container = getattr(model, CONTAINER)
    for name, fq in list(container.__dict__.items()):
        if isinstance(fq, FakeQuant):
            setattr(container, name, _frozen(fq))
    for bias in bias_quants(model):
        bias.phase = "quantize"
    model._update_ref()
    for expr in exprs(model):
        if isinstance(expr, GetAttr) and isinstance(expr.outputs[0], ModuleNode):
            expr.outputs[0].module_type = type(expr.outputs[0].owner)
    _record_nodes(model, record.annotation)
    write_record(model, dataclasses.replace(record, stage="converted"))
    return model


def _frozen(fq: FakeQuant) -> FixedFakeQuant:
    frozen = FixedFakeQuant(fq.site, fq.scheme, shape=fq.shape, static=fq.static, numel=fq.numel)
    frozen.set_qparams(fq.qparams())
    frozen.phase = "quantize"
    frozen.training = fq.training
    return frozen


def _record_nodes(model: TracedModule, annotation: Any) -> None:
    nodes: dict[str, TensorNode] = {n.name: n for n in model.graph.inputs}
    nodes.update((n.name, n) for e in exprs(model) for n in e.outputs)
    container = getattr(model, CONTAINER)
    for site in annotation.sites:
        if site.sort == "bias":
            activation, weight = getattr(container, site.activation), getattr(container, site.weight)
            scale, _ = getattr(container, site.group).scale(activation, weight)
            value = create_qparams(QuantMode.SYMMERTIC, "qint32", scale=Tensor(scale.numpy()))
        else:
            value = _node_qparams(getattr(container, site.group))
        nodes[site.node].qparams = value
        nodes[f"{site.name}_q"].qparams = value
    for name, group in annotation.carried.items():
        nodes[name].qparams = _node_qparams(getattr(container, group))


def _node_qparams(fq: FakeQuant) -> NodeQParams:
    affine = bool(np.any(fq.zero_point.numpy()))
    mode = QuantMode.ASYMMERTIC if affine or not fq.scheme.symmetric else QuantMode.SYMMERTIC
    zero_point = Tensor(fq.zero_point.numpy()) if mode is QuantMode.ASYMMERTIC else None
    return create_qparams(mode, dtype_meta(fq.scheme), Tensor(fq.effective_scale().numpy()), zero_point)


_CANONICAL = {(m.qmin, m.qmax, m.np_dtype_str): m for m in reversed(list(_builtin_quant_dtypes.values()))}


def dtype_meta(scheme: QScheme) -> QuantDtypeMeta:
    """MegEngine's dtype for the integers of ``scheme``; its own object where it has one."""
    storage = f"{'int' if scheme.signed else 'uint'}{8 if scheme.bits <= 8 else 16}"
    known = _CANONICAL.get((scheme.qmin, scheme.qmax, storage))
    if known is not None:
        return known
    name = f"q{'int' if scheme.signed else 'uint'}{scheme.bits}{'_narrow' if scheme.narrow else ''}"
    return QuantDtypeMeta(name, None, storage, scheme.qmin, scheme.qmax, not scheme.signed)
