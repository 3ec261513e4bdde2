"""The size, the multiplications, the predicted time and the precision of a graph."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from qtrace import ops
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, shape_of
from qtrace.ops.base import count_macs
from qtrace.preparation.annotation import Annotation, PlacementNote
from qtrace.preparation.model import QuantizedModel, is_quantized
from qtrace.preparation.passes.expand import expand

# The precision that a prepared graph really has: bits of weights and inputs, layer by layer.


def count_precisions(annotation: Annotation) -> dict[str, int]:
    """Counts the layers of a prepared or converted graph by precision, the most frequent first.

    A layer is an op of role ``compute``: a convolution, a linear layer or a product.

    Args:
        annotation: what was decided for the graph.

    Returns:
        ``w8a8`` for weights and inputs of 8 bits on integers, ``a8`` for a product of two computed tensors,
        ``w8a8_dynamic`` where each batch has a range of its own, ``w4`` for a float layer with weights of 4
        bits, and ``float`` -> the number of layers.
    """
    bits = {site.group: site.plan.scheme.bits for site in annotation.sites if site.plan is not None}
    dynamic = {name for entry in annotation.dynamic for name in entry.consumers}
    counts: Counter[str] = Counter()
    for note in annotation.notes:
        if note.role != "compute":
            continue
        read = [bits[name] for name in note.inputs if name in bits]
        if note.name in dynamic:
            counts[f"w{bits[note.weight]}a8_dynamic"] += 1
            continue
        weight = f"w{bits[note.weight]}" if note.weight in bits else ""
        if note.state != "int" or not read:
            counts[weight or "float"] += 1
            continue
        counts[f"{weight}a{max(read)}"] += 1
    return dict(counts.most_common())


def describe_precision(annotation: Annotation) -> str:
    """Returns the precision in words: ``precision: w8a8 in 52 of 53 layers, float in 1``."""
    counts = count_precisions(annotation)
    total = sum(counts.values())
    if not total:
        return "precision: no layers"
    (first, number), *others = counts.items()
    parts = [f"{first} in all {total} layers" if not others else f"{first} in {number} of {total} layers"]
    return f"precision: {', '.join([*parts, *(f'{name} in {count}' for name, count in others)])}"


# The size, the multiplications and the predicted time of a graph.

_FLOAT_BITS, _BIAS_BITS = np.finfo(np.float32).bits, np.iinfo(np.int32).bits


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
