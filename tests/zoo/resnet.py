"""Residual nets: ResNet, ResNet-D, SE-ResNet, IBN, ResNeXt and Wide ResNet from one definition."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import conv_bn, settle

SHAPE = (3, 32, 32)


class LinearSE(M.Module):
    """Squeeze and excite with linear layers, the form of SE-ResNet."""

    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        middle = max(channels // reduction, 8)
        self.fc1 = M.Linear(channels, middle, bias=False)
        self.fc2 = M.Linear(middle, channels, bias=False)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        batch, channels = x.shape[0], x.shape[1]
        y = F.adaptive_avg_pool2d(x, 1).reshape(batch, channels)
        y = F.sigmoid(self.fc2(F.relu(self.fc1(y))))
        return x * y.reshape(batch, channels, 1, 1)


class InstanceBatchNorm(M.Module):
    """IBN-a: instance norm on the first half of the channels, BatchNorm on the others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.instance = M.InstanceNorm(channels // 2)
        self.batch = M.BatchNorm2d(channels - channels // 2)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        first, second = F.split(x, 2, axis=1)
        return F.concat([self.instance(first), self.batch(second)], axis=1)


class Basic(M.Module):
    """Two 3x3 convs."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int, shortcut: M.Module, **options: Any) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = InstanceBatchNorm(width) if options.get("ibn") else M.BatchNorm2d(width)
        self.conv2 = M.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = M.BatchNorm2d(width)
        self.se = LinearSE(width) if options.get("se") else M.Identity()
        self.downsample = shortcut

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        identity = x
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.se(self.bn2(self.conv2(x)))
        x += self.downsample(identity)
        return F.relu(x)


class Bottleneck(M.Module):
    """1x1, 3x3 (grouped in ResNeXt, wider in Wide ResNet), 1x1."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int, shortcut: M.Module, **options: Any) -> None:
        super().__init__()
        groups, outside = options.get("groups", 1), width * self.expansion
        middle = width * options.get("wide", 1)
        self.conv1 = M.Conv2d(inside, middle, 1, bias=False)
        self.bn1 = M.BatchNorm2d(middle)
        self.conv2 = M.Conv2d(middle, middle, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = M.BatchNorm2d(middle)
        self.conv3 = M.Conv2d(middle, outside, 1, bias=False)
        self.bn3 = M.BatchNorm2d(outside)
        self.relu = M.ReLU()
        self.se = LinearSE(outside) if options.get("se") else None
        self.downsample = shortcut

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        if self.se is not None:
            y = self.se(y)
        return self.relu(y + self.downsample(x))


class ResNet(M.Module):
    """A stem, three stages and a classifier; ``features`` gives the stages' outputs.

    Options: ``deep`` (three 3x3 convs as stem and an average pool before the projection: variant d),
    ``window`` (a pooling window of fixed size before the classifier), ``dilate`` (the last stage keeps its
    resolution), and those of the blocks.
    """

    def __init__(
        self, block: type[M.Module], width: int = 8, blocks: tuple[int, ...] = (2, 1, 1), **options: Any
    ) -> None:
        super().__init__()
        self.options = options
        if options.get("deep"):
            half = width // 2
            self.stem = M.Sequential(conv_bn(3, half, 3, 2), conv_bn(half, half), conv_bn(half, width))
        else:
            self.stem = conv_bn(3, width, 7, 2)
        self.maxpool = M.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.width = width
        stages = [self._stage(block, width * 2**i, n, 2 if i else 1) for i, n in enumerate(blocks)]
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = M.Linear(self.width, 10)

    def _stage(self, block: type[M.Module], width: int, count: int, stride: int) -> M.Sequential:
        layers = []
        for number in range(count):
            step = 1 if number else stride
            shortcut = self._shortcut(width * block.expansion, step)
            layers.append(block(self.width, width, step, shortcut, **self.options))
            self.width = width * block.expansion
        return M.Sequential(*layers)

    def _shortcut(self, outside: int, stride: int) -> M.Module:
        if stride == 1 and self.width == outside:
            return M.Identity()
        if not self.options.get("deep"):
            return conv_bn(self.width, outside, 1, stride, None)
        pool = M.AvgPool2d(stride, stride) if stride > 1 else M.Identity()
        return M.Sequential(pool, conv_bn(self.width, outside, 1, 1, None))

    def features(self, x: mge.Tensor) -> dict[str, mge.Tensor]:
        by_stage = {"stem": self.maxpool(self.stem(x))}
        by_stage["res2"] = self.layer1(by_stage["stem"])
        by_stage["res3"] = self.layer2(by_stage["res2"])
        by_stage["res4"] = self.layer3(by_stage["res3"])
        return by_stage

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.features(x)["res4"]
        x = F.avg_pool2d(x, 2) if self.options.get("window") else F.adaptive_avg_pool2d(x, 1)
        return self.fc(F.flatten(x, 1))


def resnet_basic() -> M.Module:
    return settle(ResNet(Basic, window=True), *SHAPE)


def resnet_bottleneck() -> M.Module:
    return settle(ResNet(Bottleneck, 4), *SHAPE)


def resnet_d() -> M.Module:
    return settle(ResNet(Bottleneck, 4, deep=True), *SHAPE)


def resnet_ibn() -> M.Module:
    return settle(ResNet(Basic, ibn=True), *SHAPE)


def se_resnet_basic() -> M.Module:
    return settle(ResNet(Basic, se=True), *SHAPE)


def se_resnet_bottleneck() -> M.Module:
    return settle(ResNet(Bottleneck, 4, se=True), *SHAPE)


def resnext() -> M.Module:
    return settle(ResNet(Bottleneck, 4, groups=4, wide=2), *SHAPE)


def wide_resnet() -> M.Module:
    return settle(ResNet(Bottleneck, 4, wide=2), *SHAPE)
