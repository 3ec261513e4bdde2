"""Recurrent layers: the values of MegEngine's kernels, and the gradients that MegEngine lacks."""

from __future__ import annotations

import itertools
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager

import qtrace
from qtrace.data.batches import evaluating
from qtrace.gradients import fast_gradients
from qtrace.gradients.cells import Cell, Gru, Lstm, Rnn
from qtrace.gradients.recurrent import Stack, checked_shapes, layer_forward, onnx_weights, run
from tests.each import each_of
from tests.nets import net

RNG = np.random.default_rng(0)
DIRECTIONS = [(False,), (True,), (False, True)]


def _random(*shape: int, scale: float = 1.0) -> mge.Tensor:
    return mge.Tensor((RNG.standard_normal(shape) * scale).astype(np.float32))


def _slope(compute: Any, values: mge.Tensor, place: tuple[int, ...]) -> float:
    """Returns a central difference of ``compute()`` with respect to one value of a tensor."""
    before, ends = values.numpy().copy(), []
    for sign in (1, -1):
        moved = before.copy()
        moved[place] += sign * 1e-2
        values._reset(type(values)(moved))
        ends.append(float(compute().numpy()))
    values._reset(type(values)(before))
    return (ends[0] - ends[1]) / 2e-2


@each_of("layers", [1, 2])
@each_of("kind", [M.LSTM, M.RNN])
def test_a_stack_has_the_values_of_its_kernel(kind: type[M.Module], layers: int) -> None:
    for bias, two in itertools.product((True, False), repeat=2):
        layer = kind(3, 5, num_layers=layers, bias=bias, bidirectional=two)
        layer.eval()
        x, states = _random(6, 4, 3), [_random(layers * (1 + two), 4, 5) for _ in range(2)]
        hx = tuple(states) if kind is M.LSTM else states[0]
        expected, ends = layer(x, hx)
        y, last = layer_forward(layer, x, hx)
        np.testing.assert_allclose(y.numpy(), expected.numpy(), atol=1e-6)
        for a, b in zip(*((v if kind is M.LSTM else (v,)) for v in (last, ends)), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("cell", [Lstm("iofg"), Gru(True), Gru(False), Rnn(), Rnn("relu")])
def test_gradients_are_those_of_differences(cell: Cell, directions: tuple[bool, ...]) -> None:
    count, rows = len(directions), cell.gates * 3
    parameters = [
        mge.Parameter(_random(*shape, scale=0.5))
        for shape in ((count, rows, 2), (count, rows, 3), (count, 2 * rows))
    ]
    x, hidden = _random(4, 2, 2), _random(count, 2, 3)
    state = _random(count, 2, 3) if isinstance(cell, Lstm) else None
    stack = Stack(cell, onnx_weights(count), directions)
    factors = [_random(4, 2, 3 * count), _random(count, 2, 3), _random(count, 2, 3)]

    def loss() -> mge.Tensor:
        results = run(stack, x, parameters, hidden, state)
        return sum((a * b).sum() for a, b in zip(results, factors))  # noqa: B905

    leaves = [x, *parameters, hidden, *([] if state is None else [state])]
    manager = GradManager().attach(leaves)
    with manager:
        manager.backward(loss())
    for leaf in leaves:
        place = tuple(int(RNG.integers(n)) for n in leaf.shape)
        assert leaf.grad.numpy()[place] == pytest.approx(_slope(loss, leaf, place), abs=2e-2, rel=2e-2)


def test_a_result_that_nothing_reads_has_no_gradient() -> None:
    layer, x = M.LSTM(3, 4, num_layers=2, bidirectional=True), _random(5, 2, 3)
    zeros = F.zeros((4, 2, 4))
    manager = GradManager().attach([x, layer._flatten_weights])

    def last() -> mge.Tensor:
        return layer_forward(layer, x, (zeros, zeros))[1][1].sum()

    with manager:
        manager.backward(last())
    for leaf in (x, layer._flatten_weights):
        place = tuple(int(n) - 1 for n in leaf.shape)
        assert leaf.grad.numpy()[place] == pytest.approx(_slope(last, leaf, place), abs=1e-3)


@each_of("kind", [M.LSTM, M.RNN, M.LSTMCell, M.RNNCell])
def test_a_float_network_trains_with_right_gradients(kind: type[M.Module]) -> None:
    layer = kind(4, 6)
    x = _random(3, 4) if kind.__name__.endswith("Cell") else _random(3, 2, 4)

    def loss() -> mge.Tensor:
        result = layer(x)
        while isinstance(result, (tuple, list)):
            result = result[0]
        return (result**2).sum()

    layer.eval()
    expected = float(loss().numpy())
    # MegEngine's layers also list the parameters of cells that they do not compute with.
    parameters = [layer._flatten_weights] if kind in (M.LSTM, M.RNN) else list(layer.parameters())
    manager = GradManager().attach(parameters)
    with fast_gradients(layer), manager:
        manager.backward(loss())
        assert float(loss().numpy()) == pytest.approx(expected, rel=1e-5)
    for parameter in parameters:
        place = tuple(int(n) // 2 for n in parameter.shape)
        assert parameter.grad.numpy()[place] == pytest.approx(_slope(loss, parameter, place), abs=2e-3)
    assert not {"apply_op", "forward"} & set(vars(layer))


@pytest.mark.parametrize("kind", [M.LSTMCell, M.RNNCell, M.LSTM, M.RNN])
def test_a_network_with_it_is_prepared_by_default(kind: type[M.Module]) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        result = self.cell(self.first(x))
        while isinstance(result, (tuple, list)):
            result = result[0]
        return self.last(result)

    module = net(forward, first=M.Linear(8, 8), cell=kind(8, 16), last=M.Linear(16, 4))
    x = _random(2, 8) if kind.__name__.endswith("Cell") else _random(3, 2, 8)
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False))
    np.testing.assert_allclose(prepared(x).numpy(), module(x).numpy(), rtol=1e-5, atol=1e-5)


