"""Modules are found wherever MegEngine finds them."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

import qtrace
from qtrace.data.batches import evaluating
from qtrace.graph.walk import modules_of
from tests.nets import images, net


def test_modules_are_those_that_megengine_finds() -> None:
    shared = M.Conv2d(3, 3, 1)
    listed = [M.ReLU(), {"inner": (M.BatchNorm2d(3), shared)}]
    module = net(lambda self, x: F.relu(self.a(x)), a=shared, listed=listed, again=M.Sequential(shared))
    assert {id(m) for m in modules_of(module)} == {id(m) for m in module.modules()}
    assert modules_of(module)[0] is module
    traced = qtrace.trace(module, images(2, 3, 8, 8), check=False)
    for model in (traced, qtrace.prepare(traced)):
        assert {id(m) for m in modules_of(model)} == {id(m) for m in model.modules()}


def test_training_flags_come_back_when_a_graph_was_evaluated() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=M.Conv2d(3, 3, 1), b=M.ReLU())
    traced = qtrace.trace(module, images(1, 3, 8, 8), check=False)
    traced.train()
    traced.a.training = False
    with evaluating(traced):
        assert not any(module.training for module in traced.modules())
        assert np.isfinite(traced(Tensor(images(1, 3, 8, 8))).numpy()).all()
    assert {module.training for module in traced.modules() if module is not traced.a} == {True}
    assert traced.a.training is False
