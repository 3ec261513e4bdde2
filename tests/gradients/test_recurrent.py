"""Recurrent layers in a form with a gradient: the values of MegEngine's, and a placement that is measured."""

from __future__ import annotations

import megengine as mge
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager

import qtrace
from qtrace.gradients.recurrent import differentiable
from tests.nets import net

RNG = np.random.default_rng(0)


def _random(*shape: int) -> mge.Tensor:
    return mge.Tensor(RNG.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_has_the_values_of_its_kernel_and_the_right_gradient(bias: bool, stated: bool) -> None:
    cell, x = M.LSTMCell(4, 6, bias=bias), _random(3, 4)
    state = (_random(3, 6), _random(3, 6)) if stated else None
    compute = differentiable(cell)
    for result, expected in zip(compute(x, state), cell(x, state), strict=True):
        np.testing.assert_allclose(result.numpy(), expected.numpy(), atol=1e-6)
    manager = GradManager().attach([x])
    with manager:
        manager.backward((compute(x, state)[0] ** 2).sum())
    step = np.zeros((3, 4), np.float32)
    step[1, 2] = 1e-2
    ends = [float((cell(x + sign * mge.Tensor(step), state)[0] ** 2).sum().numpy()) for sign in (1, -1)]
    assert x.grad.numpy()[1, 2] == pytest.approx((ends[0] - ends[1]) / 2e-2, abs=1e-3)


@pytest.mark.parametrize("kind", [M.LSTMCell, M.RNNCell, M.LSTM, M.RNN])
def test_a_network_with_it_is_prepared_by_default(kind: type[M.Module]) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        result = self.cell(self.first(x))
        while isinstance(result, (tuple, list)):
            result = result[0]
        return self.last(result)

    module = net(forward, first=M.Linear(8, 8), cell=kind(8, 16), last=M.Linear(16, 4))
    x = _random(2, 8) if kind.__name__.endswith("Cell") else _random(3, 2, 8)
    prepared = qtrace.prepare(qtrace.trace(module, x))
    np.testing.assert_allclose(prepared(x).numpy(), module(x).numpy(), rtol=1e-5, atol=1e-5)
