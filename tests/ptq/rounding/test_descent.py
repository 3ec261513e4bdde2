"""Steps of learned rounding: compiled ones give what eager ones give, and gradients are those of the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.graph.flatten import flatten
from qtrace.graph.kernels import synchronous
from qtrace.preparation.phases import set_phase
from qtrace.ptq.base import Batches, CalibratedTask
from qtrace.ptq.layers.quantized import LayerTwins, quantized_layers
from qtrace.ptq.rounding import block_run
from qtrace.ptq.rounding.block_run import BlockData, BlockRun, DescentSettings, structural_blocks
from qtrace.ptq.rounding.blockwise import learn_block
from tests.nets import images, net, randomize

SETTINGS = DescentSettings(
    iterations=25,
    batch=6,
    lr=0.05,
    scale_lr=0.01,
    drop=0.5,
    warmup=0.2,
    beta=(20.0, 2.0),
    strength=20.0,
    seed=0,
)


def _run(activation_bits: int = 4) -> tuple[BlockRun, BlockData]:
    """A block of two layers around which an input goes, with its data."""
    module = net(
        lambda self, x: F.relu(x + self.b(F.relu(self.a(x)))),
        a=M.Conv2d(4, 4, 3, padding=1),
        b=M.Conv2d(4, 4, 1),
    )
    data = [images(8, 4, 5, 5, seed=1)]
    config = QConfig(backend="generic", weight={"bits": 3}, activation={"bits": activation_bits})
    model = qtrace.prepare(qtrace.trace(randomize(module, seed=2), data[0][:1], check=False), config)
    qtrace.calibrate(model, data, progress=False)
    reference = flatten(model)
    set_phase(reference, "float")
    task = CalibratedTask(model, reference, Batches(data, model, len(data)))
    layers, _ = quantized_layers(model)
    (block,) = structural_blocks(model, layers, 12)
    twins = LayerTwins(task)
    floats = {layer.weight: mge.Tensor(getattr(model, layer.weight[0]).weight).numpy() for layer in layers}
    return BlockRun(task, twins, block, floats), BlockData(twins, block)


def test_compiled_steps_learn_what_eager_ones_learn(monkeypatch: Any) -> None:
    results = []
    with synchronous():
        for first in (20, 100):
            monkeypatch.setattr(block_run, "MIN_TRACED_STEPS", first)
            run, data = _run()
            start = [state.rounding.v.copy() for state in run.layers]
            learn_block(run, data, SETTINGS, 0.01)
            results.append([s.rounding.v for s in run.layers] + [s.numpy() for _, s in run.scales.values()])
            assert all(np.abs(s.rounding.v - v).max() > 0.1 for s, v in zip(run.layers, start, strict=True))
    assert len(results[0]) == 5  # two weights and three scales
    for compiled, eager in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-3, atol=1e-3)


def test_the_gradient_of_a_weight_is_that_of_finite_differences() -> None:
    """With everything dropped, for a rounding has no finite difference; compiled."""
    with synchronous():
        run, data = _run()
        settings = dataclasses.replace(SETTINGS, drop=1 - 1e-12)
        step = block_run.MegEngineGradients(run, data, settings, 0.01)

        def loss(layer: int, weight: np.ndarray) -> tuple[float, list[np.ndarray]]:
            run.layers[layer].parameter._reset(mge.Parameter(weight))
            return step(np.random.default_rng(3), settings.drop)

        for layer, state in enumerate(run.layers):
            weight = state.nearest
            gradient = loss(layer, weight)[1][layer]
            rng = np.random.default_rng(4)
            for _ in range(4):
                way = 1e-3 * rng.normal(size=weight.shape).astype(np.float32)
                numeric = (loss(layer, weight + way)[0] - loss(layer, weight - way)[0]) / 2
                exact = float(np.sum(gradient * way))
                assert numeric == pytest.approx(exact, rel=0.02, abs=1e-4 * np.abs(gradient).sum() * 1e-3)
            loss(layer, weight)


def test_the_rate_is_20_in_all_steps_unless_set() -> None:
    one = {"batch": 1, "scale_lr": 0, "drop": 0, "warmup": 0, "beta": (2, 2), "strength": 0, "seed": 0}
    rates = [
        DescentSettings(iterations=n, lr=lr, **one).rate for n, lr in ((20_000, None), (50, None), (50, 0.3))
    ]
    assert rates == [1e-3, 0.1, 0.3]
