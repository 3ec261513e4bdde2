"""AIMET encodings, which Qualcomm's converters read: versions 0.6.1, 1.0.0 and 2.0.0.

Before 2.0.0 an offset is the lowest real value in steps: -128 for int8 with zero point 0 and for uint8
with zero point 128. Version 2.0.0 has the scale and zero point of ONNX's QuantizeLinear.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qtrace.export.parameters import ParameterFile, Row, refuse, refuse_floating

_TITLE = "AIMET encodings"
# Bits of the integer types of version 2.0.0.
_TYPES = (2, 4, 8, 16, 32)


def _bits(row: Row) -> int:
    return 32 if row.scheme is None else row.scheme.bits


def _signed(row: Row) -> bool:
    return row.scheme is None or row.scheme.signed


def _check(row: Row, version: str) -> None:
    title = f"{_TITLE} {version}"
    refuse_floating(row, title)
    if row.scheme is not None and row.scheme.narrow and row.sort == "activation":
        raise refuse(row, title, "always use the lowest integer", "set narrow: false there")
    if version == "2.0.0":
        if _bits(row) not in _TYPES:
            raise refuse(row, title, f"know {', '.join(map(str, _TYPES[:-1]))} bits", "use 4 or 8 bits there")
    elif row.sort == "activation" and row.axis is not None:
        change = "use one scale there, or params='aimet-2.0.0'"
        raise refuse(row, title, "have scales per channel for weights only", change)


def _offsets(row: Row) -> np.ndarray:
    low = -(1 << (_bits(row) - 1)) if _signed(row) else 0
    return low - row.zero_point.astype(np.int64)


def _floats(values: np.ndarray) -> list[float]:
    return [float(v) for v in values.astype(np.float32).reshape(-1)]


def _symmetric(row: Row) -> bool:
    return row.scheme is None or row.scheme.symmetric


def _entries_061(row: Row) -> list[dict[str, Any]]:
    steps = (1 << _bits(row)) - 1
    return [
        {
            "bitwidth": _bits(row),
            "dtype": "int",
            "is_symmetric": str(_symmetric(row)),
            "max": scale * (offset + steps),
            "min": scale * offset,
            "offset": offset,
            "scale": scale,
        }
        for scale, offset in zip(_floats(row.scale), _offsets(row).reshape(-1).tolist(), strict=True)
    ]


def _entry_100(row: Row) -> dict[str, Any]:
    return {
        "name": row.tensor,
        "dtype": "INT",
        "bw": _bits(row),
        "is_sym": _symmetric(row),
        "enc_type": "PER_TENSOR" if row.axis is None else "PER_CHANNEL",
        "scale": _floats(row.scale),
        "offset": _offsets(row).reshape(-1).tolist(),
    }


def _entry_200(row: Row) -> dict[str, Any]:
    kind = f"{'' if _signed(row) else 'u'}int{_bits(row)}"
    entry: dict[str, Any] = {"name": row.tensor, "output_dtype": kind, "y_scale": row.scale.tolist()}
    if np.any(row.zero_point):  # without one it is 0
        entry["y_zero_point"] = row.zero_point.tolist()
    if row.axis is not None:
        entry["axis"] = row.axis
    return entry


def _arguments(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns AIMET's description of the simulation, with the widest bits of all sites."""
    weights = [r for r in rows if r.sort == "weight"]
    activations = [r for r in rows if r.sort == "activation"]
    return {
        "activation_bitwidth": max((_bits(r) for r in activations), default=8),
        "dtype": "int",
        "is_symmetric": all(_symmetric(r) for r in weights),
        "param_bitwidth": max((_bits(r) for r in weights), default=8),
        "per_channel_quantization": any(r.axis is not None for r in weights),
        "quant_scheme": "post_training_tf",
    }


def _write_061(rows: Sequence[Row]) -> dict[str, Any]:
    arguments = {k: str(v) if isinstance(v, bool) else v for k, v in _arguments(rows).items()}
    return {
        "version": "0.6.1",
        "activation_encodings": {r.tensor: _entries_061(r) for r in rows if not r.stored},
        "param_encodings": {r.tensor: _entries_061(r) for r in rows if r.stored},
        "quantizer_args": arguments,
    }


def _write_100(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "version": "1.0.0",
        "producer": "qtrace",
        "activation_encodings": [_entry_100(r) for r in rows if not r.stored],
        "param_encodings": [_entry_100(r) for r in rows if r.stored],
        "quantizer_args": _arguments(rows),
        "excluded_layers": [],
    }


def _write_200(rows: Sequence[Row]) -> dict[str, Any]:
    return {"version": "2.0.0", "producer": "qtrace", "encodings": [_entry_200(r) for r in rows]}


def _kind(version: str, document: Callable[[Sequence[Row]], dict[str, Any]]) -> ParameterFile:
    def write(rows: Sequence[Row]) -> str:
        for row in rows:
            _check(row, version)
        return f"{json.dumps(document(rows), indent=1)}\n"

    return ParameterFile(f"{_TITLE} {version}", ".encodings", write)


AIMET_061 = _kind("0.6.1", _write_061)
AIMET_100 = _kind("1.0.0", _write_100)
AIMET_200 = _kind("2.0.0", _write_200)
