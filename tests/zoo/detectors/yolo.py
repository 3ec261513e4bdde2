"""YOLOv3 and YOLOX."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
from megengine import Tensor

__all__ = ["StaticSilu", "YoloV3", "Yolox"]

CLASSES = 3


# -- YOLOv3 --------------------------------------------------------------------------------------------


class Leaky(M.Module):
    """Convolution, norm, leaky relu."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = M.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
        self.bn = M.BatchNorm2d(outside)
        self.act = M.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Narrowing(M.Module):
    """Darknet's residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer1 = Leaky(channels, channels // 2, 1)
        self.layer2 = Leaky(channels // 2, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer2(self.layer1(x))
        out += x
        return out


class Darknet(M.Module):
    """Five stages that halve; the last three are returned."""

    def __init__(self, sizes: tuple[int, ...] = (6, 8, 8, 12, 16)) -> None:
        super().__init__()
        self.stem = Leaky(3, 4, 3)
        self.stages = []
        inside = 4
        for size in sizes:
            self.stages.append(M.Sequential(Leaky(inside, size, 3, 2), Narrowing(size)))
            inside = size

    def forward(self, x: Tensor) -> list[Tensor]:
        x, scales = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        return scales[2:]


class YoloV3(M.Module):
    """Three scales from top to bottom: upsample by two, concat; raw maps or decoded rows."""

    ANCHORS = (((10, 13), (16, 30)), ((30, 61), (62, 45)), ((90, 80), (60, 100)))

    def __init__(self, infer: bool = False) -> None:
        super().__init__()
        self.infer = infer
        self.backbone = Darknet()
        values = 2 * (5 + CLASSES)
        self.mid5, self.out5 = self.neck(16, 8), M.Conv2d(8, values, 1)
        self.reduce5 = Leaky(8, 6, 1)
        self.mid4, self.out4 = self.neck(12 + 6, 8), M.Conv2d(8, values, 1)
        self.reduce4 = Leaky(8, 6, 1)
        self.mid3, self.out3 = self.neck(8 + 6, 8), M.Conv2d(8, values, 1)

    def neck(self, inside: int, outside: int) -> M.Sequential:
        return M.Sequential(Leaky(inside, outside, 1), Leaky(outside, outside, 3), Leaky(outside, outside, 1))

    def forward(self, x: Tensor) -> Any:
        third, fourth, fifth = self.backbone(x)
        low = self.mid5(fifth)
        grown = F.vision.interpolate(self.reduce5(low), scale_factor=2, mode="nearest")
        middle = self.mid4(F.concat([grown, fourth], axis=1))
        grown = F.vision.interpolate(self.reduce4(middle), scale_factor=2, mode="bilinear")
        high = self.mid3(F.concat((grown, third), 1))
        maps = [self.out3(high), self.out4(middle), self.out5(low)]
        if not self.infer:
            return maps
        levels = zip(maps, (8, 16, 32), self.ANCHORS, strict=True)
        return F.concat([self.decode(*level) for level in levels], axis=1)

    def decode(self, x: Tensor, stride: int, anchors: Any) -> Tensor:
        count, _, height, width = x.shape
        x = x.reshape(count, 2, 5 + CLASSES, height, width).transpose(0, 1, 3, 4, 2)
        grid = mesh(height, width)
        sides = mge.Tensor(anchors, dtype="float32").reshape(1, 2, 1, 1, 2)
        centre = (F.sigmoid(x[..., :2]) + grid) * stride
        size = F.exp(x[..., 2:4]) * sides
        return F.concat([centre, size, F.sigmoid(x[..., 4:])], axis=-1).reshape(count, -1, 5 + CLASSES)


def mesh(height: Any, width: Any) -> Tensor:
    """The x and y of the cells: (height, width, 2)."""
    row = F.broadcast_to(F.arange(width).reshape(1, -1), (height, width))
    column = F.broadcast_to(F.arange(height).reshape(-1, 1), (height, width))
    return F.stack([row, column], axis=2)


# -- YOLOX ---------------------------------------------------------------------------------------------


class StaticSilu(M.Module):
    """An activation whose forward is a static method, as one public demo writes it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * F.sigmoid(x)


