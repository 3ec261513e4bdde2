"""Weights that are stored as integers where all else is float, in the forms that onnxruntime runs fastest.

onnxruntime computes a DequantizeLinear of a weight anew at each run, which made a linear layer three times as
slow as in float (benchmarks/weights.py). A Cast and a Mul give the same floats, and are folded when the file
is loaded. Blocks of 4 bits have a kernel of their own, MatMulNBits of the domain com.microsoft.
"""

from __future__ import annotations

import numpy as np

from qtrace.config import backends
from qtrace.export.onnx.writer import OnnxWriter, integer_type
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QParams

__all__ = ["BlockedWeight", "emit_product", "store_alone", "weights_alone"]

CONTRIB = "com.microsoft"
# Products in float32, as the graph has them. Level 4 rounds what the layer reads to int8, block by block, in
# about the same time for many rows.
_ACCURACY_LEVEL = 1

BlockedWeight = tuple[str, str, int]
"""The tensors of the integers and of the scales of a weight for MatMulNBits, and the size of its blocks."""


def weights_alone(annotation: Annotation) -> frozenset[str]:
    """Returns the sites of weights that float layers alone read; empty if they are to be QDQ nodes."""
    if not backends.get(annotation.backend).contrib_weights:
        return frozenset()
    readers = [note for note in annotation.notes if note.weight]
    on_integers = {note.weight for note in readers if note.state != "float"}
    return frozenset({note.weight for note in readers} - on_integers)


def store_alone(
    w: OnnxWriter, site: QuantizedSite, value: np.ndarray, laid_out: np.ndarray, axis: int
) -> None:
    """Stores a weight that float layers alone read.

    Args:
        w: the writer, which gets the tensor of the rounded weight.
        site: the site of the weight.
        value: the weight in MegEngine's layout.
        laid_out: its integers in ONNX's layout.
        axis: the axis of the output channels in ONNX's layout.
    """
    if site.qparams.scheme.block is not None:
        w.blocked[site.value] = _store_blocks(w, site.name, site.integers(value), site.qparams)
    else:
        w.names[site.value] = _store_cast(w, site.name, laid_out, site.qparams, axis, site.value.name)


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
