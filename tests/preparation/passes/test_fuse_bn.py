"""Folding BatchNorm: float output kept, parameters stay trainable, dead ones gone, the rest told why not."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import lint
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import TracedModule
from qtrace.preparation.passes.base import PassResult
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.folding import fuse_bn
from tests.each import each_of
from tests.nets import MobileNetV2, ResNet, images, net, randomize


def _functional(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = F.conv2d(x, self.w, None, padding=1)
    return F.nn.batch_norm(y, self.mean, self.var, self.gamma, self.beta, training=False)


def _twice(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return F.relu(self.bn(self.c(x))) + F.relu(self.bn(self.c(x * 2.0)))


def _flat_twice(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return _twice(self, F.flatten(x, 1))


def _three_levels(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    maps = (x, x[:, :, ::2, ::2], x[:, :, 1::2, 1::2])
    y, z, u = (F.relu(self.bn(self.c(level))) for level in maps)
    return y[:, :, :2, :2] + z[:, :, :2, :2] + u[:, :, :2, :2]


def _functional_twice(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return _functional(self, x) - F.relu(_functional(self, x + 1.0))


def _vector(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, 6, dtype=np.float32).reshape(1, 6, 1, 1)


FOLDED = {
    "conv": net(lambda self, x: self.bn(self.c(x)), c=M.Conv2d(4, 6, 3), bn=M.BatchNorm2d(6)),
    "no_bias": net(lambda self, x: self.bn(self.c(x)), c=M.Conv2d(4, 6, 3, bias=False), bn=M.BatchNorm2d(6)),
    "grouped": net(lambda self, x: self.bn(self.c(x)), c=M.Conv2d(4, 6, 3, groups=2), bn=M.BatchNorm2d(6)),
    "depthwise": net(lambda self, x: self.bn(self.c(x)), c=M.Conv2d(4, 4, 3, groups=4), bn=M.BatchNorm2d(4)),
    "transposed": net(
        lambda self, x: self.bn(self.c(x)), c=M.ConvTranspose2d(4, 6, 2, 2), bn=M.BatchNorm2d(6)
    ),
    "transposed_grouped": net(
        lambda self, x: self.bn(self.c(x)), c=M.ConvTranspose2d(4, 6, 2, 2, groups=2), bn=M.BatchNorm2d(6)
    ),
    "linear": net(lambda self, x: self.bn(self.c(F.flatten(x, 1))), c=M.Linear(256, 6), bn=M.BatchNorm1d(6)),
    "reflect": net(
        lambda self, x: self.bn(self.c(x)),
        c=M.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        bn=M.BatchNorm2d(6),
    ),
    "functional": net(
        _functional,
        w=mge.Parameter(images(6, 4, 3, 3)),
        mean=mge.Tensor(_vector(-0.5, 0.5)),
        var=mge.Tensor(_vector(0.5, 2.0)),
        gamma=mge.Parameter(_vector(-1.0, 1.5)),
        beta=mge.Parameter(_vector(0.3, -0.3)),
    ),
    "same_pair_twice": net(
        lambda self, x: self.bn(self.c(F.relu(self.bn(self.c(x))))), c=M.Conv2d(4, 4, 1), bn=M.BatchNorm2d(4)
    ),
    "shared_no_bias": net(_twice, c=M.Conv2d(4, 6, 3, bias=False), bn=M.BatchNorm2d(6)),
    "shared_with_bias": net(_twice, c=M.Conv2d(4, 6, 3), bn=M.BatchNorm2d(6)),
    "shared_by_three": net(_three_levels, c=M.Conv2d(4, 6, 3, bias=False), bn=M.BatchNorm2d(6)),
    "shared_transposed": net(_twice, c=M.ConvTranspose2d(4, 6, 2, 2, bias=False), bn=M.BatchNorm2d(6)),
    "shared_linear": net(_flat_twice, c=M.Linear(256, 6, bias=False), bn=M.BatchNorm1d(6)),
    "shared_functional": net(
        _functional_twice,
        w=mge.Parameter(images(6, 4, 3, 3)),
        mean=mge.Tensor(_vector(-0.5, 0.5)),
        var=mge.Tensor(_vector(0.5, 2.0)),
        gamma=mge.Parameter(_vector(-1.0, 1.5)),
        beta=mge.Parameter(_vector(0.3, -0.3)),
    ),
    "one_norm_behind_two": net(
        lambda self, x: self.bn(self.c(x)) + self.bn(self.d(x)),
        c=M.Conv2d(4, 6, 3, bias=False),
        d=M.Conv2d(4, 6, 3),
        bn=M.BatchNorm2d(6),
    ),
}


def _fused(module: M.Module, x: np.ndarray) -> tuple[TracedModule, PassResult]:
    flat = flatten(trace(module, x))
    expand(flat)
    return flat, fuse_bn(flat)


@each_of("name", FOLDED)
def test_output_is_kept_and_no_batchnorm_is_left(name: str) -> None:
    x = images(3, 4, 8, 8)
    flat, result = _fused(FOLDED[name], x)
    want = FOLDED[name](mge.Tensor(x)).numpy()
    assert np.abs(flat(mge.Tensor(x)).numpy() - want).max() <= 1e-5 * np.abs(want).max()
    assert result.left == ()
    assert result.changed
    assert "batch_norm" not in str(flat.graph)
    assert not any(isinstance(m, (M.BatchNorm2d, M.BatchNorm1d)) for m in flat.modules())
    assert lint(flat) == []
    assert not {"bn.weight", "mean", "gamma"} & {n for n, _ in flat.named_tensors()}


@pytest.mark.parametrize("model", [ResNet(4, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))])
def test_whole_networks_within_1e_5(model: M.Module) -> None:
    x = images(2, 3, 64, 64)
    randomize(model)
    flat, result = _fused(model, x)
    want = model(mge.Tensor(x)).numpy()
    assert np.abs(flat(mge.Tensor(x)).numpy() - want).max() <= 1e-5 * np.abs(want).max()
    assert result.left == ()


def test_other_tensors_stay_trainable() -> None:
    module = net(
        lambda self, x: self.bn(self.c(x * self.gain)),
        c=M.Conv2d(4, 4, 1),
        bn=M.BatchNorm2d(4),
        gain=mge.Parameter(np.ones((1, 4, 1, 1), np.float32)),
    )
    x = images(2, 4, 4, 4)
    flat, _ = _fused(module, x)
    names = {n for n, _ in flat.named_parameters()}
    assert names == {"gain", "c.weight", "c.bias"}
    manager = GradManager().attach(list(flat.parameters()))
    with manager:
        manager.backward((flat(mge.Tensor(x)) ** 2).sum())
    assert all(np.abs(p.grad.numpy()).max() > 0 for p in flat.parameters())


def _norm(self: M.Module, x: mge.Tensor, eps: float) -> mge.Tensor:
    return F.nn.batch_norm(x, self.mean, self.var, training=False, eps=eps)


@pytest.mark.parametrize("name", [name for name in FOLDED if name.startswith("shared")])
def test_a_shared_layer_with_its_norm_is_prepared_and_converted(name: str) -> None:
    x = images(3, 4, 8, 8)
    want = FOLDED[name](mge.Tensor(x)).numpy()
    prepared = qtrace.prepare(trace(FOLDED[name], x))
    qtrace.calibrate(prepared, [x], progress=False)
    got = qtrace.convert(prepared)(mge.Tensor(x)).numpy()
    assert 10 * np.log10((want**2).mean() / ((got - want) ** 2).mean()) > 25


@each_of(
    ("module", "reason"),
    [
        (net(lambda self, x: self.bn(F.relu(x)), bn=M.BatchNorm2d(4)), "no conv or linear"),
        (
            net(
                lambda self, x: (lambda y: self.bn(y) + y)(self.c(x)),
                c=M.Conv2d(4, 4, 1),
                bn=M.BatchNorm2d(4),
            ),
            "c_out is also used elsewhere",
        ),
        (
            net(
                lambda self, x: self.bn(self.c(x)) + self.bn2(self.c(x)),
                c=M.Conv2d(4, 4, 1),
                bn=M.BatchNorm2d(4),
                bn2=M.BatchNorm2d(4),
            ),
            "shared with",
        ),
        (
            net(
                lambda self, x: self.bn(self.c(x)) + self.bn2(self.c(x)),
                c=M.Conv2d(4, 4, 1, bias=False),
                bn=M.BatchNorm2d(4),
                bn2=M.BatchNorm2d(4),
            ),
            "shared with",
        ),
        (
            net(
                lambda self, x: self.bn(F.conv2d(x, self.w)) + self.bn(F.conv_transpose2d(x, self.w)),
                w=mge.Parameter(images(4, 4, 1, 1)),
                bn=M.BatchNorm2d(4),
            ),
            "a layer of another kind",
        ),
        (
            net(
                lambda self, x: (
                    _norm(self, F.conv2d(x, self.w), 1e-5) + _norm(self, F.conv2d(x, self.w), 0.5)
                ),
                w=mge.Parameter(images(4, 4, 1, 1)),
                mean=mge.Tensor(images(1, 4, 1, 1)),
                var=mge.Tensor(np.abs(images(1, 4, 1, 1)) + 0.5),
            ),
            "which has no such norm",
        ),
    ],
)
def test_what_cannot_be_folded_is_left_with_the_reason(module: M.Module, reason: str) -> None:
    x = images(2, 4, 4, 4)
    want = module(mge.Tensor(x)).numpy()
    flat, result = _fused(module, x)
    assert result.changed == ()
    assert any(reason in left.reason for left in result.left), result.left
    np.testing.assert_allclose(flat(mge.Tensor(x)).numpy(), want, rtol=1e-6, atol=1e-6)
