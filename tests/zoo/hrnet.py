"""HRNet: branches of several resolutions side by side that exchange their features."""

from __future__ import annotations

import itertools

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import conv_bn, settle
from tests.zoo.resnet import Basic, Bottleneck

SHAPE = (3, 32, 32)


class Up(M.Module):
    """To fewer channels, then enlarged by a factor."""

    def __init__(self, inside: int, outside: int, factor: int, mode: str) -> None:
        super().__init__()
        self.conv = conv_bn(inside, outside, 1, act=None)
        self.factor, self.mode = factor, mode

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.conv(x)
        if self.mode == "nearest":
            return F.vision.interpolate(x, scale_factor=self.factor, mode="nearest")
        return F.vision.interpolate(x, scale_factor=self.factor, mode="bilinear", align_corners=False)


def _down(inside: int, outside: int, steps: int) -> M.Sequential:
    """Strided convs; only the last one changes the channels and has no activation."""
    layers = [conv_bn(inside, inside, 3, 2) for _ in range(steps - 1)]
    return M.Sequential(*layers, conv_bn(inside, outside, 3, 2, None))


class Exchange(M.Module):
    """A block on every branch; then every branch is the sum of all, resized."""

    def __init__(self, widths: tuple[int, ...], mode: str) -> None:
        super().__init__()
        self.branches = [Basic(w, w, 1, M.Identity()) for w in widths]
        pairs = itertools.product(range(len(widths)), repeat=2)
        self.fuse = [self._path(widths, source, target, mode) for target, source in pairs]

    @staticmethod
    def _path(widths: tuple[int, ...], source: int, target: int, mode: str) -> M.Module:
        if source == target:
            return M.Identity()
        if source > target:
            return Up(widths[source], widths[target], 2 ** (source - target), mode)
        return _down(widths[source], widths[target], target - source)

    def forward(self, xs: list[mge.Tensor]) -> list[mge.Tensor]:
        xs = [branch(x) for branch, x in zip(self.branches, xs, strict=True)]
        outs = []
        for start in range(0, len(self.fuse), len(xs)):
            row = self.fuse[start : start + len(xs)]
            y = row[0](xs[0])
            for path, x in zip(row[1:], xs[1:], strict=True):
                y = y + path(x)
            outs.append(F.relu(y))
        return outs


class HRNet(M.Module):
    """Stem, two and then three branches; a head that joins them for every pixel."""

    def __init__(self, mode: str, width: int = 8) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = M.Sequential(conv_bn(3, 8, 3, 2), conv_bn(8, 8, 3, 2))
        self.layer1 = Bottleneck(8, 4, 1, conv_bn(8, 16, 1, act=None))
        self.transition1 = [conv_bn(16, widths[0]), conv_bn(16, widths[1], 3, 2)]
        self.stage2 = Exchange(widths[:2], mode)
        self.transition2 = conv_bn(widths[1], widths[2], 3, 2)
        self.stage3 = Exchange(widths, mode)
        self.last = M.Sequential(conv_bn(sum(widths), 16, 1), M.Conv2d(16, 5, 1))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.layer1(self.stem(x))
        xs = self.stage2([layer(x) for layer in self.transition1])
        xs = self.stage3([*xs, self.transition2(xs[-1])])
        size = xs[0].shape[2:]
        up = [F.vision.interpolate(y, size=size, mode="bilinear", align_corners=False) for y in xs[1:]]
        return self.last(F.concat([xs[0], *up], axis=1))


def hrnet() -> M.Module:
    return settle(HRNet("nearest"), *SHAPE)


def hrnet_bilinear() -> M.Module:
    return settle(HRNet("bilinear"), *SHAPE)
