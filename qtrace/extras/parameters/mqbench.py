"""MQBench's clip ranges: for TensorRT the largest magnitude of each activation, for SNPE both ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.export.parameters.base import ParameterFile, refuse, refuse_floating
from qtrace.export.parameters.sites import Row
from qtrace.scheme import QScheme
from qtrace.targets.tensorrt.parameters import check_tensorrt

__all__ = ["SNPE", "TENSORRT"]

_TENSORRT = "an MQBench file of clip ranges for TensorRT"
_SNPE = "an MQBench file of clip ranges for SNPE"


def _write_tensorrt(rows: Sequence[Row]) -> str:
    check_tensorrt(rows, _TENSORRT)
    ranges = {r.tensor: float(r.scale.item() * 127) for r in rows if r.sort == "activation"}
    return _text({"tensorrt": {"blob_range": ranges}})


def _write_snpe(rows: Sequence[Row]) -> str:
    quantized = [(r, r.scheme) for r in rows if r.scheme is not None]
    for row, scheme in quantized:
        refuse_floating(row, _SNPE)
        if scheme.bits not in (4, 8, 16):
            raise refuse(row, _SNPE, "knows 4, 8 and 16 bits", "use one of these there")
        if row.sort == "activation" and row.axis is not None:
            raise refuse(row, _SNPE, "has one range for each activation", "set axis: null there")
        if row.sort == "activation" and scheme.narrow:
            raise refuse(row, _SNPE, "always uses the lowest integer", "set narrow: false there")
    return _text(
        {
            "activation_encodings": {r.tensor: _ranges(r, s) for r, s in quantized if not r.stored},
            "param_encodings": {r.tensor: _ranges(r, s) for r, s in quantized if r.stored},
        }
    )


def _ranges(row: Row, scheme: QScheme) -> list[dict[str, Any]]:
    """Returns the real values of the lowest and highest integer; SNPE divides their distance by all steps."""
    low = -(1 << (scheme.bits - 1)) if scheme.signed else 0
    ends = [(end - row.zero_point) * row.scale.astype(np.float64) for end in (low, scheme.qmax)]
    pairs = zip(*(np.reshape(e, -1).tolist() for e in ends), strict=True)
    return [{"bitwidth": scheme.bits, "min": low, "max": high} for low, high in pairs]


def _text(document: dict[str, Any]) -> str:
    return f"{json.dumps(document, indent=1)}\n"


TENSORRT = ParameterFile(_TENSORRT, "_clip_ranges.json", _write_tensorrt)
SNPE = ParameterFile(_SNPE, "_clip_ranges.json", _write_snpe)
