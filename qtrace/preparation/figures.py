"""The size, the multiplications and the predicted time of a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qtrace import ops
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, shape_of
from qtrace.ops.base import count_macs
from qtrace.preparation.annotation import PlacementNote
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.record import is_quantized

__all__ = ["Figures", "read_figures"]

_FLOAT_BITS, _BIAS_BITS = 32, 32


@dataclass(frozen=True)
class Figures:
    """The size, the multiplications and the predicted time of a graph.

    Attributes:
        bytes: the bytes of its parameters as files store them: integers where a site rounds them.
        float_bytes: the bytes of its parameters in float32.
        macs: the number of multiply-accumulates at the traced shapes.
        integer_macs: the number of those on integers.
        placement: the predicted time; None for a graph without a placement.
        backend: the name of the backend; "" for a plain traced module.
        cost_table: the file of times that the config names; "" for the packaged one.
        weight_bits: the bits of weights of which no rule says others.
    """

    bytes: int
    float_bytes: int
    macs: int
    integer_macs: int
    placement: PlacementNote | None = None
    backend: str = ""
    cost_table: str = ""
    weight_bits: int = 8


def read_figures(model: TracedModule) -> Figures:
    """Returns the figures of a plain traced module, or of a prepared or converted one."""
    if not is_quantized(model):
        size = sum(math.prod(tensor.shape) for _, tensor in model.named_tensors()) * _FLOAT_BITS // 8
        flat = flatten(model)
        expand(flat)
        calls = (ops.read(expr) for expr in exprs(flat))
        return Figures(size, size, sum(count_macs(call) for call in calls if call is not None), 0)
    quantized = QuantizedModel(model)
    values = sum(math.prod(tensor.shape) for _, tensor in quantized.float_tensors())
    stored = (site for site in quantized.sites if site.static or site.sort != "activation")
    bits = {site.node: _BIAS_BITS if site.plan is None else site.plan.scheme.bits for site in stored}
    saved = sum(math.prod(shape_of(node)) * (_FLOAT_BITS - width) for node, width in bits.items())
    notes = quantized.annotation.notes
    return Figures(
        bytes=math.ceil((values * _FLOAT_BITS - saved) / 8),
        float_bytes=values * _FLOAT_BITS // 8,
        macs=sum(note.macs for note in notes),
        integer_macs=sum(note.macs for note in notes if note.state == "int"),
        placement=quantized.annotation.placement,
        backend=quantized.annotation.backend,
        cost_table=quantized.config.cost_table or "",
        weight_bits=quantized.config.weight_bits,
    )
