"""mgeconvert's JSON of quantization parameters, with numbers as numbers.

mgeconvert itself has one scale for each tensor. An entry with a scale for each channel has lists of scales
and zero points. Its key ``axis`` is the axis of the channels, in the layout of the model next to the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.export.parameters import ParameterFile, Row, refuse_floating

_TITLE = "mgeconvert's JSON"
_INT32 = np.iinfo(np.int32)


def _entry(row: Row) -> dict[str, Any]:
    refuse_floating(row, _TITLE)
    scheme = row.scheme
    if scheme is None:
        kind, low, high = "int32", int(_INT32.min), int(_INT32.max)
    else:
        storage = "int" if scheme.signed else "uint"
        kind = f"{storage}{scheme.bits}{'_narrow' if scheme.narrow else ''}"
        low, high = scheme.qmin, scheme.qmax
    symmetric = scheme is None or (scheme.symmetric and scheme.signed)
    return {
        "dtype": kind,
        "qmin": low,
        "qmax": high,
        "scale": row.scale.tolist(),
        "zero_point": None if symmetric else row.zero_point.tolist(),
        "is_weight": row.stored,
        **({} if row.axis is None else {"axis": row.axis}),
    }


def _write(rows: Sequence[Row]) -> str:
    return f"{json.dumps({row.tensor: _entry(row) for row in rows}, indent=1)}\n"


MGECONVERT = ParameterFile(_TITLE, "_quant_params.json", _write)
