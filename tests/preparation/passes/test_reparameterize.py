"""Reparameterize: parallel convolutions that are added become one, and what cannot is left with a reason."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config import QConfig
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import lint
from qtrace.graph.walk import exprs
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.folding import fuse_bn
from qtrace.preparation.passes.reparameterize import reparameterize
from tests.each import each_of
from tests.nets import images, net, randomize

X = images(2, 4, 8, 8)


class Block(M.Module):
    """RepVGG's block: 3x3, 1x1 and identity, each with a norm."""

    def __init__(self, inputs: int = 4, outputs: int = 4, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        options: dict[str, Any] = {"stride": stride, "groups": groups, "bias": False}
        self.dense, self.dense_bn = M.Conv2d(inputs, outputs, 3, padding=1, **options), M.BatchNorm2d(outputs)
        self.point, self.point_bn = M.Conv2d(inputs, outputs, 1, **options), M.BatchNorm2d(outputs)
        self.identity = M.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.dense_bn(self.dense(x)) + self.point_bn(self.point(x))
        if self.identity is not None:
            y = self.identity(x) + y
        return F.relu(y)


def _merged(module: M.Module) -> tuple[Any, Any]:
    traced = qtrace.trace(module, X, check=False)
    flat = flatten(traced)
    expand(flat)
    fuse_bn(flat)
    return flat, reparameterize(flat)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_deploy_form_computes_the_same(groups: int, stride: int) -> None:
    module = randomize(M.Sequential(Block(4, 4, stride, groups), Block(4, 8, stride, groups), Block(8, 8, 1)))
    module.eval()
    flat, result = _merged(module)
    assert len(result.changed) == 3
    assert result.left == ()
    expected, got = module(mge.Tensor(X)).numpy(), flat(mge.Tensor(X)).numpy()
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    functions = [e.func.__name__ for e in exprs(flat) if hasattr(e, "func")]
    assert functions == ["conv2d", "relu"] * 3
    assert {n.rpartition(".")[2] for n in flat.state_dict()} == {"weight", "bias"}
    assert all("point" not in n and "identity" not in n for n in flat.state_dict())
    assert lint(flat) == []  # nor is there a layer left without its weight


def test_prepare_does_it_by_name() -> None:
    module = randomize(M.Sequential(Block(), Block()))
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.prepare(traced, QConfig(ptq=["fuse_bn", "reparameterize"]))
    assert sum(s.sort == "weight" for s in qtrace.explain(prepared).annotation.sites) == 2
    qtrace.calibrate(prepared, [X], progress=False)
    assert sum(s.sort == "weight" for s in qtrace.explain(qtrace.prepare(traced)).annotation.sites) == 4


@each_of(
    ("forward", "reason"),
    [
        (lambda self, x: (lambda y: self.a(x) + y + F.exp(y))(self.b(x)), "b_out is also used elsewhere"),
        (lambda self, x: self.s(x) + self.p(x), "does not lie within"),
        (lambda self, x: self.a(x) + self.g(x), "channels or groups of its branches differ"),
        (lambda self, x: self.b(x) + self.whole(x), "maps of different sizes"),
        (lambda self, x: self.whole_norm(x) + self.whole(x), "maps of different sizes"),
        (lambda self, x: self.even(x) + self.point(x), "maps of different sizes"),  # 1 and 2 wide of 3
    ],
)
def test_what_cannot_be_merged_is_left_with_the_reason(forward: Any, reason: str) -> None:
    module = net(
        forward,
        a=M.Conv2d(4, 4, 3, padding=1),
        b=M.Conv2d(4, 4, 1),
        g=M.Conv2d(4, 4, 1, groups=2),
        s=M.Conv2d(4, 4, 3, stride=5),
        p=M.Conv2d(4, 4, 2, stride=5, padding=1),
        whole=M.Conv2d(4, 4, 8),
        whole_norm=M.BatchNorm2d(4),
        even=M.Conv2d(4, 4, 2, stride=2),
        point=M.Conv2d(4, 4, 1, stride=2),
    )
    expected = module(mge.Tensor(X)).numpy()
    flat, result = _merged(module)
    np.testing.assert_array_equal(flat(mge.Tensor(X)).numpy(), expected)
    assert result.changed == ()
    assert any(reason in left.reason for left in result.left)


def test_branches_of_different_tensors_and_shared_weights_are_no_branches() -> None:
    module = net(
        lambda self, x: self.a(x) + self.a(F.relu(x)) + self.b(F.exp(x)),
        a=M.Conv2d(4, 4, 1),
        b=M.Conv2d(4, 4, 1),
    )
    result = _merged(module)[1]
    assert result.changed == result.left == ()


def test_a_norm_that_another_tensor_passes_too_stays_a_norm() -> None:
    module = net(
        lambda self, x: F.relu(self.norm(x) + self.a(x)) + self.norm(F.exp(x)),
        a=M.Conv2d(4, 4, 3, padding=1),
        norm=M.BatchNorm2d(4),
    )
    expected = module(mge.Tensor(X)).numpy()
    flat, result = _merged(module)
    np.testing.assert_array_equal(flat(mge.Tensor(X)).numpy(), expected)
    assert result.changed == ()
