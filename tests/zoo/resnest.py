"""ResNeSt: bottlenecks whose 3x3 conv is split into radix parts that attention weighs."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import conv_bn, settle

SHAPE = (3, 32, 32)


class SplitAttention(M.Module):
    """A grouped conv to ``radix`` times the channels; softmax over the parts, a sigmoid for a single one."""

    def __init__(self, channels: int, groups: int, radix: int) -> None:
        super().__init__()
        self.groups, self.radix = groups, radix
        middle = max(channels * radix // 4, 4)
        self.conv = M.Conv2d(channels, channels * radix, 3, 1, 1, groups=groups * radix, bias=False)
        self.bn = M.BatchNorm2d(channels * radix)
        self.fc1 = M.Conv2d(channels, middle, 1, groups=groups)
        self.bn1 = M.BatchNorm2d(middle)
        self.fc2 = M.Conv2d(middle, channels * radix, 1, groups=groups)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.bn(self.conv(x)))
        parts = F.split(x, self.radix, axis=1) if self.radix > 1 else [x]
        gap = F.adaptive_avg_pool2d(sum(parts), 1)
        weights = self.attend(self.fc2(F.relu(self.bn1(self.fc1(gap)))))
        if self.radix == 1:
            return weights * x
        return sum(w * p for w, p in zip(F.split(weights, self.radix, axis=1), parts, strict=True))

    def attend(self, x: mge.Tensor) -> mge.Tensor:
        if self.radix == 1:
            return F.sigmoid(x)
        batch = x.shape[0]
        x = F.transpose(x.reshape(batch, self.groups, self.radix, -1), (0, 2, 1, 3))
        return F.softmax(x, axis=1).reshape(batch, -1, 1, 1)


class Block(M.Module):
    """1x1, split attention (an average pool behind it for strides), 1x1."""

    def __init__(self, inside: int, width: int, stride: int, radix: int) -> None:
        super().__init__()
        outside = width * 2
        self.conv1 = conv_bn(inside, width, 1)
        self.conv2 = SplitAttention(width, 2, radix)
        self.avd = M.AvgPool2d(3, stride, padding=1) if stride > 1 else None
        self.conv3 = conv_bn(width, outside, 1, act=None)
        self.shortcut = M.Identity()
        if stride > 1 or inside != outside:
            pool = M.AvgPool2d(stride, stride) if stride > 1 else M.Identity()
            self.shortcut = M.Sequential(pool, conv_bn(inside, outside, 1, act=None))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.conv2(self.conv1(x))
        if self.avd is not None:
            y = self.avd(y)
        y = self.conv3(y)
        y += self.shortcut(x)
        return F.relu(y)


class ResNeSt(M.Module):
    """Deep stem, three blocks, classifier."""

    def __init__(self, radix: int, width: int = 8) -> None:
        super().__init__()
        self.stem = M.Sequential(conv_bn(3, width, 3, 2), conv_bn(width, width))
        self.maxpool = M.MaxPool2d(3, 2, 1)
        plan = ((width, width, 1), (2 * width, width, 1), (2 * width, 2 * width, 2))
        self.layers = M.Sequential(*(Block(i, w, s, radix) for i, w, s in plan))
        self.fc = M.Linear(4 * width, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.layers(self.maxpool(self.stem(x)))
        return self.fc(F.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def resnest() -> M.Module:
    return settle(ResNeSt(2), *SHAPE)


def resnest_single() -> M.Module:
    return settle(ResNeSt(1), *SHAPE)
