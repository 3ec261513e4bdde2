"""Paddings: numbers that stand for infinity become the ends of the grids whose integers are padded."""

from __future__ import annotations

import numpy as np

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import CallFunction
from qtrace.preparation.model import QuantizedModel

__all__ = ["limit_paddings"]


def limit_paddings(model: QuantizedModel) -> None:
    """Pads integers that a maximum reads with the lowest one, instead of a number far below all of them.

    The maximum is the same: no integer is smaller. A runtime has no other number for the padding, and some
    fail on one that its scale does not hold. For a minimum, the padding is the largest integer.

    Args:
        model: a calibrated model; the arguments of its paddings are changed in place.
    """
    with GraphEditor(model.module, renews_record=True) as editor:
        for name, qparams in model.carried_qparams().items():
            expr = model.nodes[name].expr
            call = ops.read(expr)
            value = 0.0 if call is None or call.kind != "pad" else call.attrs.get("value", 0.0)
            if not value or not isinstance(expr, CallFunction):
                continue
            scheme, zero_point = qparams.scheme, qparams.zero_point.astype(np.int64)
            low = (scheme.qmin - zero_point) * qparams.scale
            high = (scheme.qmax - zero_point) * qparams.scale
            limited = np.clip(np.float32(value), np.float32(low.min()), np.float32(high.max()))
            editor.set_argument(expr, "constant_value", float(limited))
