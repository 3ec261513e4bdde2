"""Deformable convolutions behind folded BatchNorms: what of the difference is the network's own."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import images, randomize

X = images(2, 3, 24, 24, seed=2)


class Deformed(M.Module):
    """A deformable convolution whose places and weights come from a convolution of its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.offsets = M.Conv2d(channels, 27, 3, 1, 1)
        self.deformable = M.DeformableConv2d(channels, channels, 3, 1, 1, bias=False)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        rows, columns, mask = F.split(self.offsets(x), 3, axis=1)
        return self.deformable(x, F.concat((rows, columns), axis=1), F.sigmoid(mask))


class Head(M.Module):
    """Three deformable convolutions, each with a BatchNorm, behind a stem whose BatchNorm is folded."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = M.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.bn = M.BatchNorm2d(channels)
        self.layers = [Deformed(channels) for _ in range(3)]
        self.norms = [M.BatchNorm2d(channels) for _ in range(3)]

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.bn(self.stem(x)))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x


def _head(reach: float) -> M.Module:
    """A head whose convolutions reach ``reach`` times as far as a random one's."""
    head = randomize(Head(), 2)
    for layer in head.layers:
        layer.offsets.weight._reset(layer.offsets.weight * reach)
    return head


def _difference(one: M.Module, other: M.Module, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.abs(one(mge.Tensor(x)).numpy() - other(mge.Tensor(y)).numpy()).max())


@pytest.mark.quick(1)
@pytest.mark.parametrize("reach", [1.0, 10.0, 100.0])
def test_folding_changes_no_more_than_the_last_bit_of_the_input(reach: float) -> None:
    """Folding rounds each weight once more; the rest is how the kernels of a machine sum."""
    head = _head(reach)
    prepared = qtrace.prepare(qtrace.trace(head, X, check=False))
    rng = np.random.default_rng(0)
    moved = [
        np.nextafter(X, np.where(rng.random(X.shape) < 0.5, -99, 99).astype(np.float32)) for _ in range(6)
    ]
    own = max(_difference(head, head, X, x) for x in moved)
    assert _difference(head, prepared, X, X) <= 20 * own


def test_the_difference_grows_with_the_reach() -> None:
    near, far = (
        _difference(h, qtrace.prepare(qtrace.trace(h, X, check=False)), X, X)
        for h in map(_head, (1.0, 100.0))
    )
    assert near < 1e-6
    assert far > 10 * near


def test_the_kernel_is_continuous_across_the_border() -> None:
    """No jump of the kernel, as one at the border would be, explains the difference."""
    ones = mge.Tensor(np.ones((1, 1, 5, 5), np.float32))
    weight = mge.Tensor(np.ones((1, 1, 1, 1), np.float32))
    steps = np.concatenate([edge + np.array([-1e-4, 0, 1e-4]) for edge in (-1.0, 0.0, 4.0, 5.0)])
    values = []
    for step in steps:
        offset = np.zeros((1, 2, 5, 5), np.float32)
        offset[0, 0] = step
        values.append(F.deformable_conv2d(ones, weight, mge.Tensor(offset), ones).numpy()[0, 0, 0, 2])
    jumps = np.abs(np.diff(np.reshape(values, (4, 3)), axis=1))
    assert jumps.max() < 2e-4


def test_a_batch_norm_that_is_kept_changes_nothing() -> None:
    head = _head(100.0)
    prepared = qtrace.prepare(qtrace.trace(head, X, check=False), {"qat": {"bn": {"fold": False}}})
    assert _difference(head, prepared, X, X) == 0.0
