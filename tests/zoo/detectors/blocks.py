"""Parts that several detectors share: a layer with its norm, a backbone, feature pyramids."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from tests.nets import Residual

__all__ = ["Backbone", "Layer", "Pyramid"]


class Layer(M.Conv2d):
    """A convolution that owns its norm and activation; its forward calls the parent's."""

    def __init__(
        self,
        inside: int,
        outside: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        norm: M.Module | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(inside, outside, kernel, stride, padding, bias=norm is None)
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.activation is None else self.activation(x)


class Backbone(M.Module):
    """A residual net whose ``extract_features`` gives the stages by name, at strides 4 to 32."""

    def __init__(self, width: int = 6, freeze: bool = True) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = M.BatchNorm2d(width, freeze=freeze)
        self.maxpool = M.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = M.Sequential(Residual(width, width, 1))
        self.layer2 = M.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.layer3 = M.Sequential(Residual(2 * width, 2 * width, 2))
        self.layer4 = M.Sequential(Residual(2 * width, 3 * width, 2))
        self.channels = {"res2": width, "res3": 2 * width, "res4": 2 * width, "res5": 3 * width}

    def extract_features(self, x: Tensor) -> dict[str, Tensor]:
        features = {}
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
            features[f"res{number + 1}"] = x
        return features

    def forward(self, x: Tensor) -> Tensor:
        return self.extract_features(x)["res5"]


class Pyramid(M.Module):
    """FPN: lateral 1x1 convolutions, a path from top to bottom, 3x3 output convolutions.

    Above the backbone's last stage stand either two strided convolutions or one subsampling.
    """

    def __init__(self, bottom: Backbone, stages: tuple[str, ...], channels: int, pooled_top: bool) -> None:
        super().__init__()
        self.bottom_up = bottom
        self.stages, self.pooled_top = stages, pooled_top
        laterals, outputs = [], []
        for stage in stages:
            lateral = Layer(bottom.channels[stage], channels, 1)
            output = Layer(channels, channels, 3, padding=1)
            number = stage[-1]
            setattr(self, f"fpn_lateral{number}", lateral)
            setattr(self, f"fpn_output{number}", output)
            laterals.insert(0, lateral)
            outputs.insert(0, output)
        self.lateral_convs, self.output_convs = laterals, outputs
        if not pooled_top:
            self.p6 = M.Conv2d(bottom.channels[stages[-1]], channels, 3, 2, 1)
            self.p7 = M.Conv2d(channels, channels, 3, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = self.bottom_up.extract_features(x)
        stages = [features[name] for name in self.stages[::-1]]
        above = self.lateral_convs[0](stages[0])
        results = [self.output_convs[0](above)]
        for stage, lateral, output in zip(
            stages[1:], self.lateral_convs[1:], self.output_convs[1:], strict=True
        ):
            height, width = stage.shape[2:]
            grown = F.vision.interpolate(above, size=(height, width), mode="bilinear")
            above = lateral(stage) + grown
            results.insert(0, output(above))
        return results + self.top(results[-1], stages[0])

    def top(self, last: Tensor, stage: Tensor) -> list[Tensor]:
        if self.pooled_top:
            return [F.max_pool2d(last, kernel_size=1, stride=2, padding=0)]
        sixth = self.p6(stage)
        return [sixth, self.p7(F.relu(sixth))]
