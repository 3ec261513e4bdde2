"""VGG, with and without BatchNorm, and AlexNet."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import settle

SHAPE = (3, 32, 32)


class VGG(M.Module):
    """3x3 convs and max pools; two hidden linear layers."""

    def __init__(self, norm: bool, width: int = 8) -> None:
        super().__init__()
        layers, inside = [], 3
        for factor in (1, 0, 2, 0, 4, 4, 0, 8, 0):
            if not factor:
                layers.append(M.MaxPool2d(2, 2))
                continue
            layers.append(M.Conv2d(inside, factor * width, 3, 1, 1))
            layers += [M.BatchNorm2d(factor * width)] if norm else []
            layers.append(M.ReLU())
            inside = factor * width
        self.features = M.Sequential(*layers)
        self.classifier = M.Sequential(
            M.Linear(inside * 4, 64), M.ReLU(), M.Dropout(), M.Linear(64, 64), M.ReLU(), M.Dropout()
        )
        self.head = M.Linear(64, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.flatten(self.features(x), 1)
        return self.head(self.classifier(x))


class AlexNet(M.Module):
    """Large kernels, overlapping max pools, dropout before the linear layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = M.Sequential(
            M.Conv2d(3, width, kernel_size=11, stride=4, padding=5),
            M.ReLU(),
            M.MaxPool2d(kernel_size=3, stride=2, padding=1),
            M.Conv2d(width, 2 * width, kernel_size=5, padding=2),
            M.ReLU(),
            M.Conv2d(2 * width, 3 * width, kernel_size=3, padding=1),
            M.ReLU(),
            M.Conv2d(3 * width, 2 * width, kernel_size=3, padding=1),
            M.ReLU(),
            M.MaxPool2d(kernel_size=2, stride=2),
        )
        self.avgpool = M.AdaptiveAvgPool2d((2, 2))
        self.classifier = M.Sequential(
            M.Dropout(), M.Linear(8 * width, 48), M.ReLU(), M.Dropout(), M.Linear(48, 10)
        )

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(F.flatten(x, 1))


def vgg() -> M.Module:
    return settle(VGG(False), *SHAPE)


def vgg_bn() -> M.Module:
    return settle(VGG(True), *SHAPE)


def alexnet() -> M.Module:
    return settle(AlexNet(), 3, 64, 64)
