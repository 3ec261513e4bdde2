"""Recurrent layers and MegEngine's attention: modules whose inner products are not nodes of the graph."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M

from qtrace.graph.types import Expr
from qtrace.graph.walk import is_float_tensor
from qtrace.ops.base import OpRule, Reading, Role, Target, children

__all__ = ["RULES"]


def _read(expr: Expr) -> Reading | str:
    return Reading(tuple(n for n in children((expr.args, expr.kwargs)) if is_float_tensor(n)))


_WHY = "it is one op whose products are not nodes of the graph: write it with linear layers to quantize it"

RULES = (
    OpRule("rnn", Role.FLOAT, (Target(module=M.RNN), Target(module=M.RNNCell)), _read, _WHY),
    OpRule("lstm", Role.FLOAT, (Target(module=M.LSTM), Target(module=M.LSTMCell)), _read, _WHY),
    OpRule(
        "multi_head_attention",
        Role.FLOAT,
        (Target(module=M.MultiHeadAttention), Target(function=F.nn.multi_head_attention)),
        _read,
        _WHY,
    ),
)
