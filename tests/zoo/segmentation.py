"""Nets with an answer for every pixel: U-Net, DeepLabV3+, BiSeNet, ESPNet, SimpleBaseline."""

from __future__ import annotations

import itertools

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import conv_bn, settle
from tests.zoo.resnet import Basic, ResNet

SHAPE = (3, 32, 32)


def _resize(x: mge.Tensor, like: mge.Tensor, corners: bool = False) -> mge.Tensor:
    size = (like.shape[2], like.shape[3])
    return F.vision.interpolate(x, size=size, mode="bilinear", align_corners=corners)


class UNet(M.Module):
    """Down and up again, with what was there before beside it."""

    def __init__(self, transposed: bool, width: int = 8) -> None:
        super().__init__()
        self.transposed = transposed
        widths = (width, 2 * width, 4 * width)
        self.inc = self._double(3, width)
        self.downs = [self._double(a, b) for a, b in itertools.pairwise(widths)]
        self.pool = M.MaxPool2d(2)
        pairs = list(itertools.pairwise(widths[::-1]))
        self.ups = [M.ConvTranspose2d(a, b, 2, 2) if transposed else M.Conv2d(a, b, 1) for a, b in pairs]
        self.joins = [self._double(2 * b, b) for _, b in pairs]
        self.outc = M.Conv2d(width, 4, 1)

    @staticmethod
    def _double(inside: int, outside: int) -> M.Sequential:
        return M.Sequential(conv_bn(inside, outside), conv_bn(outside, outside))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        skips = [self.inc(x)]
        for down in self.downs:
            skips.append(down(self.pool(skips[-1])))
        y = skips.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            if self.transposed:
                y = up(y)
            else:
                y = up(F.vision.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True))
            y = join(F.concat([skips.pop(), y], axis=1))
        return self.outc(y)


class ASPP(M.Module):
    """Convs of several dilations and the global mean, side by side."""

    def __init__(self, inside: int, outside: int, broadcast: bool) -> None:
        super().__init__()
        self.broadcast = broadcast
        self.point = conv_bn(inside, outside, 1)
        self.atrous = [conv_bn(inside, outside, 3, dilation=d) for d in (2, 3)]
        self.pooled = M.Sequential(M.Conv2d(inside, outside, 1), M.ReLU())
        self.project = M.Sequential(conv_bn(4 * outside, outside, 1), M.Dropout(0.1))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        batch, _, height, width = x.shape
        mean = self.pooled(F.mean(x, [2, 3], True))
        if self.broadcast:
            mean = F.broadcast_to(mean, (batch, mean.shape[1], height, width))
        else:
            mean = F.vision.interpolate(mean, (height, width))
        branches = [self.point(x), *(conv(x) for conv in self.atrous), mean]
        return self.project(F.concat(branches, 1))


class DeepLab(M.Module):
    """ASPP on a residual net; a decoder that adds early features; logits at the input's size."""

    def __init__(self, broadcast: bool) -> None:
        super().__init__()
        self.backbone = ResNet(Basic, 8)
        self.backbone.fc = None
        self.aspp = ASPP(32, 16, broadcast)
        self.low = conv_bn(8, 6, 1)
        self.join = M.Sequential(
            conv_bn(22, 22, 3, groups=22), conv_bn(22, 16, 1), M.Dropout(0.1), M.Conv2d(16, 5, 1)
        )

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        features = self.backbone.features(x)
        low = self.low(features["res2"])
        y = _resize(self.aspp(features["res4"]), low)
        y = self.join(F.concat((y, low), 1))
        return _resize(y, x)


