"""The biases of a TFLite file: int32, or int64 for activations of 16 bits.

The scale of a bias, input scale times weight scale, and its rounding are the same in every format:
`QuantizedSite.bias_scale` and `QuantizedSite.integers` in ``preparation/model.py`` compute them.
"""

from __future__ import annotations

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Builder
from qtrace.export.tflite.writer import FileTensor, Grid
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite

__all__ = ["float_bias", "integer_bias", "record_bias", "zero_bias"]


def record_bias(b: Builder, site: QuantizedSite, value: np.ndarray | None) -> None:
    """Records the integers of a bias, for the layers that read it.

    Args:
        b: the file.
        site: the bias.
        value: the bias in float; None where it is computed from the model's input.

    Raises:
        ExportError: when the bias is computed.
    """
    if value is None:
        raise ExportError(
            f"site {site.name}: its bias is computed, which int32 storage cannot express: "
            "set quantize: false for its layer."
        )
    b.integers[site.value] = (site.integers(value), Grid.symmetric(site.bias_scale))
    b.lazy[site.value] = lambda: site.rounded_bias(value)


def integer_bias(b: Builder, node: TensorNode, x: FileTensor) -> FileTensor:
    """Writes the integers of the bias ``node`` of a layer that reads ``x``, as a vector."""
    integers, grid = b.integers[node]
    name = f"{b.plan.graph.site_name(node)}_int"
    return b.writer.constant(name, integers.reshape(-1).astype(_bias_type(x)), grid)


def zero_bias(b: Builder, name: str, count: int, x: FileTensor, weight_scale: np.ndarray) -> FileTensor:
    """Writes a bias of zeros: integer kernels require a bias even if the graph lacks one."""
    assert x.grid is not None
    grid = Grid.symmetric(np.float32(x.grid.scale[0]) * weight_scale)
    return b.writer.constant(f"{name}_zeros", np.zeros(count, _bias_type(x)), grid)


def float_bias(b: Builder, call: OpCall, name: str, count: int) -> FileTensor:
    """Writes the bias of a layer that computes in float; zeros called ``name`` if the graph lacks one."""
    value = np.zeros(count, np.float32) if call.bias is None else b.value(call.bias)
    if value is None:
        raise ExportError(
            f"{call.out.name}: its bias is computed, which TFLite cannot express: "
            "add it after the layer, or set quantize: false"
        )
    return b.writer.constant(name if call.bias is None else call.bias.name, value.reshape(-1))


def _bias_type(x: FileTensor) -> type[np.integer]:
    return np.int64 if x.dtype == np.int16 else np.int32