def test_a_state_of_a_wrong_shape_is_refused_before_a_kernel_reads_it() -> None:
    layer, x = M.LSTM(3, 4), _random(5, 2, 3)
    wrong = F.zeros((1, 3, 4))
    with checked_shapes(), pytest.raises(ValueError, match=r"a state \(1, 3, 4\), where \(1, 2, 4\) belongs"):
        layer(x, (wrong, wrong))
    with pytest.raises(ValueError, match="a state"):
        layer_forward(layer, x, (wrong, wrong))
    with checked_shapes(), pytest.raises(ValueError, match="reads \\(5, 2, 2\\)"):
        layer(_random(5, 2, 2))


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("kind", [M.LSTM, M.RNN])
def test_an_input_of_another_width_is_refused(kind: type[M.Module], two: bool) -> None:
    cell, last = kind(8, 6, num_layers=2, bidirectional=two), M.Linear(12 if two else 6, 4)
    module = net(lambda self, x: self.last(self.cell(x)[0]), cell=cell, last=last)
    traced = qtrace.trace(module, _random(5, 3, 8), check=False)
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    for width in (6, 7, 9):
        sentence = rf"a recurrent layer of 8 values reads \(5, 3, {width}\)"
        with pytest.raises(ValueError, match=sentence):
            prepared(_random(5, 3, width))
        with pytest.raises(qtrace.QtraceError, match=sentence):
            qtrace.calibrate(prepared, [_random(5, 3, width)], progress=False)
        with evaluating(traced), pytest.raises(ValueError, match=sentence):
            traced(_random(5, 3, width))
    with pytest.raises(ValueError, match="a sequence without steps"):
        prepared(mge.Tensor(np.zeros((0, 3, 8), np.float32)))


def test_a_layer_that_keeps_its_wrong_gradient_is_named() -> None:
    module = net(lambda self, x: self.cell(x)[0], cell=M.LSTM(8, 6, proj_size=3))
    with pytest.warns(UserWarning, match="cell is an LSTM with proj_size"), fast_gradients(module):
        pass
