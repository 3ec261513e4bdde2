"""The steps of recurrent cells, forwards on any tensors and backwards in numpy.

The gates of a cell are rows of its weights, one block after the other: ``order`` names the blocks. Formulas:
LSTM, Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000; GRU, Cho et al. 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import megengine.functional as F
import numpy as np


class Direction(NamedTuple):
    """The weights of one direction of a layer, with one row for each value of each gate.

    Attributes:
        input: the weight of the input, (rows, inputs).
        hidden: the weight of the hidden state, (rows, hidden).
        input_bias: the bias of the first product, (rows,); None without biases.
        hidden_bias: the bias of the second product; None without biases.
    """

    input: Any
    hidden: Any
    input_bias: Any
    hidden_bias: Any


class _Math(Protocol):
    """The functions that a step calls, of numpy or of MegEngine."""

    def sigmoid(self, x: Any) -> Any: ...

    def tanh(self, x: Any) -> Any: ...

    def relu(self, x: Any) -> Any: ...

    def product(self, x: Any, weight: Any, bias: Any) -> Any: ...


class _Arrays:
    def sigmoid(self, x: Any) -> Any:
        return 0.5 * np.tanh(0.5 * x) + 0.5

    def tanh(self, x: Any) -> Any:
        return np.tanh(x)

    def relu(self, x: Any) -> Any:
        return np.maximum(x, 0)

    def product(self, x: Any, weight: Any, bias: Any) -> Any:
        result = x @ weight.T
        return result if bias is None else result + bias


class _Tensors:
    def sigmoid(self, x: Any) -> Any:
        return F.sigmoid(x)

    def tanh(self, x: Any) -> Any:
        return F.tanh(x)

    def relu(self, x: Any) -> Any:
        return F.relu(x)

    def product(self, x: Any, weight: Any, bias: Any) -> Any:
        return F.linear(x, weight, bias)


ARRAYS: _Math = _Arrays()
TENSORS: _Math = _Tensors()


class CellStep(NamedTuple):
    """The result of a step.

    Attributes:
        hidden: the new hidden state, (samples, hidden).
        cell: the new cell state of an LSTM; None for other cells.
        saved: what the step back needs.
    """

    hidden: Any
    cell: Any
    saved: tuple[Any, ...]


class StepBack(NamedTuple):
    """The gradients that a step back gives.

    Attributes:
        gates: with respect to the product of the input and its bias, (samples, rows).
        products: with respect to the product of the state and its bias, for each block of rows.
        operands: what each block multiplies: the hidden state, or a part of it.
        hidden: with respect to the hidden state before the step.
        cell: with respect to the cell state before the step; None for cells without one.
    """

    gates: np.ndarray
    products: Sequence[np.ndarray]
    operands: Sequence[np.ndarray]
    hidden: np.ndarray
    cell: np.ndarray | None


class Cell(Protocol):
    """The computation of one step, and its gradients."""

    @property
    def gates(self) -> int:
        """The number of blocks of rows."""

    def step(self, m: _Math, gates: Any, hidden: Any, cell: Any, weights: Direction) -> CellStep:
        """Computes a step from the product of the input, and the states before it."""

    def back(
        self, saved: tuple[Any, ...], hidden: np.ndarray, cell: np.ndarray, weights: Direction
    ) -> StepBack:
        """Computes the gradients of a step from the gradients of its results."""


def _blocks(x: Any, order: str) -> dict[str, Any]:
    """Returns the gates by their letter."""
    size = int(x.shape[-1]) // len(order)
    return {letter: x[:, i * size : (i + 1) * size] for i, letter in enumerate(order)}


@dataclass(frozen=True)
class Lstm:
    """A long short-term memory.

    Attributes:
        order: the order of input (i), forget (f), cell (g) and output (o) gate.
    """

    order: str = "ifgo"
    gates = 4

    def step(self, m: _Math, gates: Any, hidden: Any, cell: Any, weights: Direction) -> CellStep:
        """Computes ``c = f * c + i * g`` and ``h = o * tanh(c)``."""
        parts = _blocks(gates + m.product(hidden, weights.hidden, weights.hidden_bias), self.order)
        i, f, o = (m.sigmoid(parts[letter]) for letter in "ifo")
        g = m.tanh(parts["g"])
        new = f * cell + i * g
        squashed = m.tanh(new)
        return CellStep(o * squashed, new, (hidden, cell, i, f, g, o, squashed))

    def back(
        self, saved: tuple[Any, ...], hidden: np.ndarray, cell: np.ndarray, weights: Direction
    ) -> StepBack:
        """Computes the gradients of a step."""
        before, state, i, f, g, o, squashed = saved
        new = cell + hidden * o * (1 - squashed * squashed)
        parts = {
            "i": new * g * i * (1 - i),
            "f": new * state * f * (1 - f),
            "g": new * i * (1 - g * g),
            "o": hidden * squashed * o * (1 - o),
        }
        gates = np.concatenate([parts[letter] for letter in self.order], axis=1)
        return StepBack(gates, [gates], [before], gates @ weights.hidden, new * f)


@dataclass(frozen=True)
class Gru:
    """A gated recurrent unit, whose gates are update (z), reset (r) and the new state (n), in this order.

    Attributes:
        reset_after: whether the reset gate multiplies the product of the state, as in torch, or the state.
    """

    reset_after: bool = True
    gates = 3

    def step(self, m: _Math, gates: Any, hidden: Any, cell: Any, weights: Direction) -> CellStep:
        """Computes ``h = (1 - z) * n + z * h``."""
        size = int(hidden.shape[-1])
        known = _blocks(gates, "zrn")
        if self.reset_after:
            parts = _blocks(m.product(hidden, weights.hidden, weights.hidden_bias), "zrn")
        else:
            bias = weights.hidden_bias
            product = m.product(
                hidden, weights.hidden[: 2 * size], None if bias is None else bias[: 2 * size]
            )
            parts = _blocks(product, "zr")
        z, r = (m.sigmoid(known[letter] + parts[letter]) for letter in "zr")
        if self.reset_after:
            inner, operand = parts["n"], hidden
            n = m.tanh(known["n"] + r * inner)
        else:
            operand, bias = r * hidden, weights.hidden_bias
            inner = m.product(operand, weights.hidden[2 * size :], None if bias is None else bias[2 * size :])
            n = m.tanh(known["n"] + inner)
        return CellStep((1 - z) * n + z * hidden, None, (hidden, z, r, n, inner, operand))

    def back(
        self, saved: tuple[Any, ...], hidden: np.ndarray, cell: np.ndarray, weights: Direction
    ) -> StepBack:
        """Computes the gradients of a step."""
        before, z, r, n, inner, operand = saved
        size = before.shape[-1]
        new = hidden * (1 - z) * (1 - n * n)
        update = hidden * (before - n) * z * (1 - z)
        first, last = weights.hidden[: 2 * size], weights.hidden[2 * size :]
        if self.reset_after:
            reset, product = new * inner * r * (1 - r), new * r
            carried = product @ last
        else:
            product = new
            through = product @ last
            reset, carried = through * before * r * (1 - r), through * r
        pair = np.concatenate([update, reset], axis=1)
        gates = np.concatenate([pair, new], axis=1)
        return StepBack(gates, [pair, product], [before, operand], hidden * z + carried + pair @ first, None)


@dataclass(frozen=True)
class Rnn:
    """An Elman cell.

    Attributes:
        nonlinearity: ``tanh`` or ``relu``.
    """

    nonlinearity: str = "tanh"
    gates = 1

    def step(self, m: _Math, gates: Any, hidden: Any, cell: Any, weights: Direction) -> CellStep:
        """Computes ``h = tanh(W x + R h)``, or relu of it."""
        inner = gates + m.product(hidden, weights.hidden, weights.hidden_bias)
        new = m.relu(inner) if self.nonlinearity == "relu" else m.tanh(inner)
        return CellStep(new, None, (hidden, new))

    def back(
        self, saved: tuple[Any, ...], hidden: np.ndarray, cell: np.ndarray, weights: Direction
    ) -> StepBack:
        """Computes the gradients of a step."""
        before, new = saved
        gates = hidden * (new > 0 if self.nonlinearity == "relu" else 1 - new * new)
        return StepBack(gates, [gates], [before], gates @ weights.hidden, None)
