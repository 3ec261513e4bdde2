"""ConvNeXt and VAN: large kernels, LayerNorm over channels, GELU, a learned scale for every layer."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from tests.zoo.parts import settle

SHAPE = (3, 32, 32)


def _scale(channels: int, *ones: int) -> mge.Parameter:
    values = np.random.default_rng(channels).uniform(0.2, 0.8, (channels, *ones))
    return mge.Parameter(values.astype(np.float32))


class ChannelNorm(M.Module):
    """LayerNorm over the channels of NCHW, written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = _scale(channels), _scale(channels)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        mean = x.mean(1, keepdims=True)
        var = ((x - mean) ** 2).mean(1, keepdims=True)
        x = (x - mean) / F.sqrt(var + 1e-6)
        return self.weight.reshape(1, -1, 1, 1) * x + self.bias.reshape(1, -1, 1, 1)


class Block(M.Module):
    """Depthwise 7x7; then, channels last: norm, linear, GELU, linear, layer scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = M.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = M.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = M.Linear(channels, 4 * channels)
        self.act = M.GELU()
        self.pwconv2 = M.Linear(4 * channels, channels)
        self.gamma = _scale(channels)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.dwconv(x).transpose(0, 2, 3, 1)
        y = self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        y = self.gamma * y
        return x + F.transpose(y, (0, 3, 1, 2))


class ConvNeXt(M.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = M.Sequential(M.Conv2d(3, width, 4, 4), ChannelNorm(width))
        self.stage1 = M.Sequential(Block(width), Block(width))
        self.down = M.Sequential(ChannelNorm(width), M.Conv2d(width, 2 * width, 2, 2))
        self.stage2 = M.Sequential(Block(2 * width))
        self.norm = M.LayerNorm(2 * width, eps=1e-6)
        self.head = M.Linear(2 * width, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class LargeKernelAttention(M.Module):
    """A depthwise, a dilated depthwise and a 1x1 conv whose product with the input is the output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.near = M.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.far = M.Conv2d(channels, channels, 7, padding=9, dilation=3, groups=channels)
        self.mix = M.Conv2d(channels, channels, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return x * self.mix(self.far(self.near(x)))


class VanBlock(M.Module):
    """Attention and a conv MLP, each after a BatchNorm and under a layer scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = M.BatchNorm2d(channels), M.BatchNorm2d(channels)
        self.proj1, self.proj2 = M.Conv2d(channels, channels, 1), M.Conv2d(channels, channels, 1)
        self.attention = LargeKernelAttention(channels)
        self.fc1 = M.Conv2d(channels, 4 * channels, 1)
        self.dw = M.Conv2d(4 * channels, 4 * channels, 3, padding=1, groups=4 * channels)
        self.fc2 = M.Conv2d(4 * channels, channels, 1)
        self.scale1, self.scale2 = _scale(channels, 1, 1), _scale(channels, 1, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.norm1(x)
        y = self.proj2(self.attention(F.gelu(self.proj1(y)))) + y
        x = x + F.expand_dims(self.scale1, 0) * y
        y = self.fc2(F.gelu(self.dw(self.fc1(self.norm2(x)))))
        return x + F.expand_dims(self.scale2, 0) * y


class Van(M.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = M.Conv2d(3, width, 7, 4, 3)
        self.embed_norm = M.BatchNorm2d(width)
        self.blocks = M.Sequential(VanBlock(width), VanBlock(width))
        self.norm = M.LayerNorm(width)
        self.head = M.Linear(width, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.blocks(self.embed_norm(self.embed(x)))
        x = self.norm(F.flatten(x, 2).transpose(0, 2, 1))
        return self.head(F.mean(x, axis=1))


def convnext() -> M.Module:
    return settle(ConvNeXt(), *SHAPE)


def van() -> M.Module:
    return settle(Van(), *SHAPE)
