"""EfficientNet (SiLU and gates), its Lite form (relu6, no gates) and V2 (fused blocks)."""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import Gate, SqueezeExcite, conv_bn, settle

SHAPE = (3, 32, 32)
Act = Callable[[], M.Module]


class DropPath(M.Module):
    """Stochastic depth: nothing in eval mode."""

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        if not self.training:
            return x
        keep = F.floor(mge.random.uniform(size=(x.shape[0], 1, 1, 1)) + 0.9)
        return x * keep / 0.9


class MBConv(M.Module):
    """Expand, depthwise, gate, project."""

    def __init__(self, inside: int, outside: int, factor: int, kernel: int, stride: int, act: Act, se: bool):
        super().__init__()
        middle = inside * factor
        self.add = stride == 1 and inside == outside
        self.expand = conv_bn(inside, middle, 1, act=act) if factor > 1 else M.Identity()
        self.depthwise = conv_bn(middle, middle, kernel, stride, act, groups=middle)
        self.se = SqueezeExcite(middle, max(inside // 4, 1), act) if se else None
        self.project = conv_bn(middle, outside, 1, act=None)
        self.drop_path = DropPath()

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.depthwise(self.expand(x))
        if self.se is not None:
            y = self.se(y)
        y = self.project(y)
        if self.add:
            y = self.drop_path(y) + x
        return y


class FusedMBConv(M.Module):
    """A full 3x3 conv in the place of expand and depthwise."""

    def __init__(self, inside: int, outside: int, factor: int, stride: int, act: Act) -> None:
        super().__init__()
        middle = inside * factor
        self.add = stride == 1 and inside == outside
        self.expand = conv_bn(inside, middle if factor > 1 else outside, 3, stride, act)
        self.project = conv_bn(middle, outside, 1, act=None) if factor > 1 else M.Identity()

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.project(self.expand(x))
        if self.add:
            y += x
        return y


class EfficientNet(M.Module):
    """``plan``: (inside, outside, factor, kernel, stride) of each MBConv, or without kernel if fused."""

    def __init__(self, plan: tuple[tuple[int, ...], ...], act: Act, se: bool) -> None:
        super().__init__()
        self.stem = conv_bn(3, plan[0][0], 3, 2, act)
        blocks = [MBConv(*row, act, se) if len(row) == 5 else FusedMBConv(*row, act) for row in plan]
        self.blocks = M.Sequential(*blocks)
        self.head = conv_bn(plan[-1][1], 48, 1, act=act)
        self.avg_pool = M.AdaptiveAvgPool2d(1)
        self.dropout = M.Dropout(0.2)
        self.fc = M.Linear(48, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.avg_pool(self.head(self.blocks(self.stem(x))))
        return self.fc(self.dropout(F.flatten(x, 1)))


_PLAIN = ((8, 8, 1, 3, 1), (8, 12, 6, 3, 2), (12, 12, 6, 5, 1), (12, 16, 6, 5, 2))
_FUSED = ((8, 8, 1, 1), (8, 12, 4, 2), (12, 12, 4, 1), (12, 16, 4, 3, 2), (16, 16, 4, 3, 1))


def efficientnet_b0() -> M.Module:
    return settle(EfficientNet(_PLAIN, M.SiLU, True), *SHAPE)


def efficientnet_swish() -> M.Module:
    """SiLU written as a product."""
    return settle(EfficientNet(_PLAIN, lambda: Gate(lambda x: x * F.sigmoid(x)), True), *SHAPE)


def efficientnet_lite() -> M.Module:
    return settle(EfficientNet(_PLAIN, lambda: Gate(lambda x: F.relu6(x)), False), *SHAPE)


def efficientnet_v2() -> M.Module:
    return settle(EfficientNet(_FUSED, M.SiLU, True), *SHAPE)
