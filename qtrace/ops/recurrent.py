"""Recurrent layers and MegEngine's attention: ops whose inner products are not nodes of the graph."""

from __future__ import annotations

import math
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph import recurrent
from qtrace.graph.types import CallFunction, Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops.arguments import arguments, children, tensors
from qtrace.ops.base import OpRule, Reading, Role, op_rule

__all__ = ["RULES"]

_STATES = ("hidden", "cell")
_WEIGHTS = ("weights", "weight", "recurrence")


def _read(expr: Expr) -> Reading:
    return Reading(tuple(n for n in children((expr.args, expr.kwargs)) if is_float_tensor(n)))


def _recurrent(expr: Expr) -> Reading:
    """Reads a layer.

    Its attributes are the attributes of the function that prepare writes for it, parameters included, and
    ``multiplied``, the number of weights that a step multiplies by.
    """
    if not isinstance(expr, CallFunction):
        module = owner(expr)
        kind = module.kind if isinstance(module, recurrent.OnnxRecurrent) else ""
        return Reading(_read(expr).inputs, {"multiplied": _multiplied(module)}, kind=kind)
    a: dict[str, Any] = dict(arguments(expr))
    inputs = tensors(a["x"], *(a.get(name) for name in _STATES))
    count = sum(_size(a[name]) for name in _WEIGHTS if name in a)
    if "weights" in a and a["bias"]:
        count -= _biases(expr, a)
    return Reading(inputs, {**a, "multiplied": count})


def _size(weight: TensorNode) -> int:
    return math.prod(int(n) for n in weight.shape)


def _biases(expr: CallFunction, a: dict[str, Any]) -> int:
    """Counts the biases in the one parameter of a stack."""
    gates = 4 if expr.func is recurrent.stacked_lstm else 1
    return int(2 * gates * a["hidden_size"] * a["num_layers"] * (2 if a["bidirectional"] else 1))


def _multiplied(module: Any) -> int:
    """Counts the weights of MegEngine's own layers and cells."""
    if isinstance(module, (M.LSTMCell, M.RNNCell)):
        return sum(int(w.shape[0]) * int(w.shape[1]) for w in (module.weight_ih, module.weight_hh))
    if isinstance(module, recurrent.OnnxRecurrent):
        return sum(int(w.size) for w in (module.weight, module.recurrence))
    rows, columns = (int(n) for n in module._flatten_weights.shape)
    return rows * (columns - (2 * module.num_layers * module.num_directions if module.bias else 0))


_WHY = "its states would carry each rounding from step to step"
_ONE = "it is one op whose products are not nodes of the graph: write it with linear layers to quantize it"
_ATTENTION = (M.MultiHeadAttention, F.nn.multi_head_attention)


def _rule(kind: str, *callees: Any) -> OpRule:
    return op_rule(kind, Role.FLOAT, _recurrent, *callees, reason=_WHY)


RULES = (
    _rule("rnn", M.RNN, M.RNNCell, recurrent.rnn, recurrent.stacked_rnn),
    _rule("lstm", M.LSTM, M.LSTMCell, recurrent.lstm, recurrent.stacked_lstm),
    _rule("gru", recurrent.gru, recurrent.OnnxRecurrent),
    op_rule("multi_head_attention", Role.FLOAT, _read, *_ATTENTION, reason=_ONE),
)
