"""Chooses the types of weights in an ONNX file by its target and this processor.

Weights as uint8 instead of int8, for processors on which onnxruntime's products saturate.

Without VNNI instructions, x86 processors multiply uint8 activations by int8 weights with ``vpmaddubsw``,
which adds two neighbouring products in 16 bits and saturates: ``255 * 127 + 255 * 127`` becomes 32767. uint8
weights take a kernel that adds in 32 bits (onnxruntime, "Quantize ONNX models", "Data type selection"). A
weight ``w`` with zero point 0 and the weight ``w + 128`` with zero point 128 are the same number.

Integers up to 64 need no other type: ``255 * 64 + 255 * 64`` fits.

OpenVINO's kernels saturate, too, except for depthwise convolutions. It computes layers with uint8
weights in float, and a transposed convolution of an input whose zero point is 0 wrong: it leaves out the 128.

OpenVINO's plugin takes the rows of a concat along axis 1 for channels, and then refuses a product of them
with int8 weights: "[MatMulTransformation] ... cannot be broadcasted". It takes uint8 weights there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.plain_graph import PlainGraph
from qtrace.export.onnx.naming import claim_name
from qtrace.onnxfile.kernels import has_large_signed_weights
from qtrace.onnxfile.saturation import SAFE_BITS, products_saturate

__all__ = [
    "SATURATING_FILE",
    "kinds_in_float",
    "products_that_may_saturate",
    "stores_unsigned",
    "weights_behind_joined_rows",
    "weights_that_saturate",
    "write_unsigned_weights",
    "write_weight_types",
]

SATURATING_FILE = (
    "the file is for no runtime in particular (backend generic), and its products of uint8 and int8 saturate "
    "in onnxruntime and OpenVINO on x86 processors without VNNI: prepare for the runtime that it is for, "
    "export with weights=uint8, or give weights 7 bits."
)
"""What is said of a file with 8-bit weights for an unknown processor."""

_LOG = logging.getLogger("qtrace")


def stores_unsigned(converted: ConvertedGraph, weights: str) -> bool:
    """Returns whether weights are stored as uint8.

    Raises:
        ExportError: when ``weights`` is no choice, or the target takes signed integers only.
    """
    if weights not in ("auto", "int8", "uint8"):
        raise ExportError(f"weights={weights!r} is no choice of the ONNX export: choose auto, int8 or uint8.")
    if weights == "int8" or isinstance(converted, PlainGraph):
        return False
    if weights == "auto":
        # A dynamic layer multiplies uint8, whatever type the other activations have.
        dynamic = converted.annotation.backend == "onnxruntime" and bool(converted.annotation.dynamic)
        return (dynamic or _may_be_unsigned(converted)) and products_saturate()
    name, signed = converted.annotation.backend, _has_signed_activations(converted)
    if signed or backends.get(name).activation.signed:
        raise ExportError(
            f"weights=uint8 is no choice for backend {name} with signed activations, which no runtime "
            "multiplies by unsigned weights: leave it out."
        )
    return True


def _write_unsigned(converted: ConvertedGraph, model: Any, weights: str) -> None:
    """Stores weights as uint8: all of them, or by ``auto`` those whose products may saturate."""
    slow = converted.annotation.backend == "openvino"
    chosen = None
    if weights == "auto":
        chosen = products_that_may_saturate(model)
        if _may_be_unsigned(converted):
            chosen |= weights_that_saturate(model, depthwise=not slow) | weights_behind_joined_rows(model)
    if not write_unsigned_weights(model, chosen) or weights != "auto":
        return
    if slow:
        _LOG.warning(
            "weights are stored as uint8, which OpenVINO computes in float, since its products of uint8 and "
            "int8 saturate on this processor: prepare with backend/openvino_avx2, whose weights of 7 bits "
            "run on integers. For a processor with VNNI or for ARM, export with weights=int8."
        )
        return
    _LOG.info(
        "weights are stored as uint8, since onnxruntime's products of uint8 and int8 saturate on "
        "this processor; for a processor with VNNI or for ARM, export with weights=int8."
    )


def write_weight_types(converted: ConvertedGraph, model: Any, weights: str, unsigned: bool) -> None:
    """Stores the weights of a model, which are int8, in their types.

    Args:
        converted: the graph of a converted module, or of a plain one.
        model: the model; it is changed in place.
        weights: the option of the export.
        unsigned: what `stores_unsigned` says.
    """
    if unsigned:
        _write_unsigned(converted, model, weights)
    elif weights == "auto" and _may_be_unsigned(converted):
        write_unsigned_weights(model, weights_behind_joined_rows(model))
    _tell_of_saturation(converted, model, weights)


def _tell_of_saturation(converted: ConvertedGraph, model: Any, weights: str) -> None:
    """Says for which processors int8 weights are wrong that nobody has asked for."""
    if weights != "auto" or isinstance(converted, PlainGraph):
        return
    backend = converted.annotation.backend
    if backend not in ("generic", "onnxruntime", "openvino") or not has_large_signed_weights(model):
        return
    if backend == "generic":
        _LOG.warning(SATURATING_FILE)
    elif not products_saturate():
        _LOG.info(
            "weights are stored as int8, whose products with uint8 do not saturate on this processor; for "
            "x86 without VNNI, export with weights=uint8."
        )


def kinds_in_float(converted: ConvertedGraph) -> frozenset[str]:
    """Returns the kinds of layers whose weights OpenVINO needs as floats, as it computes uint8 ones wrong."""
    if converted.annotation.backend != "openvino":
        return frozenset()
    kind = "conv_transpose2d"
    for site in converted.sites:
        if site.sort == "weight" and site.qparams.scheme.bits > SAFE_BITS:
            calls = [ops.read(expr) for expr in site.consumers]
            if any(call is not None and call.kind == kind for call in calls):
                return frozenset({kind})
    return frozenset()


def _may_be_unsigned(converted: ConvertedGraph) -> bool:
    """Returns whether the target of a converted module multiplies its activations by uint8 weights."""
    if isinstance(converted, PlainGraph):
        return False
    on_cpu = converted.annotation.backend in ("onnxruntime", "openvino")
    return on_cpu and not _has_signed_activations(converted)


def _has_signed_activations(converted: ConvertedGraph) -> bool:
    """Returns whether an activation is signed: runtimes do not multiply those by unsigned weights."""
    return any(site.qparams.scheme.signed for site in converted.sites if site.sort == "activation")


_SAFE = 64
_SHIFT = 128


def weights_behind_joined_rows(model: Any) -> set[str]:
    """Returns the dequantized weights of the products that read rows which a concat joins.

    Args:
        model: an ONNX model.
    """
    import onnx

    producers = {name: node for node in model.graph.node for name in node.output}
    weights: dict[str, set[str]] = {}  # what a concat joins -> the weights that it is multiplied by
    for node in model.graph.node:
        if node.op_type != "MatMul":
            continue
        rows = node.input[0]
        while rows in producers and producers[rows].op_type in ("QuantizeLinear", "DequantizeLinear"):
            rows = producers[rows].input[0]
        if rows in producers and producers[rows].op_type == "Concat":
            weights.setdefault(rows, set()).add(node.input[1])
    if not weights:
        return set()
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in inferred}
    ranks = {rows: rank for rows, rank in ranks.items() if rows in weights and rank > 2}
    joined = (rows for rows, rank in ranks.items() if producers[rows].attribute[0].i % rank == 1)
    return {name for rows in joined for name in weights[rows]}


def weights_that_saturate(model: Any, depthwise: bool = True) -> set[str]:
    """Returns the dequantized int8 weights of which two products may not fit into 16 bits.

    Args:
        model: an ONNX model with all of its tensors.
        depthwise: whether depthwise convolutions count.
    """
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    safe = {name for name, tensor in stored.items() if not _passes_7_bits(tensor)}
    integers = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
    if not depthwise:
        for node in model.graph.node:
            weight = integers.get(node.input[1], "") if node.op_type == "Conv" else ""
            if weight in stored and _is_depthwise(node, stored[weight].dims):
                safe.add(weight)
    return {name for name, integer in integers.items() if integer not in safe}


def products_that_may_saturate(model: Any) -> set[str]:
    """Returns the results of MatMulInteger whose int8 weights may not fit into 16 bits two by two.

    Args:
        model: an ONNX model with all of its tensors.
    """
    large = {tensor.name for tensor in model.graph.initializer if _passes_7_bits(tensor)}
    products = (node for node in model.graph.node if node.op_type == "MatMulInteger")
    return {node.output[0] for node in products if node.input[1] in large}


def _passes_7_bits(tensor: Any) -> bool:
    """Returns whether two products of a stored int8 tensor with uint8 may not fit into 16 bits."""
    from onnx import numpy_helper

    if tensor.data_type != tensor.INT8:
        return False
    return bool(np.abs(numpy_helper.to_array(tensor).astype(np.int16)).max(initial=0) > _SAFE)


def _is_depthwise(conv: Any, shape: Sequence[int]) -> bool:
    groups = next((a.i for a in conv.attribute if a.name == "group"), 1)
    return groups > 1 and shape[1] == 1


def write_unsigned_weights(model: Any, chosen: Collection[str] | None = None) -> int:
    """Stores the int8 weights of ``model`` as uint8 with zero point 128; their values stay.

    Weights that the file computes are rounded to uint8 there.

    Args:
        model: an ONNX model with all of its tensors, in which only weights are int8; it is changed in place.
        chosen: the dequantized weights that are stored so, and the results of MatMulInteger whose weights
            are; None for all.

    Returns:
        The number of weights that were changed.
    """
    if chosen is not None and not chosen:
        return 0
    weights = _Weights(model)
    rounded = {n.input[0] for n in model.graph.node if chosen is not None and n.output[0] in chosen}
    for node in model.graph.node:
        if chosen is not None and node.output[0] not in chosen and node.output[0] not in rounded:
            continue
        if node.op_type == "QuantizeLinear" and weights.is_dequantized(node.output[0]):
            weights.change_zero_point(node)
        elif node.op_type == "DequantizeLinear":
            weights.change_stored(node)
        elif node.op_type == "MatMulInteger":
            weights.change_multiplied(node)
    weights.drop_unread()
    return len(weights.changed)


class _Weights:
    """The int8 weights of a model.

    Attributes:
        changed: the tensors of weights that are uint8 now.
    """

    def __init__(self, model: Any) -> None:
        from qtrace.onnxfile.model import OnnxModel

        index = OnnxModel(model)
        self.graph, self.names = index.graph, index.names()
        self.tensors = {tensor.name: tensor for tensor in self.graph.initializer}
        self.readers = {name: {node.op_type for node in nodes} for name, nodes in index.readers.items()}
        self.changed: set[str] = set()
        self._replaced: set[str] = set()

    def is_dequantized(self, name: str) -> bool:
        """Returns whether only DequantizeLinear reads a tensor."""
        return self.readers.get(name) == {"DequantizeLinear"}

    def change_stored(self, node: Any) -> None:
        """Changes the weight that ``node`` dequantizes, if it is stored as int8 or rounded in the file."""
        from onnx import TensorProto, numpy_helper

        name = node.input[0]
        weight = self.tensors.get(name)
        if weight is not None and weight.data_type == TensorProto.INT8 and self.is_dequantized(name):
            weight.CopyFrom(numpy_helper.from_array(_shifted(numpy_helper.to_array(weight)), name))
            self.changed.add(name)
        if name in self.changed:
            self._give_zero_point(node)

    def change_multiplied(self, node: Any) -> None:
        """Changes the weight that a MatMulInteger reads as its second operand, if it is stored as int8."""
        from onnx import TensorProto, numpy_helper

        name = node.input[1]
        weight = self.tensors.get(name)
        alone = self.readers.get(name) == {"MatMulInteger"}
        if weight is not None and weight.data_type == TensorProto.INT8 and alone:
            weight.CopyFrom(numpy_helper.from_array(_shifted(numpy_helper.to_array(weight)), name))
            self.changed.add(name)
        if name not in self.changed:
            return
        old = self.tensors.get(node.input[3]) if len(node.input) > 3 else None
        zeros = np.zeros((), np.int8) if old is None else numpy_helper.to_array(old)
        inputs = [*node.input[:3], self._zero_point(node, zeros)]
        self._replaced.update(node.input[3:])
        del node.input[:]
        node.input.extend(inputs)

    def _zero_point(self, node: Any, zeros: np.ndarray) -> str:
        """Adds the zero points of uint8 that stand for ``zeros`` of int8, and returns their name."""
        from onnx import numpy_helper

        name = claim_name(f"{node.output[0]}_zero_point_uint8", self.names)
        self.graph.initializer.append(numpy_helper.from_array(_shifted(zeros), name))
        return name

    def change_zero_point(self, node: Any) -> None:
        """Makes a QuantizeLinear that rounds to int8 round to uint8."""
        from onnx import TensorProto

        zero = self.tensors.get(node.input[2]) if len(node.input) > 2 else None
        if zero is not None and zero.data_type == TensorProto.INT8:
            self._give_zero_point(node)
            self.changed.add(node.output[0])

    def _give_zero_point(self, node: Any) -> None:
        """Gives ``node`` the zero point of uint8 in the place of its own, which is 0 if it is absent."""
        from onnx import numpy_helper

        old = self.tensors.get(node.input[2]) if len(node.input) > 2 else None
        scale = self.tensors[node.input[1]]
        zeros = np.zeros(tuple(scale.dims), np.int8) if old is None else numpy_helper.to_array(old)
        self._replaced.update(node.input[2:])
        inputs = [*node.input[:2], self._zero_point(node, zeros)]
        del node.input[:]
        node.input.extend(inputs)

    def drop_unread(self) -> None:
        """Removes the zero points that nothing reads any more."""
        from qtrace.onnxfile.bodies import read_names

        read = {name for node in self.graph.node for name in read_names(node)}
        for name in self._replaced - read:
            self.graph.initializer.remove(self.tensors[name])


def _shifted(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.int16) + _SHIFT).astype(np.uint8)
