"""Chooses the types of weights in an ONNX file by its target and this processor.

OpenVINO computes layers with uint8 weights in float, and a transposed convolution of an input whose zero
point is 0 wrong: it leaves out the 128.
"""

from __future__ import annotations

import logging
from typing import Any

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.plain_graph import PlainGraph
from qtrace.onnxfile.kernels import SAFE_BITS, has_large_signed_weights, products_saturate

__all__ = ["SATURATING_FILE", "kinds_in_float", "stores_unsigned", "write_weight_types"]

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
    from qtrace.export.onnx.cures import UnsignedWeights

    slow, stored = converted.annotation.backend == "openvino", UnsignedWeights(model)
    chosen = None
    if weights == "auto":
        chosen = stored.saturating_products()
        if _may_be_unsigned(converted):
            chosen |= stored.saturating(depthwise=not slow) | stored.after_joined_rows()
    if not stored.write(chosen) or weights != "auto":
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
    from qtrace.export.onnx.cures import UnsignedWeights

    if unsigned:
        _write_unsigned(converted, model, weights)
    elif weights == "auto" and _may_be_unsigned(converted):
        stored = UnsignedWeights(model)
        stored.write(stored.after_joined_rows())
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
