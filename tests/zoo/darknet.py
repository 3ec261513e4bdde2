"""Darknet-53 and CSPDarknet (Focus, SPP), each with the features that a detector takes."""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import Gate, conv_bn, settle

SHAPE = (3, 32, 32)
Act = Callable[[], M.Module]


class Focus(M.Module):
    """Every second pixel, four times, side by side; then a conv."""

    def __init__(self, inside: int, outside: int, act: Act) -> None:
        super().__init__()
        self.conv = conv_bn(4 * inside, outside, 3, act=act)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        corners = (x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2])
        return self.conv(F.concat(corners, axis=1))


class SPP(M.Module):
    """Max pools of three sizes beside the input."""

    def __init__(self, inside: int, outside: int, act: Act) -> None:
        super().__init__()
        self.conv1 = conv_bn(inside, inside // 2, 1, act=act)
        self.pools = [M.MaxPool2d(kernel_size=k, stride=1, padding=k // 2) for k in (5, 9, 13)]
        self.conv2 = conv_bn(inside // 2 * 4, outside, 1, act=act)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.conv1(x)
        return self.conv2(F.concat([x] + [pool(x) for pool in self.pools], axis=1))


class Residual(M.Module):
    def __init__(self, channels: int, middle: int, act: Act, add: bool = True) -> None:
        super().__init__()
        self.conv1 = conv_bn(channels, middle, 1, act=act)
        self.conv2 = conv_bn(middle, channels, 3, act=act)
        self.add = add

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.conv2(self.conv1(x))
        if self.add:
            y = y + x
        return y


class CSP(M.Module):
    """Two halves by 1x1 convs, residuals in one of them."""

    def __init__(self, channels: int, count: int, act: Act, add: bool = True) -> None:
        super().__init__()
        half = channels // 2
        self.conv1 = conv_bn(channels, half, 1, act=act)
        self.conv2 = conv_bn(channels, half, 1, act=act)
        self.conv3 = conv_bn(2 * half, channels, 1, act=act)
        self.m = M.Sequential(*(Residual(half, half, act, add) for _ in range(count)))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.conv3(F.concat((self.m(self.conv1(x)), self.conv2(x)), axis=1))


class CSPDarknet(M.Module):
    """A dict of the features at three strides."""

    def __init__(self, act: Act, width: int = 8) -> None:
        super().__init__()
        self.stem = Focus(3, width, act)
        self.dark2 = M.Sequential(conv_bn(width, width, 3, 2, act), CSP(width, 1, act))
        self.dark3 = M.Sequential(conv_bn(width, 2 * width, 3, 2, act), CSP(2 * width, 2, act))
        self.dark4 = M.Sequential(
            conv_bn(2 * width, 4 * width, 3, 2, act),
            SPP(4 * width, 4 * width, act),
            CSP(4 * width, 1, act, add=False),
        )

    def forward(self, x: mge.Tensor) -> dict[str, mge.Tensor]:
        outputs = {}
        x = self.dark2(self.stem(x))
        outputs["dark2"] = x
        x = self.dark3(x)
        outputs["dark3"] = x
        outputs["dark4"] = self.dark4(x)
        return outputs


class Darknet53(M.Module):
    """Strided convs and residuals with leaky relu."""

    def __init__(self, act: Act, width: int = 4) -> None:
        super().__init__()
        self.stem = conv_bn(3, width, 3, 1, act)
        self.stages = []
        for index, count in enumerate((1, 2, 2)):
            inside = width * 2**index
            down = conv_bn(inside, 2 * inside, 3, 2, act)
            blocks = [Residual(2 * inside, inside, act) for _ in range(count)]
            self.stages.append(M.Sequential(down, *blocks))

    def forward(self, x: mge.Tensor) -> list[mge.Tensor]:
        x = self.stem(x)
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs[1:]


def csp_darknet() -> M.Module:
    return settle(CSPDarknet(M.SiLU), *SHAPE)


def csp_darknet_relu() -> M.Module:
    return settle(CSPDarknet(M.ReLU), *SHAPE)


def csp_darknet_sigmoid() -> M.Module:
    return settle(CSPDarknet(lambda: Gate(lambda x: x * F.sigmoid(x))), *SHAPE)


def darknet53() -> M.Module:
    return settle(Darknet53(lambda: M.LeakyReLU(0.1)), *SHAPE)


def darknet53_functional() -> M.Module:
    return settle(Darknet53(lambda: Gate(lambda x: F.leaky_relu(x, 0.1))), *SHAPE)
