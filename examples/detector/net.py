"""The detector: a residual backbone, a feature pyramid, and one head for its three levels, free of anchors.

Plain MegEngine; nothing here knows of qtrace. The network gives raw maps: what turns them into boxes is in
`examples.detector.boxes`, outside of what is quantized.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

WEIGHTS = Path(__file__).parent / "weights.npz"
STRIDES = (4, 8, 16)

Maps = tuple[mge.Tensor, ...]


class Block(M.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = M.BatchNorm2d(channels)
        self.conv2 = M.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = M.BatchNorm2d(channels)
        self.shortcut: M.Module = M.Identity()
        if stride != 1 or channels_in != channels:
            conv = M.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = M.Sequential(conv, M.BatchNorm2d(channels))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        """Computes N x channels x H/stride x W/stride features."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Pyramid(M.Module):
    """Brings three levels of features to one width, coarse ones added to fine ones."""

    def __init__(self, channels: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.lateral = [M.Conv2d(c, width, 1) for c in channels]
        self.smooth = [M.Conv2d(width, width, 3, 1, 1) for _ in channels]

    def forward(self, levels: Sequence[mge.Tensor]) -> list[mge.Tensor]:
        """Computes features of equal width, finest first."""
        merged = [lateral(x) for lateral, x in zip(self.lateral, levels, strict=True)]
        for fine in (1, 0):
            merged[fine] = merged[fine] + F.vision.interpolate(
                merged[fine + 1], scale_factor=2, mode="nearest", align_corners=None
            )
        return [F.relu(smooth(x)) for smooth, x in zip(self.smooth, merged, strict=True)]


class Head(M.Module):
    """Two branches, shared by all levels: one for classes, one for boxes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.what = M.Conv2d(width, width, 3, 1, 1)
        self.where = M.Conv2d(width, width, 3, 1, 1)
        self.classes = M.Conv2d(width, classes, 3, 1, 1)
        self.sides = M.Conv2d(width, 4, 3, 1, 1)
        self.quality = M.Conv2d(width, 1, 3, 1, 1)
        for conv, bias in ((self.classes, -3.5), (self.sides, 1.5), (self.quality, 0.0)):
            M.init.normal_(conv.weight, std=0.01)
            M.init.fill_(conv.bias, bias)

    def forward(self, levels: Sequence[mge.Tensor]) -> Maps:
        """Computes for each level class logits, distances to the sides in strides, the logit of the IoU."""
        maps: list[mge.Tensor] = []
        for x in levels:
            of_class, of_box = F.relu(self.what(x)), F.relu(self.where(x))
            maps += [self.classes(of_class), self.sides(of_box), self.quality(of_box)]
        return tuple(maps)


class Detector(M.Module):
    """Finds ``classes`` kinds of things in images of 64 x 64 pixels, or any multiple of 16."""

    def __init__(
        self, classes: int = 4, channels: tuple[int, ...] = (16, 24, 48, 64), width: int = 32
    ) -> None:
        super().__init__()
        stem, *stages = channels
        self.stem = M.Conv2d(3, stem, 3, 2, 1, bias=False)
        self.bn = M.BatchNorm2d(stem)
        self.stages = [Block(a, b, 2) for a, b in zip(channels[:-1], stages, strict=True)]
        self.pyramid = Pyramid(tuple(stages), width)
        self.head = Head(width, classes)

    def forward(self, images: mge.Tensor) -> Maps:
        """Computes nine maps: classes, sides and quality of the finest level, then of the next two."""
        x = F.relu(self.bn(self.stem(images)))
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        return self.head(self.pyramid(levels))


def save_weights(net: M.Module, file: Path) -> None:
    """Writes the weights without pickle."""
    np.savez_compressed(file, **net.state_dict())


def pretrained() -> Detector:
    """The trained detector, in eval mode; DETECTOR_WEIGHTS may name another file than the one beside this."""
    net = Detector()
    with np.load(os.environ.get("DETECTOR_WEIGHTS", WEIGHTS)) as stored:
        net.load_state_dict({name: stored[name] for name in stored.files})
    net.eval()
    return net