class Block(M.Module):
    """Convolution, norm and activation."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        pad = (kernel - 1) // 2
        self.conv = M.Conv2d(inside, outside, kernel, stride, pad, groups=groups, bias=False)
        self.bn = M.BatchNorm2d(outside, eps=1e-3)
        self.act = M.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Separable(M.Module):
    """A depthwise block and a pointwise one."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.dconv = Block(inside, inside, kernel, stride, groups=inside)
        self.pconv = Block(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pconv(self.dconv(x))


class Narrow(M.Module):
    """CSP's inner block, with or without its shortcut."""

    def __init__(self, channels: int, shortcut: bool, conv: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = Block(channels, channels, 1), conv(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        if self.shortcut:
            y = y + x
        return y


class Csp(M.Module):
    """Two 1x1 branches, one of them deep, and a layer over both."""

    def __init__(self, inside: int, outside: int, shortcut: bool, conv: Any) -> None:
        super().__init__()
        half = outside // 2
        self.conv1, self.conv2 = Block(inside, half, 1), Block(inside, half, 1)
        self.conv3 = Block(2 * half, outside, 1)
        self.m = M.Sequential(Narrow(half, shortcut, conv))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(F.concat((self.m(self.conv1(x)), self.conv2(x)), axis=1))


class Spp(M.Module):
    """Max pools of three sizes side by side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = Block(channels, channels // 2, 1)
        self.m = [M.MaxPool2d(kernel_size=k, stride=1, padding=k // 2) for k in (3, 5, 7)]
        self.conv2 = Block(channels // 2 * 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return self.conv2(F.concat([x] + [pool(x) for pool in self.m], axis=1))


class Focus(M.Module):
    """Every second pixel, four times, as channels."""

    def __init__(self, outside: int) -> None:
        super().__init__()
        self.conv = Block(12, outside, 3)

    def forward(self, x: Tensor) -> Tensor:
        corners = (x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2])
        return self.conv(F.concat(corners, axis=1))


class Pafpn(M.Module):
    """CSPDarknet and a pyramid that runs down and up again."""

    def __init__(self, width: int, conv: Any) -> None:
        super().__init__()
        c3, c4, c5 = width, 2 * width, 2 * width
        self.stem = Focus(width)
        self.dark2 = M.Sequential(conv(width, width, 3, 2), Csp(width, width, True, conv))
        self.dark3 = M.Sequential(conv(width, c3, 3, 2), Csp(c3, c3, True, conv))
        self.dark4 = M.Sequential(conv(c3, c4, 3, 2), Csp(c4, c4, True, conv))
        self.dark5 = M.Sequential(conv(c4, c5, 3, 2), Spp(c5), Csp(c5, c5, False, conv))
        self.lateral, self.reduce = Block(c5, c4, 1), Block(c4, c3, 1)
        self.p4, self.p3 = Csp(2 * c4, c4, False, conv), Csp(2 * c3, c3, False, conv)
        self.down3, self.down4 = conv(c3, c3, 3, 2), conv(c4, c4, 3, 2)
        self.n3, self.n4 = Csp(2 * c3, c4, False, conv), Csp(2 * c4, c5, False, conv)
        self.channels = (c3, c4, c5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        third = self.dark3(self.dark2(self.stem(x)))
        fourth = self.dark4(third)
        fifth = self.lateral(self.dark5(fourth))
        middle = self.p4(F.concat([self.grow(fifth), fourth], 1))
        middle = self.reduce(middle)
        high = self.p3(F.concat([self.grow(middle), third], 1))
        level4 = self.n3(F.concat([self.down3(high), middle], 1))
        level5 = self.n4(F.concat([self.down4(level4), fifth], 1))
        return high, level4, level5

    def grow(self, x: Tensor) -> Tensor:
        return F.vision.interpolate(x, scale_factor=2, mode="nearest")


class Decoupled(M.Module):
    """A stem and two branches for each level."""

    def __init__(self, channels: tuple[int, ...], width: int, conv: Any) -> None:
        super().__init__()
        self.stems = [Block(c, width, 1) for c in channels]
        self.cls_convs = [M.Sequential(conv(width, width, 3), conv(width, width, 3)) for _ in channels]
        self.reg_convs = [M.Sequential(conv(width, width, 3), conv(width, width, 3)) for _ in channels]
        self.cls_preds = [M.Conv2d(width, CLASSES, 1) for _ in channels]
        self.reg_preds = [M.Conv2d(width, 4, 1) for _ in channels]
        self.obj_preds = [M.Conv2d(width, 1, 1) for _ in channels]

    def forward(self, maps: tuple[Tensor, ...], scores: bool) -> list[Tensor]:
        outputs = []
        for index, x in enumerate(maps):
            x = self.stems[index](x)
            classes = self.cls_preds[index](self.cls_convs[index](x))
            hidden = self.reg_convs[index](x)
            boxes, objects = self.reg_preds[index](hidden), self.obj_preds[index](hidden)
            if scores:
                objects, classes = F.sigmoid(objects), F.sigmoid(classes)
            outputs.append(F.concat([boxes, objects, classes], 1))
        return outputs


class Yolox(M.Module):
    """YOLOX; ``infer`` decodes by writing into the rows."""

    def __init__(self, depthwise: bool = False, infer: bool = False, width: int = 6) -> None:
        super().__init__()
        conv = Separable if depthwise else Block
        self.infer = infer
        self.backbone = Pafpn(width, conv)
        self.head = Decoupled(self.backbone.channels, width, conv)

    def forward(self, x: Tensor) -> Any:
        outputs = self.head(self.backbone(x), self.infer)
        if not self.infer:
            return outputs
        rows = F.concat([F.flatten(t, start_axis=2) for t in outputs], axis=2)
        rows = F.transpose(rows, (0, 2, 1))
        grids, strides = [], []
        for t, stride in zip(outputs, (8, 16, 32), strict=True):
            height, width = t.shape[-2:]
            grid = mesh(height, width).reshape(1, -1, 2)
            grids.append(grid)
            strides.append(F.full((1, grid.shape[1], 1), stride))
        grid, stride = F.concat(grids, axis=1), F.concat(strides, axis=1)
        rows[..., :2] = (rows[..., :2] + grid) * stride
        rows[..., 2:4] = F.exp(rows[..., 2:4]) * stride
        return rows
