"""Recurrent layers and MegEngine's attention: modules whose inner products are not nodes of the graph."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.arguments import children
from qtrace.ops.base import Reading, Role, op_rule

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading:
    return Reading(tuple(n for n in children((expr.args, expr.kwargs)) if is_float_tensor(n)))


_WHY = "it is one op whose products are not nodes of the graph: write it with linear layers to quantize it"
_ATTENTION = (M.MultiHeadAttention, F.nn.multi_head_attention)

RULES = (
    op_rule("rnn", Role.FLOAT, _read, M.RNN, M.RNNCell, reason=_WHY),
    op_rule("lstm", Role.FLOAT, _read, M.LSTM, M.LSTMCell, reason=_WHY),
    op_rule("multi_head_attention", Role.FLOAT, _read, *_ATTENTION, reason=_WHY),
)
