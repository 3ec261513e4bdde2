"""Recurrent layers as functions of a graph: ONNX's layers, one layer a call, and MegEngine's stacks.

They have gradients, which MegEngine's own layers lack on CPU. `OnnxRecurrent` is the layer of an imported
graph. Saved models name functions and class, so that the names are part of the file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.module import Module
from megengine.traced_module import register_as_builtin, wrap

from qtrace.gradients import recurrent
from qtrace.gradients.cells import Cell, Gru, Lstm, Rnn

# Direction -> for each of its passes whether it runs from the last step to the first.
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@wrap
def lstm(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    direction: str = "forward",
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes ONNX's LSTM with its default activations.

    Args:
        x: the input, (steps, samples, values).
        weight: the weights of the input, (directions, 4 * hidden, values): input, output, forget, cell.
        recurrence: the weights of the hidden state, (directions, 4 * hidden, hidden).
        bias: the biases of both products, (directions, 8 * hidden); None for zeros.
        hidden: the first hidden state, (directions, samples, hidden); None for zeros.
        cell: the first cell state; None for zeros.
        direction: forward, reverse or bidirectional.

    Returns:
        All hidden states, (steps, directions, samples, hidden), the last ones, and the last cell states.
    """
    y, last, state = _layer(Lstm("iofg"), direction, x, (weight, recurrence, bias), hidden, cell)
    return y, last, state


@wrap
def gru(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    direction: str = "forward",
    linear_before_reset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes ONNX's GRU with its default activations; arguments and results are as for `lstm`.

    The gates are update, reset and hidden. With ``linear_before_reset`` the reset gate multiplies the product
    of the hidden state, as in torch, else the hidden state.
    """
    y, last = _layer(Gru(bool(linear_before_reset)), direction, x, (weight, recurrence, bias), hidden)
    return y, last


@wrap
def rnn(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    direction: str = "forward",
    nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """Computes ONNX's RNN with tanh or relu; arguments and results are as for `lstm`."""
    y, last = _layer(Rnn(nonlinearity), direction, x, (weight, recurrence, bias), hidden)
    return y, last


@wrap
def stacked_lstm(
    x: Tensor,
    weights: Tensor,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    hidden_size: int = 1,
    num_layers: int = 1,
    bias: bool = True,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes MegEngine's LSTM in eval mode.

    Args:
        x: the input, (steps, samples, values), or (samples, steps, values) if ``batch_first``.
        weights: the parameter ``_flatten_weights`` of the layer.
        hidden: the first hidden states, (layers * directions, samples, hidden); None for zeros.
        cell: the first cell states; None for zeros.
        hidden_size: the size of the hidden state.
        num_layers: the number of layers, each of which reads the hidden states of the one before.
        bias: whether there are biases.
        bidirectional: whether each layer runs in both directions.
        batch_first: whether the first axis of input and output is the batch axis.

    Returns:
        All hidden states of the last layer, the last ones of all layers, and the last cell states.
    """
    sizes = (hidden_size, num_layers, bias, bidirectional, batch_first)
    y, last, state = _stack(Lstm(), x, weights, (hidden, cell), *sizes)
    return y, last, state


@wrap
def stacked_rnn(
    x: Tensor,
    weights: Tensor,
    hidden: Tensor | None = None,
    hidden_size: int = 1,
    num_layers: int = 1,
    bias: bool = True,
    bidirectional: bool = False,
    batch_first: bool = False,
    nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """Computes MegEngine's RNN in eval mode; arguments and results are as for `stacked_lstm`."""
    sizes = (hidden_size, num_layers, bias, bidirectional, batch_first)
    y, last = _stack(Rnn(nonlinearity), x, weights, (hidden, None), *sizes)
    return y, last


def _layer(
    cell: Cell,
    direction: str,
    x: Tensor,
    weights: Sequence[Tensor | None],
    hidden: Tensor | None,
    state: Tensor | None = None,
) -> tuple[Tensor, ...]:
    backwards = DIRECTIONS[direction]
    stack = recurrent.Stack(cell, recurrent.onnx_weights(len(backwards)), backwards)
    y, *last = recurrent.run(stack, x, [w for w in weights if w is not None], hidden, state)
    steps, samples = x.shape[0], x.shape[1]
    split = F.reshape(y, (steps, samples, len(backwards), -1))
    return F.transpose(split, (0, 2, 1, 3)), *last


def _stack(
    cell: Cell,
    x: Tensor,
    weights: Tensor,
    states: tuple[Tensor | None, Tensor | None],
    hidden_size: int,
    num_layers: int,
    bias: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    backwards = DIRECTIONS["bidirectional" if bidirectional else "forward"]
    sequence = F.transpose(x, (1, 0, 2)) if batch_first else x
    # The width of the input equals the width of the weights: a cut by another one would shift all of them.
    columns = int(weights.shape[0]) * int(weights.shape[1]) // (cell.gates * hidden_size * len(backwards))
    own = hidden_size + 2 * bool(bias)
    values = columns - num_layers * own - (num_layers - 1) * len(backwards) * hidden_size
    cut = recurrent.stacked_weights(cell.gates, values, hidden_size, num_layers, len(backwards), bias)
    y, *last = recurrent.run(recurrent.Stack(cell, cut, backwards), sequence, [weights], *states)
    return (F.transpose(y, (1, 0, 2)) if batch_first else y), *last


class OnnxRecurrent(Module):
    """A recurrent layer of an imported graph, with the parameters of ONNX's op.

    Args:
        kind: ``lstm``, ``gru`` or ``rnn``.
        weight: the shape of the weights of the input.
        recurrence: the shape of the weights of the hidden state.
        bias: the shape of the biases; None for a layer without.
        direction: forward, reverse or bidirectional.
        linear_before_reset: of a GRU, see `gru`.
        nonlinearity: of an RNN, ``tanh`` or ``relu``.
    """

    def __init__(
        self,
        kind: str,
        weight: Sequence[int],
        recurrence: Sequence[int],
        bias: Sequence[int] | None = None,
        direction: str = "forward",
        linear_before_reset: bool = False,
        nonlinearity: str = "tanh",
    ) -> None:
        super().__init__()
        self.kind, self.direction = kind, direction
        self.linear_before_reset, self.nonlinearity = linear_before_reset, nonlinearity
        self.weight = Parameter(np.zeros(tuple(weight), np.float32))
        self.recurrence = Parameter(np.zeros(tuple(recurrence), np.float32))
        self.bias = None if bias is None else Parameter(np.zeros(tuple(bias), np.float32))

    def forward(self, x: Tensor, hidden: Tensor | None = None, cell: Tensor | None = None) -> Any:
        """Computes the results of `lstm`, `gru` or `rnn`."""
        weights = (self.weight, self.recurrence, self.bias)
        if self.kind == "lstm":
            return lstm(x, *weights, hidden, cell, self.direction)
        if self.kind == "gru":
            return gru(x, *weights, hidden, self.direction, self.linear_before_reset)
        return rnn(x, *weights, hidden, self.direction, self.nonlinearity)


register_as_builtin(OnnxRecurrent)
