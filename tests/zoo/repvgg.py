"""RepVGG: three branches to train, one conv to deploy, and the exact way from one to the other."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from tests.zoo.parts import SqueezeExcite, settle

SHAPE = (3, 32, 32)


class Branches(M.Module):
    """A block's branches in training: 3x3, 1x1 and, if shapes agree, the input, each with its BatchNorm."""

    def __init__(self, inside: int, outside: int, stride: int, groups: int) -> None:
        super().__init__()
        self.dense = M.Conv2d(inside, outside, 3, stride, 1, groups=groups, bias=False)
        self.dense_bn = M.BatchNorm2d(outside)
        self.point = M.Conv2d(inside, outside, 1, stride, groups=groups, bias=False)
        self.point_bn = M.BatchNorm2d(outside)
        self.identity = M.BatchNorm2d(inside) if inside == outside and stride == 1 else None

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.dense_bn(self.dense(x)) + self.point_bn(self.point(x))
        return y if self.identity is None else y + self.identity(x)

    def merged(self) -> M.Conv2d:
        """One 3x3 conv that computes the same."""
        conv = M.Conv2d(
            self.dense.in_channels,
            self.dense.out_channels,
            3,
            self.dense.stride,
            1,
            groups=self.dense.groups,
        )
        parts = [
            _folded(self.dense.weight.numpy(), self.dense_bn),
            _folded(_centred(self.point.weight.numpy()), self.point_bn),
        ]
        if self.identity is not None:
            parts.append(_folded(_unit(conv.weight.shape), self.identity))
        weight, bias = (sum(values) for values in zip(*parts, strict=True))
        conv.weight._reset(mge.Parameter(weight.astype(np.float32)))
        conv.bias._reset(mge.Parameter(bias.astype(np.float32).reshape(1, -1, 1, 1)))
        return conv


def _folded(weight: np.ndarray, norm: M.BatchNorm2d) -> tuple[np.ndarray, np.ndarray]:
    mean, var, gamma, beta = (
        t.numpy().astype(np.float64).reshape(-1)
        for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    gain = gamma / np.sqrt(var + norm.eps)
    # Grouped weights are (groups, out / groups, ...): their outputs are the leading axes.
    lead = (*weight.shape[:-3], 1, 1, 1)
    return weight.astype(np.float64) * gain.reshape(lead), beta - mean * gain


def _centred(point: np.ndarray) -> np.ndarray:
    return np.pad(point, [(0, 0)] * (point.ndim - 2) + [(1, 1), (1, 1)])


def _unit(shape: tuple[int, ...]) -> np.ndarray:
    """The 3x3 kernel that copies its input."""
    weight = np.zeros(tuple(shape))
    for i in range(shape[-4]):
        weight[..., i, i, 1, 1] = 1.0
    return weight


class Block(M.Module):
    def __init__(self, inside: int, outside: int, stride: int, groups: int, se: bool) -> None:
        super().__init__()
        self.body = Branches(inside, outside, stride, groups)
        self.se = SqueezeExcite(outside, outside // 4) if se else M.Identity()

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return F.relu(self.se(self.body(x)))


class RepVGG(M.Module):
    def __init__(self, groups: int = 1, se: bool = False, width: int = 8) -> None:
        super().__init__()
        plan = (
            (3, width, 2, 1),
            (width, width, 2, 1),
            (width, width, 1, groups),
            (width, 2 * width, 2, 1),
            (2 * width, 2 * width, 1, groups),
        )
        self.blocks = M.Sequential(*(Block(*row, se) for row in plan))
        self.pool = M.AdaptiveAvgPool2d(1)
        self.linear = M.Linear(2 * width, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.linear(F.flatten(self.pool(self.blocks(x)), 1))


def deploy(model: RepVGG) -> RepVGG:
    """Merges the branches of every block, in place."""
    for module in list(model.modules()):
        if isinstance(module, Block):
            module.body = module.body.merged()
    model.eval()
    return model


def repvgg_train() -> M.Module:
    return settle(RepVGG(), *SHAPE)


def repvgg_groups_train() -> M.Module:
    return settle(RepVGG(groups=2), *SHAPE)


def repvgg_se_train() -> M.Module:
    return settle(RepVGG(se=True), *SHAPE)


def repvgg_deploy() -> M.Module:
    return deploy(repvgg_train())


def repvgg_groups_deploy() -> M.Module:
    return deploy(repvgg_groups_train())


def repvgg_se_deploy() -> M.Module:
    return deploy(repvgg_se_train())
