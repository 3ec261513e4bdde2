"""Nets that live by concatenation: DenseNet, with norms before convs, and HarDNet, with its sparse links."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import Gate, conv_bn, global_mean, settle

SHAPE = (3, 32, 32)


class DenseLayer(M.Module):
    """norm, relu, 1x1, norm, relu, 3x3 on everything so far."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm1 = M.BatchNorm2d(inside)
        self.conv1 = M.Conv2d(inside, 4 * growth, 1, bias=False)
        self.norm2 = M.BatchNorm2d(4 * growth)
        self.conv2 = M.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)
        self.relu = M.ReLU()

    def forward(self, features: list[mge.Tensor]) -> mge.Tensor:
        x = F.concat(features, axis=1)
        x = self.conv1(self.relu(self.norm1(x)))
        return self.conv2(self.relu(self.norm2(x)))


class DenseBlock(M.Module):
    def __init__(self, inside: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = [DenseLayer(inside + i * growth, growth) for i in range(count)]

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return F.concat(features, axis=1)


class DenseNet(M.Module):
    def __init__(self, growth: int = 4, count: int = 3) -> None:
        super().__init__()
        self.stem = M.Sequential(conv_bn(3, 8, 7, 2), M.MaxPool2d(3, 2, 1))
        self.block1 = DenseBlock(8, growth, count)
        inside = 8 + growth * count
        self.transition = M.Sequential(
            M.BatchNorm2d(inside), M.ReLU(), M.Conv2d(inside, inside // 2, 1, bias=False), M.AvgPool2d(2, 2)
        )
        self.block2 = DenseBlock(inside // 2, growth, count)
        self.norm = M.BatchNorm2d(inside // 2 + growth * count)
        self.classifier = M.Linear(inside // 2 + growth * count, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.block2(self.transition(self.block1(self.stem(x))))
        return self.classifier(global_mean(F.relu(self.norm(x))))


class HarBlock(M.Module):
    """Layer k reads the layers k - 2**n for every n with 2**n dividing k; the odd ones leave the block."""

    def __init__(self, inside: int, growth: int, count: int) -> None:
        super().__init__()
        widths = [inside]
        self.links = []
        layers = []
        for k in range(1, count + 1):
            powers = [2**n for n in range(k.bit_length()) if k % 2**n == 0]
            links = [k - p for p in powers]
            width = int(growth * 1.6 ** (len(powers) - 1)) // 2 * 2
            layers.append(conv_bn(sum(widths[i] for i in links), width, act=lambda: Gate(F.relu6)))
            widths.append(width)
            self.links.append(links)
        self.layers = layers
        self.kept = [k for k in range(1, count + 1) if k % 2 or k == count]
        self.outside = sum(widths[k] for k in self.kept)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        values = [x]
        for layer, links in zip(self.layers, self.links, strict=True):
            chosen = [values[i] for i in links]
            values.append(layer(F.concat(chosen, 1) if len(chosen) > 1 else chosen[0]))
        return F.concat([values[k] for k in self.kept], 1)


class HarDNet(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = M.Sequential(conv_bn(3, 8, 3, 2), conv_bn(8, 12), M.MaxPool2d(3, 2, 1))
        self.block1 = HarBlock(12, 6, 4)
        self.down = M.Sequential(conv_bn(self.block1.outside, 20, 1), M.MaxPool2d(2, 2))
        self.block2 = HarBlock(20, 6, 4)
        self.head = conv_bn(self.block2.outside, 32, 1)
        self.fc = M.Linear(32, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.block2(self.down(self.block1(self.stem(x))))
        return self.fc(global_mean(self.head(x)))


def densenet() -> M.Module:
    return settle(DenseNet(), *SHAPE)


def hardnet() -> M.Module:
    return settle(HarDNet(), *SHAPE)
