"""Recurrent layers in a form that has a gradient on CPU.

MegEngine 1.13 has no working gradient for LSTMCell, and none for RNN in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
from megengine import Tensor
from megengine.module import RNN, LSTMCell, Module

__all__ = ["differentiable"]


def differentiable(module: Module) -> Callable[..., Any]:
    """Returns a function that computes ``module`` and has a gradient; ``module`` itself for other layers."""
    if isinstance(module, LSTMCell):
        return lambda x, hx=None: _lstm_cell(module, x, hx)
    if isinstance(module, RNN) and not module.training:
        return lambda *args: _in_training(module, args)
    return module


def _lstm_cell(cell: LSTMCell, x: Tensor, hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Computes the new hidden state and cell state (Hochreiter and Schmidhuber 1997) by functions."""
    gates = F.linear(x, cell.weight_ih, cell.bias_ih.reshape(-1))
    state = None
    if hx is not None:
        hidden, state = hx
        gates = gates + F.linear(hidden, cell.weight_hh)
    gates = gates + cell.bias_hh.reshape(-1)
    write, keep, value, read = F.split(gates, 4, axis=1)
    new = F.sigmoid(write) * F.tanh(value)
    if state is not None:
        new = new + F.sigmoid(keep) * state
    return F.sigmoid(read) * F.tanh(new), new


def _in_training(layer: RNN, args: tuple[Any, ...]) -> Any:
    """Calls a layer in training, without dropout."""
    dropout, layer.dropout, layer.training = layer.dropout, 0.0, True
    try:
        return layer(*args)
    finally:
        layer.dropout, layer.training = dropout, False
