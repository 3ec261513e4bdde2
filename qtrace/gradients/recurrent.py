"""Recurrent layers with gradients: MegEngine 1.13 has a wrong one for LSTM on CPU, and none for LSTMCell.

Layers are computed in numpy, step by step, and backwards through time. Under ``jit.trace`` and in a trace of
a module they are MegEngine's functions, unrolled over the steps of the traced input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.autodiff import Function
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.jit.tracing import is_tracing
from megengine.module import LSTM, RNN, LSTMCell, RNNCell

from qtrace.gradients.cells import ARRAYS, TENSORS, Cell, Direction, Lstm, Rnn

# The layers of a stack, each with its directions.
Layers = list[list[Direction]]
Cut = Callable[[Sequence[Any]], Layers]


@dataclass(frozen=True)
class Stack:
    """A stack of recurrent layers.

    Attributes:
        cell: the computation of a step.
        cut: cuts the parameters into the weights of each layer and direction; it only indexes and reshapes,
            so that it cuts arrays into views.
        backwards: for each direction whether it runs from the last step to the first.
    """

    cell: Cell
    cut: Cut
    backwards: tuple[bool, ...]


def stacked_weights(
    gates: int, input_size: int, hidden_size: int, num_layers: int, directions: int, bias: bool
) -> Cut:
    """Returns the cut of the one parameter in which MegEngine's LSTM and RNN keep all their weights."""
    rows = gates * hidden_size

    def cut(parameters: Sequence[Any]) -> Layers:
        flat, place = parameters[0].reshape(-1), 0

        def take(*shape: int) -> Any:
            nonlocal place
            begin, place = place, place + int(np.prod(shape))
            return flat[begin:place].reshape(*shape)

        layers: Layers = []
        for layer in range(num_layers):
            inputs = input_size if layer == 0 else directions * hidden_size
            layers.append([])
            for _ in range(directions):
                weights = take(rows, inputs), take(rows, hidden_size)
                layers[-1].append(Direction(*weights, *((take(rows), take(rows)) if bias else (None, None))))
        return layers

    return cut


def onnx_weights(directions: int) -> Cut:
    """Returns the cut of the parameters W, R and B of ONNX's recurrent ops; B may be missing."""

    def cut(parameters: Sequence[Any]) -> Layers:
        weight, hidden = parameters[:2]
        rows = int(weight.shape[1])
        layer = []
        for d in range(directions):
            biases: tuple[Any, Any] = (None, None)
            if len(parameters) > 2:
                biases = parameters[2][d][:rows], parameters[2][d][rows:]
            layer.append(Direction(weight[d], hidden[d], *biases))
        return [layer]

    return cut


def run(
    stack: Stack, x: Tensor, parameters: Sequence[Tensor], hidden: Tensor | None, cell: Tensor | None
) -> tuple[Tensor, ...]:
    """Runs a stack of recurrent layers over a sequence.

    Args:
        stack: the layers.
        x: the input, (steps, samples, values).
        parameters: the parameters that the cut of the stack takes.
        hidden: the hidden state before the first step of each layer and direction, (layers * directions,
            samples, hidden); None for zeros.
        cell: the cell state of an LSTM; None for zeros.

    Returns:
        The hidden states of the last layer, (steps, samples, directions * hidden), the last hidden state of
        each layer and direction, and for an LSTM the last cell states.
    """
    if is_tracing() or is_tracing_module():
        return _unrolled(stack, x, parameters, hidden, cell)
    if not isinstance(x, RawTensor):
        raise TypeError("a recurrent layer runs on Tensors")
    states = tuple(state for state in (hidden, cell) if state is not None)
    function = _Run(stack, len(parameters), hidden is not None, cell is not None)
    return tuple(function(x, *parameters, *states))


def _unrolled(
    stack: Stack, x: Tensor, parameters: Sequence[Tensor], hidden: Tensor | None, cell: Tensor | None
) -> tuple[Tensor, ...]:
    layers = stack.cut(parameters)
    size = int(layers[0][0].hidden.shape[1])
    shape = (len(layers) * len(stack.backwards), int(x.shape[1]), size)
    _check_shapes(x, int(layers[0][0].input.shape[1]), (hidden, cell), shape)
    zeros = F.zeros((x.shape[1], size))
    finals: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer in layers:
        outputs = []
        for weights, backwards in zip(layer, stack.backwards, strict=True):
            place = len(finals[0])
            states = [zeros if state is None else state[place] for state in (hidden, cell)]
            gates = F.linear(x, weights.input, weights.input_bias)
            steps = list(range(int(x.shape[0])))
            sequence: list[Any] = [None] * len(steps)
            for t in reversed(steps) if backwards else steps:
                step = stack.cell.step(TENSORS, gates[t], states[0], states[1], weights)
                states, sequence[t] = [step.hidden, step.cell], step.hidden
            outputs.append(F.stack(sequence))
            finals[0].append(states[0])
            finals[1].append(states[1])
        x = outputs[0] if len(outputs) == 1 else F.concat(outputs, axis=2)
    kept = finals if isinstance(stack.cell, Lstm) else finals[:1]
    return x, *(F.stack(states) for states in kept)


