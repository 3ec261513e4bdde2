"""mgeconvert's JSON of quantization parameters: one scale for each tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from qtrace.export.parameters.base import ParameterFile, refuse, refuse_floating
from qtrace.export.parameters.sites import Row

__all__ = ["KINDS"]

_TITLE = "mgeconvert's JSON"
_INT32 = 2**31


def _entry(row: Row) -> dict[str, Any]:
    refuse_floating(row, _TITLE)
    if row.axis is not None:
        raise refuse(row, _TITLE, "has one scale for each tensor", "set axis: null there")
    scheme = row.scheme
    if scheme is None:
        kind, low, high = "int32", -_INT32, _INT32 - 1
    else:
        storage = "int" if scheme.signed else "uint"
        kind = f"{storage}{scheme.bits}{'_narrow' if scheme.narrow else ''}"
        low, high = scheme.qmin, scheme.qmax
    symmetric = scheme is None or (scheme.symmetric and scheme.signed)
    return {
        "dtype": kind,
        "qmin": low,
        "qmax": high,
        "scale": row.scale.item(),
        "zero_point": None if symmetric else row.zero_point.item(),
        "is_weight": row.stored,
    }


def _write(rows: Sequence[Row]) -> str:
    return f"{json.dumps({row.tensor: _entry(row) for row in rows}, indent=1)}\n"


KINDS = {"mgeconvert": ParameterFile(_TITLE, "_quant_params.json", _write)}
