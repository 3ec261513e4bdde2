"""ShuffleNet V1 and V2: grouped and split convs, channels shuffled by reshape and transpose."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import conv_bn, global_mean, settle

SHAPE = (3, 32, 32)


class GroupUnit(M.Module):
    """V1: grouped 1x1, shuffle, depthwise 3x3, grouped 1x1; strided units join an average pool by concat."""

    def __init__(self, inside: int, outside: int, stride: int, groups: int, first: bool = False) -> None:
        super().__init__()
        self.stride, self.groups = stride, groups
        middle = outside // 4
        self.expand = conv_bn(inside, middle, 1, groups=1 if first else groups)
        self.depthwise = conv_bn(middle, middle, 3, stride, None, groups=middle)
        self.project = conv_bn(middle, outside - (inside if stride == 2 else 0), 1, act=None, groups=groups)
        self.pool = M.AvgPool2d(kernel_size=3, stride=2, padding=1)

    def shuffle(self, x: mge.Tensor) -> mge.Tensor:
        batch, channels, height, width = x.shape
        x = x.reshape(batch, self.groups, channels // self.groups, height, width)
        x = F.transpose(x, (0, 2, 1, 3, 4))
        return x.reshape(batch, channels, height, width)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.shuffle(self.expand(x))
        y = self.project(self.depthwise(y))
        if self.stride == 2:
            return F.concat([F.relu(y), self.pool(x)], axis=1)
        return F.relu(x + y)


class ShuffleNetV1(M.Module):
    def __init__(self, groups: int = 3, width: int = 24) -> None:
        super().__init__()
        self.stem = M.Sequential(conv_bn(3, width // 2, 3, 2), M.MaxPool2d(3, 2, 1))
        self.units = M.Sequential(
            GroupUnit(width // 2, 2 * width, 2, groups, first=True),
            GroupUnit(2 * width, 2 * width, 1, groups),
            GroupUnit(2 * width, 4 * width, 2, groups),
        )
        self.fc = M.Linear(4 * width, 10, bias=False)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.fc(global_mean(self.units(self.stem(x))))


class SplitUnit(M.Module):
    """V2: half of the channels pass by, the other half goes through 1x1, depthwise, 1x1."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        half = outside // 2
        source = inside if stride == 2 else half
        self.main = M.Sequential(
            conv_bn(source, half, 1),
            conv_bn(half, half, 3, stride, None, groups=half),
            conv_bn(half, half, 1),
        )
        if stride == 2:
            self.side = M.Sequential(
                conv_bn(inside, inside, 3, 2, None, groups=inside), conv_bn(inside, half, 1)
            )

    @staticmethod
    def halves(x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        """Even and odd channels."""
        batch, channels, height, width = x.shape
        x = x.reshape(batch * channels // 2, 2, height * width)
        x = x.transpose(1, 0, 2).reshape(2, -1, channels // 2, height, width)
        return x[0], x[1]

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        if self.stride == 2:
            return F.concat((self.side(x), self.main(x)), 1)
        passed, worked = self.halves(x)
        return F.concat((passed, self.main(worked)), 1)


class ShuffleNetV2(M.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = conv_bn(3, width, 3, 2)
        self.maxpool = M.MaxPool2d(kernel_size=3, stride=2, padding=1)
        plan = ((width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 2 * width, 1))
        self.features = M.Sequential(*(SplitUnit(*row) for row in (*plan, (2 * width, 4 * width, 2))))
        self.last = conv_bn(4 * width, 8 * width, 1)
        self.classifier = M.Sequential(M.Linear(8 * width, 10, bias=False))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.last(self.features(self.maxpool(self.first(x))))
        x = F.mean(x, axis=[2, 3]).reshape(-1, x.shape[1])
        return self.classifier(x)


def shufflenet_v1() -> M.Module:
    return settle(ShuffleNetV1(), *SHAPE)


def shufflenet_v2() -> M.Module:
    return settle(ShuffleNetV2(), *SHAPE)
