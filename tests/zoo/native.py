"""Nets written for MegEngine's own quantization: fused modules, Elemwise, stubs. And Light CNN's maxout."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import global_mean, settle

SHAPE = (3, 32, 32)


class Block(M.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.ConvBnRelu2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = M.ConvBn2d(outside, outside, 3, 1, 1, bias=False)
        same = inside == outside and stride == 1
        self.shortcut = M.Identity() if same else M.ConvBn2d(inside, outside, 1, stride, bias=False)
        self.add_relu = M.Elemwise("FUSE_ADD_RELU")

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.add_relu(self.conv2(self.conv1(x)), self.shortcut(x))


class Native(M.Module):
    """A residual net between stubs, with a concat and linear layers that are fused too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        self.stem = M.ConvBnRelu2d(3, width, 7, 2, 3)
        self.maxpool = M.MaxPool2d(2)
        self.blocks = M.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.side = M.ConvRelu2d(2 * width, width, 1)
        self.join = M.Concat()
        self.gain = M.Elemwise("MUL")
        self.fc1 = M.LinearRelu(3 * width, 16)
        self.fc2 = M.Linear(16, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.maxpool(self.stem(self.quant(x)))
        x = self.blocks(x)
        side = self.side(x)
        x = self.join([x, self.gain(side, side)], axis=1)
        x = self.fc1(global_mean(x))
        return self.dequant(self.fc2(x))


class MaxFeatureMap(M.Module):
    """Twice the channels, and the larger of each pair."""

    def __init__(self, inside: int, outside: int, kernel: int) -> None:
        super().__init__()
        self.conv = M.Conv2d(inside, 2 * outside, kernel, 1, kernel // 2)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        first, second = F.split(self.conv(x), 2, axis=1)
        return F.maximum(first, second)


class LightCNN(M.Module):
    """Maxout convs; both pools added; maxout between the linear layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = MaxFeatureMap(3, width, 5), MaxFeatureMap(width, width, 1)
        self.conv3 = MaxFeatureMap(width, 2 * width, 3)
        self.fc1, self.fc2 = M.Linear(2 * width * 64, 32), M.Linear(16, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.max_pool2d(self.conv1(x), 2, 2)
        x = self.conv3(self.conv2(x))
        x = F.max_pool2d(x, 2, 2) + F.avg_pool2d(x, 2, 2)
        x = self.fc1(x.reshape(x.shape[0], -1))
        return self.fc2(F.maximum(x[:, :16], x[:, 16:]))


def native() -> M.Module:
    return settle(Native(), *SHAPE)


def lightcnn() -> M.Module:
    return settle(LightCNN(), *SHAPE)