@dataclass
class _Pass:
    """One direction of a layer, as it ran.

    Attributes:
        x: the input of the layer.
        saved: what each step has saved, in the order of the steps of the sequence.
    """

    x: np.ndarray
    saved: list[tuple[Any, ...]]


class _Run(Function):
    """One run of a stack in numpy; the gradients go backwards through time."""

    def __init__(self, stack: Stack, parameters: int, has_hidden: bool, has_cell: bool) -> None:
        super().__init__()
        self.stack, self.count, self.given = stack, parameters, (has_hidden, has_cell)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        self.parameters = [_array(tensor) for tensor in others[: self.count]]
        states = [_array(tensor) for tensor in others[self.count :]]
        self.layers = self.stack.cut(self.parameters)
        self.passes: list[_Pass] = []
        value = _array(x)
        size = self.layers[0][0].hidden.shape[1]
        shape = (len(self.layers) * len(self.stack.backwards), value.shape[1], size)
        _check_shapes(value, self.layers[0][0].input.shape[1], states, shape)
        given = iter(states)
        first = [next(given) if there else np.zeros(shape, np.float32) for there in self.given]
        self.last = [np.empty(shape, np.float32), np.zeros(shape, np.float32)]
        place = 0
        for layer in self.layers:
            outputs = []
            for weights, backwards in zip(layer, self.stack.backwards, strict=True):
                outputs.append(self._direction(value, weights, backwards, [s[place] for s in first], place))
                place += 1
            value = np.concatenate(outputs, axis=2)
        finals = self.last if isinstance(self.stack.cell, Lstm) else self.last[:1]
        return tuple(Tensor(array) for array in (value, *finals))

    def _direction(
        self, x: np.ndarray, weights: Direction, backwards: bool, states: list[Any], place: int
    ) -> np.ndarray:
        gates = ARRAYS.product(x.reshape(-1, x.shape[-1]), weights.input, weights.input_bias)
        gates = gates.reshape(*x.shape[:2], -1)
        result = np.empty((*x.shape[:2], weights.hidden.shape[1]), np.float32)
        saved: list[Any] = [None] * len(x)
        for t in _order(len(x), backwards):
            step = self.stack.cell.step(ARRAYS, gates[t], states[0], states[1], weights)
            states, result[t], saved[t] = [step.hidden, step.cell], step.hidden, step.saved
        for last, state in zip(self.last, states, strict=True):
            if state is not None:
                last[place] = state
        self.passes.append(_Pass(x, saved))
        return result

    def backward(self, *gradients: Tensor | None) -> tuple[Tensor, ...]:
        results = [None if g is None else _array(g) for g in gradients]
        ends = [np.zeros_like(last) for last in self.last]
        for end, given in zip(ends, results[1:], strict=False):
            if given is not None:
                end += given
        own = [np.zeros_like(array) for array in self.parameters]
        into = self.stack.cut(own)
        shape = (*self.passes[0].x.shape[:2], ends[0].shape[2] * len(self.stack.backwards))
        dy = np.zeros(shape, np.float32) if results[0] is None else results[0]
        place = len(self.passes)
        for layer, grads in zip(reversed(self.layers), reversed(into), strict=True):
            parts = np.split(dy, len(layer), axis=2)
            place -= len(layer)
            dy = np.zeros_like(self.passes[place].x)
            for d, backwards in enumerate(self.stack.backwards):
                last = [array[place + d] for array in ends]
                dx, states = self._back(self.passes[place + d], parts[d], last, layer[d], grads[d], backwards)
                dy = dy + dx
                for array, state in zip(ends, states, strict=True):
                    array[place + d] = 0 if state is None else state
        first = [end for end, there in zip(ends, self.given, strict=True) if there]
        return tuple(Tensor(array) for array in (dy, *own, *first))

    def _back(
        self,
        ran: _Pass,
        dy: np.ndarray,
        ends: list[Any],
        weights: Direction,
        into: Direction,
        backwards: bool,
    ) -> tuple[np.ndarray, list[Any]]:
        """Goes back through the steps; returns the gradients of the input and of the first states."""
        steps = len(ran.x)
        gates = np.empty((*ran.x.shape[:2], weights.input.shape[0]), np.float32)
        hidden, cell = ends
        for t in _order(steps, not backwards):
            step = self.stack.cell.back(ran.saved[t], hidden + dy[t], cell, weights)
            gates[t], hidden, cell = step.gates, step.hidden, step.cell
            row = 0
            for product, operand in zip(step.products, step.operands, strict=True):
                rows = slice(row, row + product.shape[1])
                into.hidden[rows] += product.T @ operand
                if into.hidden_bias is not None:
                    into.hidden_bias[rows] += product.sum(axis=0)
                row += product.shape[1]
        flat = gates.reshape(-1, gates.shape[-1])
        into.input[...] = flat.T @ ran.x.reshape(-1, ran.x.shape[-1])
        if into.input_bias is not None:
            into.input_bias[...] = flat.sum(axis=0)
        return (flat @ weights.input).reshape(ran.x.shape), [hidden, cell]