class Refine(M.Module):
    """BiSeNet's attention refinement: a gate from the global mean."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = conv_bn(inside, outside)
        self.gate = M.Sequential(M.AdaptiveAvgPool2d(1), conv_bn(outside, outside, 1, act=None), M.Sigmoid())

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.conv(x)
        return x * self.gate(x)


class BiSeNet(M.Module):
    """A spatial and a context path; the fusion adds what it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = M.Sequential(conv_bn(3, 8, 7, 2), conv_bn(8, 8, 3, 2), conv_bn(8, 16, 1))
        self.context = ResNet(Basic, 8)
        self.context.fc = None
        self.tail = conv_bn(32, 16, 1)
        self.refine4, self.refine3 = Refine(32, 16), Refine(16, 16)
        self.head3 = conv_bn(16, 16)
        self.fuse = conv_bn(32, 16, 1)
        self.gate = M.Sequential(
            M.AdaptiveAvgPool2d(1), M.Conv2d(16, 4, 1), M.ReLU(), M.Conv2d(4, 16, 1), M.Sigmoid()
        )
        self.out = M.Sequential(conv_bn(16, 16), M.Conv2d(16, 5, 1))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        features = self.context.features(x)
        tail = self.tail(F.mean(features["res4"], axis=(2, 3), keepdims=True))
        deep = self.refine4(features["res4"])
        deep = deep + _resize(tail, deep)
        middle = self.refine3(features["res3"])
        middle += _resize(deep, middle, corners=True)
        spatial = self.spatial(x)
        y = self.fuse(F.concat([spatial, self.head3(_resize(middle, spatial, corners=True))], axis=1))
        y = y + y * self.gate(y)
        return _resize(self.out(y), x, corners=True)


class Pyramid(M.Module):
    """ESPNet's block: reduce, dilated depthwise convs added up in turn, concat, grouped 1x1, PReLU."""

    def __init__(self, inside: int, outside: int, stride: int, paths: int = 4) -> None:
        super().__init__()
        each = outside // paths
        self.add = stride == 1 and inside == outside
        self.reduce = conv_bn(inside, each, 1, act=lambda: M.PReLU(each), groups=2)
        self.paths = [
            M.Conv2d(each, each, 3, stride, d, dilation=d, groups=each, bias=False) for d in (1, 2, 3, 4)
        ]
        self.norm = M.BatchNorm2d(outside)
        self.act = M.PReLU(outside)
        self.expand = conv_bn(outside, outside, 1, act=None, groups=paths)
        self.last = M.PReLU(outside)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.reduce(x)
        sums = [self.paths[0](y)]
        for path in self.paths[1:]:
            sums.append(path(y) + sums[-1])
        y = self.expand(self.act(self.norm(F.concat(sums, axis=1))))
        return self.last(y + x if self.add else y)


class ESPNet(M.Module):
    """Pyramids that shrink, the shrunk image beside them, bilinear steps up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3, 2, lambda: M.PReLU(8))
        self.down = Pyramid(8, 16, 2)
        self.pool = M.AvgPool2d(3, 2, 1)
        self.image = conv_bn(3, 16, 1, act=None)
        self.keep = Pyramid(16, 16, 1)
        self.head = M.Conv2d(16, 4, 1, bias=False)
        self.side = M.Conv2d(8, 4, 1, bias=False)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        first = self.stem(x)
        small = self.pool(self.pool(x))
        deep = self.keep(F.relu(self.down(first) + self.image(small)))
        y = F.vision.interpolate(self.head(deep), scale_factor=2, align_corners=True)
        y = y + self.side(first)
        return F.vision.interpolate(y, scale_factor=2, align_corners=True)


class SimpleBaseline(M.Module):
    """Heatmaps from a residual net by transposed convs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = ResNet(Basic, width)
        self.backbone.fc = None
        layers, inside = [], 4 * width
        for _ in range(2):
            layers += [M.ConvTranspose2d(inside, 16, 4, 2, 1, bias=False), M.BatchNorm2d(16), M.ReLU()]
            inside = 16
        self.deconv = M.Sequential(*layers)
        self.last = M.Conv2d(16, 7, 3, 1, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.last(self.deconv(self.backbone.features(x)["res4"]))


def unet_transposed() -> M.Module:
    return settle(UNet(True), *SHAPE)


def unet_bilinear() -> M.Module:
    return settle(UNet(False), *SHAPE)


def deeplab() -> M.Module:
    return settle(DeepLab(False), *SHAPE)


def deeplab_broadcast() -> M.Module:
    return settle(DeepLab(True), *SHAPE)


def bisenet() -> M.Module:
    return settle(BiSeNet(), *SHAPE)


def espnet() -> M.Module:
    return settle(ESPNet(), *SHAPE)


def simplebaseline() -> M.Module:
    return settle(SimpleBaseline(), *SHAPE)
