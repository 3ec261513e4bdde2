"""Nets that make images: EDSR, RCAN, DnCNN and a noise-to-noise U-Net."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from tests.zoo.parts import SqueezeExcite, settle

SHAPE = (3, 16, 16)


class Body(M.Module):
    """conv, relu, conv, a gate (RCAN) or a factor (EDSR), and the input."""

    def __init__(self, channels: int, gated: bool) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(channels, channels, 3, 1, 1)
        self.conv2 = M.Conv2d(channels, channels, 3, 1, 1)
        self.gate = SqueezeExcite(channels, channels // 4) if gated else None

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        if self.gate is None:
            return x + y * 0.3
        return x + self.gate(y)


def _shuffle(x: mge.Tensor, factor: int) -> mge.Tensor:
    """Pixel shuffle by hand."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels // factor**2, factor, factor, height, width)
    x = F.transpose(x, (0, 1, 4, 2, 5, 3))
    return x.reshape(batch, channels // factor**2, height * factor, width * factor)


class SuperResolution(M.Module):
    """Without the mean colour: head, residual body, conv and shuffle to twice the size, tail."""

    def __init__(self, gated: bool, shuffle: str, width: int = 8) -> None:
        super().__init__()
        self.mean = mge.Tensor(np.array([0.1, 0.05, -0.1], np.float32).reshape(1, 3, 1, 1))
        self.head = M.Conv2d(3, width, 3, 1, 1)
        self.body = M.Sequential(Body(width, gated), Body(width, gated), M.Conv2d(width, width, 3, 1, 1))
        self.up = M.Conv2d(width, 4 * width, 3, 1, 1)
        self.shuffle = shuffle
        self.pixel_shuffle = M.PixelShuffle(2)
        self.tail = M.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.head(x - self.mean)
        y = self.body(x)
        y += x
        y = self.up(y)
        if self.shuffle == "module":
            y = self.pixel_shuffle(y)
        elif self.shuffle == "function":
            y = F.nn.pixel_shuffle(y, 2)
        else:
            y = _shuffle(y, 2)
        return self.tail(y) + self.mean


class DnCNN(M.Module):
    """The noise is what the net computes; the image is what remains."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        layers = [M.Conv2d(3, width, 3, 1, 1), M.ReLU()]
        for _ in range(depth):
            layers += [M.Conv2d(width, width, 3, 1, 1, bias=False), M.BatchNorm2d(width), M.ReLU()]
        self.net = M.Sequential(*layers, M.Conv2d(width, 3, 3, 1, 1, bias=False))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return x - self.net(x)


class NoiseUNet(M.Module):
    """Leaky relu, max pools, nearest steps up, the image itself beside the last features."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = M.Conv2d(3, width, 3, 1, 1)
        self.down1 = M.Conv2d(width, width, 3, 1, 1)
        self.down2 = M.Conv2d(width, width, 3, 1, 1)
        self.up2 = M.Conv2d(2 * width, width, 3, 1, 1)
        self.up1 = M.Conv2d(width + 3, width, 3, 1, 1)
        self.leave = M.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = F.leaky_relu(self.enter(x), 0.1)
        y1 = F.max_pool2d(F.leaky_relu(self.down1(y), 0.1), 2, 2)
        y2 = F.max_pool2d(F.leaky_relu(self.down2(y1), 0.1), 2, 2)
        y = F.concat([F.vision.interpolate(y2, scale_factor=2, mode="nearest"), y1], 1)
        y = F.leaky_relu(self.up2(y), 0.1)
        y = F.concat([F.repeat(F.repeat(y, 2, 2), 2, 3), x], 1)
        return self.leave(F.leaky_relu(self.up1(y), 0.1))


def edsr() -> M.Module:
    return settle(SuperResolution(False, "module"), *SHAPE)


def edsr_function() -> M.Module:
    return settle(SuperResolution(False, "function"), *SHAPE)


def edsr_by_hand() -> M.Module:
    return settle(SuperResolution(False, "hand"), *SHAPE)


def rcan() -> M.Module:
    return settle(SuperResolution(True, "module"), *SHAPE)


def dncnn() -> M.Module:
    return settle(DnCNN(), *SHAPE)


def noise_unet() -> M.Module:
    return settle(NoiseUNet(), *SHAPE)
