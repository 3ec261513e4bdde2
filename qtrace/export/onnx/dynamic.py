"""Layers that round what they read by the range of each batch: DynamicQuantizeLinear and MatMulInteger.

onnxruntime fuses the nodes of a layer into one kernel, DynamicQuantizeMatMul, with the bias after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.export.onnx.types import Emitter
from qtrace.export.onnx.writer import OnnxWriter, integer_type
from qtrace.graph.walk import owner
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite

__all__ = ["DYNAMIC", "emit_dynamic_product", "is_dynamic", "store_integers"]

_FLOAT = 1  # TensorProto.FLOAT


def store_integers(w: OnnxWriter, site: QuantizedSite, integers: np.ndarray) -> None:
    """Stores the weight of a linear layer, (inputs, outputs), for MatMulInteger.

    Args:
        w: the writer.
        site: the site of the weight.
        integers: its integers in MegEngine's layout, (outputs, inputs).
    """
    qparams = site.qparams
    integers = integers.T.astype(integer_type(qparams.scheme))
    zero = ""
    if qparams.zero_point.any():
        zero = w.constant(f"{site.name}_zero_point", qparams.zero_point.astype(integers.dtype))
    scale = w.constant(f"{site.name}_scale", qparams.scale.astype("float32"))
    w.integer_weights[site.value] = (w.constant(f"{site.name}_int", integers), scale, zero)


def is_dynamic(w: OnnxWriter, call: OpCall) -> bool:
    """Whether a linear layer multiplies integers whose scale comes from the batch."""
    return call.inputs[0] in w.dynamic and call.weight in w.integer_weights


def emit_dynamic_product(w: OnnxWriter, call: OpCall) -> None:
    """Adds a linear layer: the product of the integers, times both scales, and the bias."""
    assert call.weight is not None
    base = call.out.name
    integers, scale, zero = w.dynamic[call.inputs[0]]
    weight, weight_scale, weight_zero = w.integer_weights[call.weight]
    inputs = [integers, weight, zero, *([weight_zero] if weight_zero else [])]
    product = w.node("MatMulInteger", inputs, w.fresh(base))
    floats = w.node("Cast", [product], w.fresh(base), to=_FLOAT)
    factor = w.node("Mul", [scale, weight_scale], w.fresh(base))
    if call.bias is None:
        w.emit("Mul", [floats, factor], call.out)
    else:
        w.emit("Add", [w.node("Mul", [floats, factor], w.fresh(base)), w.name(call.bias)], call.out)


def _round(w: OnnxWriter, call: OpCall) -> None:
    source, name = w.name(call.inputs[0]), call.out.name
    module: Any = owner(call.expr)
    if module.phase in ("float", "observe"):
        w.names[call.out] = source
        return
    parts = w.add("DynamicQuantizeLinear", [source], [f"{name}_int", f"{name}_scale", f"{name}_zero_point"])
    w.dynamic[call.out] = parts[0], parts[1], parts[2]
    w.emit("DequantizeLinear", parts, call.out)  # left out where no op reads it


DYNAMIC: dict[str, Emitter] = {"dynamic_quantize": _round}
