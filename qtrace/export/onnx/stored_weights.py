"""Weights that are stored as integers where all else is float, in the forms that onnxruntime runs fastest.

onnxruntime computes a DequantizeLinear of a weight anew at each run, which made a linear layer three times as
slow as in float (benchmarks/weights.py). A Cast and a Mul give the same floats, and are folded when the file
is loaded. Blocks of 4 bits have a kernel of their own, MatMulNBits of the domain com.microsoft.

Layers that round what they read by the range of each batch: DynamicQuantizeLinear and MatMulInteger.

onnxruntime fuses the nodes of a layer into one kernel, DynamicQuantizeMatMul, with the bias after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.config import backends
from qtrace.export.onnx.types import Emitter
from qtrace.export.onnx.weight_layouts import weight_layout
from qtrace.export.onnx.writer import OnnxWriter, integer_type
from qtrace.graph.walk import owner
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QParams

__all__ = [
    "DYNAMIC",
    "BlockedWeight",
    "emit_dynamic_product",
    "emit_product",
    "find_forms",
    "is_dynamic",
    "store_integers",
    "store_weight",
]

CONTRIB = "com.microsoft"
# Products in float32, as the graph has them. Level 4 rounds what the layer reads to int8, block by block, in
# about the same time for many rows.
_ACCURACY_LEVEL = 1

BlockedWeight = tuple[str, str, int]
"""The tensors of the integers and of the scales of a weight for MatMulNBits, and the size of its blocks."""


def find_forms(annotation: Annotation, contrib: bool) -> dict[str, str]:
    """Finds the weights that are not stored before a DequantizeLinear.

    Args:
        annotation: the decisions for the graph.
        contrib: whether weights may have forms that only onnxruntime has.

    Returns:
        Site of a weight -> the method of all layers that read it, "dynamic" or "weight_only".
    """
    dynamic = {name for entry in annotation.dynamic for name in entry.consumers}
    alone = contrib and backends.get(annotation.backend).contrib_weights
    forms: dict[str, set[str]] = {}
    for note in annotation.notes:
        if note.weight:
            method = "dynamic" if note.name in dynamic else "weight_only" if note.state == "float" else ""
            forms.setdefault(note.weight, set()).add(method if alone or method == "dynamic" else "")
    return {site: next(iter(methods)) for site, methods in forms.items() if len(methods) == 1}


def store_weight(w: OnnxWriter, site: QuantizedSite, value: np.ndarray, layer: OpCall, form: str) -> None:
    """Stores the integers of a weight in the form in which its layers read it.

    Args:
        w: the writer, which gets the tensor of the weight.
        site: the site of the weight.
        value: the weight in MegEngine's layout.
        layer: a layer that reads it.
        form: what `find_forms` gives for the site; "" for a DequantizeLinear.
    """
    integers, qparams = site.integers(value), site.qparams
    w.laid_out.add(site.value)
    if form == "dynamic":
        store_integers(w, site, integers)
    elif form == "weight_only" and qparams.scheme.block is not None:
        w.blocked[site.value] = _store_blocks(w, site.name, integers, qparams)
    else:
        store = _store_cast if form == "weight_only" else OnnxWriter.dequantize
        laid_out, axis = weight_layout(layer, integers)
        w.names[site.value] = store(w, site.name, laid_out, qparams, axis, site.value.name)


def _store_cast(
    w: OnnxWriter, base: str, integers: np.ndarray, qparams: QParams, axis: int, output: str
) -> str:
    """Adds the integers ``{base}_int`` of a weight, and the Cast and the Mul that make its floats.

    Args:
        w: the writer.
        base: the name of the site.
        integers: the integers in ONNX's layout; 4 bits and less are stored two in a byte.
        qparams: the parameters; symmetric with zero point 0, or with a zero point that is subtracted.
        axis: the axis of the output channels in ONNX's layout.
        output: the name of the floats.
    """
    scheme = qparams.scheme
    shape = [1] * integers.ndim
    if scheme.per_channel:
        shape[axis] = -1
    stored = w.constant(f"{base}_int", integers.astype(integer_type(scheme, packed=True)))
    value = w.node("Cast", [stored], w.fresh(output), to=1)
    if np.any(qparams.zero_point):
        zero = w.constant(f"{base}_zero_point", qparams.zero_point.astype(np.float32).reshape(shape))
        value = w.node("Sub", [value, zero], w.fresh(output))
    scale = w.constant(f"{base}_scale", qparams.scale.astype(np.float32).reshape(shape))
    return w.node("Mul", [value, scale], output)


def _store_blocks(w: OnnxWriter, base: str, integers: np.ndarray, qparams: QParams) -> BlockedWeight:
    """Adds a weight (outputs, inputs) of 4 bits with a scale per block as MatMulNBits reads it.

    The last block is filled up with the integer of 0.
    """
    block = qparams.scheme.block
    assert block is not None
    outputs, inputs = integers.shape
    offset = 8 if qparams.scheme.signed else 0
    unsigned = np.pad(integers + offset, ((0, 0), (0, -inputs % block)), constant_values=8).astype(np.uint8)
    pairs = unsigned.reshape(outputs, -1, block)
    packed = pairs[..., 0::2] | (pairs[..., 1::2] << 4)
    return (
        w.constant(f"{base}_int", packed),
        w.constant(f"{base}_scale", qparams.scale.astype(np.float32).reshape(-1)),
        block,
    )


def emit_product(w: OnnxWriter, call: OpCall, weight: BlockedWeight, output: str) -> str:
    """Adds the product of a linear layer with such a weight, without its bias; returns its tensor."""
    integers, scales, block = weight
    assert call.weight is not None
    outputs, inputs = (int(n) for n in call.weight.shape)
    w.versions.use(CONTRIB, 1)
    return w.node(
        "MatMulNBits",
        [w.name(call.inputs[0]), integers, scales],
        output,
        domain=CONTRIB,
        K=inputs,
        N=outputs,
        bits=4,
        block_size=block,
        accuracy_level=_ACCURACY_LEVEL,
    )


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