def _order(steps: int, backwards: bool) -> Iterator[int]:
    return reversed(range(steps)) if backwards else iter(range(steps))


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = np.ascontiguousarray(tensor.numpy())
    return array


# MegEngine's own modules


@contextmanager
def checked_shapes() -> Iterator[None]:
    """Lets MegEngine's LSTM and RNN refuse inputs and states of wrong shapes within the block.

    Their kernels do not look at the shapes: they read and write past the end of such tensors.
    """
    originals = {cls: cls.apply_op for cls in (LSTM, RNN)}

    def checked(module: LSTM | RNN, x: Tensor, hx: Any) -> Any:
        shape = (module.num_layers * module.num_directions, int(x.shape[1]), module.hidden_size)
        _check_shapes(x, module.input_size, hx if isinstance(hx, (tuple, list)) else (hx,), shape)
        return originals[LSTM if isinstance(module, LSTM) else RNN](module, x, hx)

    try:
        for cls in originals:
            cls.apply_op = checked
        yield
    finally:
        for cls, original in originals.items():
            cls.apply_op = original


def _check_shapes(x: Any, values: int, states: Iterable[Any], shape: tuple[int, ...]) -> None:
    """Raises a ValueError for an input or a state of a wrong shape."""
    if len(x.shape) != 3 or int(x.shape[2]) != values:
        raise ValueError(
            f"a recurrent layer of {values} values reads {tuple(map(int, x.shape))}: its input has steps, "
            f"samples and {values} values"
        )
    if int(x.shape[0]) == 0:
        raise ValueError("a recurrent layer reads a sequence without steps: give one step or more")
    for state in states:
        if state is not None and tuple(map(int, state.shape)) != shape:
            given = tuple(map(int, state.shape))
            raise ValueError(f"a recurrent layer reads a state {given}, where {shape} belongs")


def layer_forward(module: LSTM | RNN, x: Tensor, hx: Any = None) -> Any:
    """Computes MegEngine's LSTM or RNN in eval mode: what its ``apply_op`` returns."""
    is_lstm = isinstance(module, LSTM)
    cell: Cell = Lstm() if is_lstm else Rnn(str(module.nonlinearity).lower())
    sizes = (module.input_size, module.hidden_size, module.num_layers, module.num_directions)
    cut = stacked_weights(cell.gates, *sizes, bool(module.bias))
    stack = Stack(cell, cut, (False, True)[: module.num_directions])
    hidden, state = hx if is_lstm else (hx, None)
    y, *last = run(stack, x, [module._flatten_weights], hidden, state)
    return y, (tuple(last) if is_lstm else last[0])


def cell_forward(module: LSTMCell | RNNCell, x: Tensor, hx: Any = None) -> Any:
    """Computes MegEngine's LSTMCell or RNNCell by functions, which have gradients."""
    is_lstm = isinstance(module, LSTMCell)
    zeros = F.zeros((x.shape[0], module.hidden_size))
    states = (zeros, zeros) if hx is None else tuple(hx) if is_lstm else (hx, zeros)
    biases = (module.bias_ih.reshape(-1), module.bias_hh.reshape(-1)) if module.bias else (None, None)
    weights = Direction(module.weight_ih, module.weight_hh, *biases)
    cell: Cell = Lstm() if is_lstm else Rnn(str(module.nonlinearity).lower())
    gates = F.linear(x, weights.input, weights.input_bias)
    step = cell.step(TENSORS, gates, states[0], states[1], weights)
    return (step.hidden, step.cell) if is_lstm else step.hidden
