"""RegNet X, and Y with squeeze and excite: bottlenecks of one width with grouped convs."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import SqueezeExcite, conv_bn, settle

SHAPE = (3, 32, 32)


class Block(M.Module):
    def __init__(self, inside: int, outside: int, stride: int, group: int, se: bool) -> None:
        super().__init__()
        self.a = conv_bn(inside, outside, 1)
        self.b = conv_bn(outside, outside, 3, stride, groups=outside // group)
        self.se = SqueezeExcite(outside, max(inside // 4, 2)) if se else M.Identity()
        self.c = conv_bn(outside, outside, 1, act=None)
        same = inside == outside and stride == 1
        self.proj = M.Identity() if same else conv_bn(inside, outside, 1, stride, None)
        self.relu = M.ReLU()

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.c(self.se(self.b(self.a(x))))
        y += self.proj(x)
        return self.relu(y)


class RegNet(M.Module):
    def __init__(self, se: bool, group: int = 4) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3, 2)
        plan = ((8, 8, 2), (8, 16, 2), (16, 16, 1), (16, 32, 2))
        self.stages = M.Sequential(*(Block(*row, group, se) for row in plan))
        self.pool = M.AdaptiveAvgPool2d(1)
        self.fc = M.Linear(32, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.fc(F.flatten(self.pool(self.stages(self.stem(x))), 1))


def regnet_x() -> M.Module:
    return settle(RegNet(False), *SHAPE)


def regnet_y() -> M.Module:
    return settle(RegNet(True), *SHAPE)
