"""Writes sites as integers and the DequantizeLinear that reads them: stored ones, computed ones, biases.

Weights may be stored as integers where all else is float, in the forms that onnxruntime runs fastest. It
computes a DequantizeLinear of a weight anew at each run, which made a linear layer three times as slow as in
float (benchmarks/weights.py). A Cast and a Mul give the same floats, and are folded when the file is loaded.
Blocks of 4 bits have a kernel of their own, MatMulNBits of the domain com.microsoft.

Layers that round what they read by the range of each batch become DynamicQuantizeLinear and MatMulInteger.
These nodes and the bias after them are one kernel in onnxruntime, DynamicQuantizeMatMul.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from onnx import TensorProto

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, only_floats_read
from qtrace.export.onnx.writer import Emitter, OnnxWriter, integer_type
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.walk import owner, shape_of, users
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QParams

CONVS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose2d", "conv_transpose3d")

CONTRIB = "com.microsoft"
# Products in float32, as the graph has them. Level 4 rounds what the layer reads to int8, block by block, in
# about the same time for many rows.
_ACCURACY_LEVEL = 1

BlockedWeight = tuple[str, str, int]
"""The tensors of the integers and of the scales of a weight for MatMulNBits, and the size of its blocks."""


def weight_layout(call: OpCall, weight: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns a layer's weight in ONNX's layout, and the axis of its output channels there."""
    if call.kind in (*CONVS, *TRANSPOSED):
        axes = len(shape_of(call.inputs[0])) - 1  # one for the channels, the others of the window
        return weight.reshape(-1, *weight.shape[-axes:]), int(call.kind in TRANSPOSED)
    if call.kind == "linear" and not keeps_rows(call):
        return weight.T, 1
    return weight, 0


def keeps_rows(call: OpCall) -> bool:
    """Whether the weight of a linear layer is stored as MegEngine has it: outputs x inputs.

    Gemm reads it so, and all that is no linear layer. Else it is stored as MatMul reads it.
    """
    assert call.weight is not None
    if has_blocks(call):
        return False  # runtimes have kernels for blocks in the layout of MatMul
    calls = [ops.read(user) for user in users(call.weight)]
    matrices = [c is not None and c.weight is call.weight and len(c.inputs[0].shape) == 2 for c in calls]
    return all(matrices) or any(c is None or c.weight is not call.weight for c in calls)


def has_blocks(call: OpCall) -> bool:
    """Whether the weight of a linear layer has a scale per block of inputs."""
    assert call.weight is not None
    rounding = owner(call.weight.expr)
    return isinstance(rounding, FakeQuant) and rounding.scheme.block is not None


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
    floats = w.node("Cast", [product], w.fresh(base), to=TensorProto.FLOAT)
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


class SiteWriter:
    """Writes the sites of a converted graph.

    Args:
        graph: the graph.
        writer: collects nodes and tensors.
        floats: kinds of layers whose biases may stay computed, as they are stored as floats.
        contrib: whether weights may have forms that only onnxruntime has.
    """

    def __init__(
        self, graph: ConvertedGraph, writer: OnnxWriter, floats: frozenset[str], contrib: bool
    ) -> None:
        self._graph, self._writer = graph, writer
        self._floats, self._contrib = floats, contrib

    def write(self, site: QuantizedSite) -> None:
        """Writes the integers of a site and how they are read."""
        value = self._writer.value(site.source)
        try:
            if site.sort == "bias":
                self._write_bias(site, value)
            elif site.sort == "weight" and value is not None:
                self._write_weight(site, value)
            elif value is not None:
                axis = site.qparams.scheme.axis or 0
                integers = site.integers(value)
                if self._is_bias(site):
                    integers = integers.reshape(-1)
                    self._writer.laid_out.add(site.value)
                parts = (site.name, integers, site.qparams, axis, site.value.name)
                self._writer.names[site.value] = self._writer.dequantize(*parts)
            else:
                self._write_computed(site)
        except ExportError as error:
            raise ExportError(f"site {site.name}: {error}.") from error

    def _is_bias(self, site: QuantizedSite) -> bool:
        """Whether layers read the value as their bias, which ONNX has as a vector."""
        calls = (self._graph.call(user) for user in site.consumers)
        return any(call is not None and call.bias is site.value for call in calls)

    def _write_computed(self, site: QuantizedSite) -> None:
        w, axes = self._writer, site.decision.channel_axes
        name = w.name(site.source)
        if axes == (0, 1):  # a grouped convolution's weight: ONNX knows one axis of channels
            name = w.node("Reshape", [name, w.ints([-1, *site.source.shape[2:]])], w.fresh(site.source.name))
            w.laid_out.add(site.value)
            axes = (0,)
        axis = axes[0] if axes else 0
        rounded = w.quantize_dequantize(name, site.name, site.value.name, site.qparams, axis)
        w.names[site.value] = rounded
        if not axes:
            w.rounded_to[site.source] = w.integers[rounded]

    def _write_weight(self, site: QuantizedSite, value: np.ndarray) -> None:
        store_weight(self._writer, site, value, self._layer(site), self._weight_forms.get(site.name, ""))

    @cached_property
    def _weight_forms(self) -> dict[str, str]:
        return find_forms(self._graph.annotation, self._contrib)

    def _layer(self, site: QuantizedSite) -> OpCall:
        for user in site.consumers:
            call = self._graph.call(user)
            if call is not None:
                return call
        raise ExportError(f"{site.value.name} is a weight that no layer reads: set quantize: false for it")

    def _write_bias(self, site: QuantizedSite, value: np.ndarray | None) -> None:
        w, out = self._writer, site.value
        if value is None:
            if not only_floats_read(out, self._floats):
                raise ExportError(
                    "its bias is computed, which int32 storage cannot express: set quantize: false for its "
                    "layer, or name the kind of the layer in allow_float"
                )
            w.names[out] = w.name(site.source)
            return
        scale = site.bias_scale
        w.laid_out.add(out)
        stored = w.constant(f"{site.name}_int", site.integers(value))
        factor = w.constant(f"{site.name}_scale", scale)
        zero = w.constant(f"{site.name}_zero_point", np.zeros(scale.shape, np.int32))
        extra = {"axis": 0} if scale.ndim else {}
        w.names[out] = w.node("DequantizeLinear", [stored, factor, zero], out.name, **extra)
