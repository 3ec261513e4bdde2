"""TensorRT's calibration cache: a line for each activation, the bits of its scale in hexadecimal.

TensorRT reads it up to release 10. Release 11 lacks calibration and takes scales only from QuantizeLinear
nodes, which the format ``onnx`` writes.

It lacks weights: TensorRT takes the scale of each output channel from its largest magnitude. A weight
that was quantized with other scales is refused, since TensorRT would not use them.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

import numpy as np

from qtrace.export.parameters import ParameterFile, Row, refuse, refuse_floating

_log = logging.getLogger("qtrace")
_TITLE = "a TensorRT calibration cache"
_INSTEAD = "or export format onnx, whose QuantizeLinear nodes TensorRT reads from release 8 on"


def _check(rows: Sequence[Row]) -> None:
    """Refuses sites that TensorRT cannot quantize from one magnitude for each activation.

    Raises:
        ExportError: naming the site.
    """
    for row in rows:
        scheme = row.scheme
        if scheme is None:  # int32 at the product of both scales, as TensorRT adds it
            continue
        refuse_floating(row, _TITLE)
        if scheme.bits != 8:
            raise refuse(row, _TITLE, "knows 8 bits only", f"use 8 bits there, {_INSTEAD}")
        if not scheme.symmetric or not scheme.signed:
            change = f"prepare with backend tensorrt_10, {_INSTEAD}"
            raise refuse(row, _TITLE, "knows signed symmetric integers only", change)
        if row.sort == "weight":
            _check_weight(row)
        elif row.axis is not None:
            raise refuse(row, _TITLE, "has one scale for each tensor", "set axis: null there")
        elif scheme.narrow:
            raise refuse(row, _TITLE, "always uses -128", "set narrow: false there")


def _check_weight(row: Row) -> None:
    assert row.value is not None
    if row.axis is None:
        change = f"set axis: 0 there, {_INSTEAD}"
        raise refuse(row, _TITLE, "leaves weights to TensorRT, which gives each channel a scale", change)
    largest = np.abs(np.moveaxis(row.value, row.axis, 0).reshape(len(row.scale), -1)).max(1)
    # A channel of zeros has any scale.
    if not np.allclose(largest[largest > 0] / 127, row.scale[largest > 0], rtol=1e-5, atol=0):
        reason = "leaves weights to TensorRT, which scales a channel by its largest magnitude"
        raise refuse(row, _TITLE, reason, f"use the observer minmax for it, {_INSTEAD}")


def _write(rows: Sequence[Row]) -> str:
    _check(rows)
    lines = ["TRT-8503-EntropyCalibration2"]
    for row in rows:
        if row.sort == "activation":
            lines.append(f"{row.tensor}: {struct.pack('>f', row.scale.item()).hex()}")
    return "\n".join(lines) + "\n"


def _write_renamed(rows: Sequence[Row]) -> str:
    _log.warning(
        "params=tensorrt is now called tensorrt-10, the last release that reads a calibration cache: for "
        "release 11 prepare with backend tensorrt and export format onnx."
    )
    return _write(rows)


PARAMETERS_10 = ParameterFile(_TITLE, ".cache", _write)
PARAMETERS = ParameterFile(_TITLE, ".cache", _write_renamed)
