"""Writes sites as integers and the DequantizeLinear that reads them: stored ones, computed ones, biases."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.float_types import only_floats_read
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite

if TYPE_CHECKING:
    from qtrace.export.onnx.writer import OnnxWriter

__all__ = ["SiteWriter"]


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
        from qtrace.export.onnx.stored_weights import store_weight

        store_weight(self._writer, site, value, self._layer(site), self._weight_forms.get(site.name, ""))

    @cached_property
    def _weight_forms(self) -> dict[str, str]:
        from qtrace.export.onnx.stored_weights import find_forms

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
