"""What all fake quants share: learned scales as an optimizer wants them, and scales that end near zero."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.optimizer import SGD

import qtrace
from qtrace.errors import ConfigError
from qtrace.fakequant import scales
from qtrace.fakequant.lsq import LSQFakeQuant
from qtrace.graph.types import TracedModule
from qtrace.numerics import SMALLEST_SCALE
from qtrace.scheme import QParams, QScheme
from tests.each import each_of
from tests.nets import images, net

X = images(2, 3, 8, 8)
SCHEME = QScheme(bits=4, signed=True, symmetric=True)


def _prepared(fakequant: str) -> TracedModule:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 4, 1), b=M.Conv2d(4, 2, 1))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), {"fakequant": fakequant})
    return qtrace.calibrate(prepared, [X], progress=False)


def test_learned_scales_make_a_parameter_group() -> None:
    prepared = _prepared("lsq")
    found = scales(prepared)
    named = {n: p for n, p in prepared.named_parameters() if n.endswith("scale")}
    assert {id(p) for p in found} == {id(p) for p in named.values()}
    assert len(found) == len(named) == 5
    apart = {id(p) for p in found}
    weights = [p for p in prepared.parameters() if id(p) not in apart]
    assert len(weights) == 4
    groups = [{"params": weights}, {"params": found, "lr": 0.0, "weight_decay": 0.0}]
    before = [p.numpy().copy() for p in found]
    optimizer = SGD(groups, lr=0.1, weight_decay=0.1)
    manager = GradManager().attach(list(prepared.parameters()))
    with manager:
        manager.backward(prepared(mge.Tensor(X)).mean())
    optimizer.step()
    for old, new in zip(before, found, strict=True):
        np.testing.assert_array_equal(old, new.numpy())


def test_fixed_scales_are_not_learned_and_an_empty_group_is_allowed() -> None:
    prepared = _prepared("fixed")
    assert scales(prepared) == []
    SGD([{"params": list(prepared.parameters())}, {"params": scales(prepared)}], lr=0.1)


@each_of("scale", [SMALLEST_SCALE, -SMALLEST_SCALE, 1e-30, 0.0])
def test_a_scale_that_went_to_zero_keeps_values_and_gradients_finite(scale: float) -> None:
    fake = LSQFakeQuant("x", SCHEME, numel=3)
    fake.set_qparams(QParams(SCHEME, np.float32(0.1), np.int32(0)))
    fake.phase = "train"
    fake.scale._reset(mge.Parameter(np.float32(scale)))
    x = mge.Parameter(np.array([0.0, 1000.0, -1000.0], np.float32))
    manager = GradManager().attach([x, fake.scale])
    with manager:
        y = fake(x)
        manager.backward((y * mge.Tensor([1.0, 2.0, -3.0])).sum())
    assert np.isfinite(y.numpy()).all()
    assert np.isfinite(x.grad.numpy()).all()
    assert np.isfinite(fake.scale.grad.numpy()).all()


def test_smallest_scale_is_the_one_of_the_reference() -> None:
    fake = LSQFakeQuant("x", SCHEME)
    fake.set_qparams(QParams(SCHEME, np.float32(SMALLEST_SCALE), np.int32(0)))
    assert float(fake.qparams().scale) == SMALLEST_SCALE


def test_lsq_refuses_powers_of_two_by_the_name_of_the_site() -> None:
    with pytest.raises(ConfigError, match=r"^conv_weight: lsq .*'fixed'"):
        LSQFakeQuant("conv_weight", SCHEME.replace(power_of_two=True))


@pytest.mark.parametrize("sort", ["activation", "weight"])
def test_a_config_that_lsq_cannot_do_is_reported_with_its_place_and_its_sites(sort: str) -> None:
    module = net(lambda self, x: self.a(x), a=M.Conv2d(3, 4, 1))
    rule = {"match": {"op": "conv2d"}, "fakequant": "lsq", sort: {"power_of_two": True}}
    with pytest.raises(
        ConfigError, match=rf"^rules\[0\]: {sort}s: lsq learns any scale.*use fakequant 'fixed'"
    ):
        qtrace.prepare(qtrace.trace(module, X, check=False), {"rules": [rule]})
