"""ncnn's calibration table for ncnn2int8: the scales of all weights by layer, then the scales of all inputs.

A scale is the inverse of qtrace's: integers per unit. A weight has one for each output channel, in a
convolution in groups for each group (ncnn, tools/quantize/ncnn2int8.cpp). Only the inputs of convolutions and
inner products are quantized by ncnn. A site anywhere else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.export.parameters import ParameterFile, Row, refuse

_TITLE = "an ncnn table"
_BACKEND = "prepare with the recipe backend/ncnn"


def _check(row: Row) -> None:
    scheme = row.scheme
    if scheme is None:  # ncnn adds biases in float
        return
    if scheme.bits != 8 or not scheme.symmetric or not scheme.signed:
        raise refuse(row, _TITLE, "knows signed symmetric integers of 8 bits only", _BACKEND)
    if not scheme.narrow:
        raise refuse(row, _TITLE, "stands for integers from -127 to 127", "set narrow: true there")
    if row.sort == "activation" and row.axis is not None:
        raise refuse(row, _TITLE, "has one scale for each input", "set axis: null there")
    if row.elsewhere:
        reason = f"says how layers with weights round what they read, and {row.elsewhere} reads this rounded"
        change = "set quantize_output: false before it, or export format ncnn, where rounding is a layer"
        raise refuse(row, _TITLE, reason, change)


def _write(rows: Sequence[Row]) -> str:
    for row in rows:
        _check(row)
    weights = {layer: row for row in rows if row.sort == "weight" for layer in row.layers}
    inputs = {layer: row for row in rows if row.sort == "activation" for layer in row.layers}
    for layer, row in weights.items():
        if layer not in inputs:
            reason = "quantizes a layer's weight and its input or neither"
            raise refuse(row, _TITLE, reason, f"set quantize: false for {layer}, or quantize its input too")
    lines = [f"{layer}_param_0 {_inverses(_weight_scales(row))}" for layer, row in weights.items()]
    lines += [f"{layer} {_inverses(inputs[layer].scale)}" for layer in weights]
    return "\n".join(lines) + "\n"


def _weight_scales(row: Row) -> np.ndarray:
    """Returns a scale for each output channel of a weight, or for each group of its convolution.

    Raises:
        ExportError: when the channels of a group have several scales.
    """
    scales = np.broadcast_to(row.scale, row.outputs)
    if row.groups == 1:
        return scales
    groups = scales.reshape(row.groups, -1)
    if (groups != groups[:, :1]).any():
        reason = f"has one scale for each of the {row.groups} groups of a convolution"
        change = f"set weight: {{axis: null}} for {row.layers[0]}, or export format ncnn"
        raise refuse(row, _TITLE, reason, change)
    return groups[:, 0]


def _inverses(scales: np.ndarray) -> str:
    return " ".join(f"{1 / float(s):.9g}" for s in np.reshape(scales, -1))


PARAMETERS = ParameterFile(_TITLE, ".table", _write)
