"""The float classifiers: small networks of three families, for images of 1 x 8 x 8."""

from __future__ import annotations

from functools import partial

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from examples.digits import Net

__all__ = ["CLASSIFIERS", "STAGES", "Activation", "Bottleneck", "Bottlenecks"]


class Activation(M.Module):
    """ReLU6 or SiLU, for which MegEngine has functions only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x) if self.name == "relu6" else F.silu(x)


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[M.Module]:
    """A convolution with BatchNorm."""
    conv = M.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, M.BatchNorm2d(outputs)]


class Gate(M.Module):
    """Squeeze and excitation (Hu et al. 2018)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.squeeze = M.Conv2d(channels, inner, 1)
        self.excite = M.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = F.mean(x, axis=[2, 3], keepdims=True)
        return x * F.sigmoid(self.excite(F.silu(self.squeeze(mean))))


class Bottleneck(M.Module):
    """An inverted bottleneck (Sandler et al. 2018), with a gate where ``gated`` (Tan and Le 2019)."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, activation: str, gated: bool, expand: int = 4
    ) -> None:
        super().__init__()
        hidden = inputs * expand
        self.body = M.Sequential(
            *conv_bn(inputs, hidden, 1),
            Activation(activation),
            *conv_bn(hidden, hidden, 3, stride, hidden),
            Activation(activation),
            *([Gate(hidden, inputs // 2)] if gated else []),
            *conv_bn(hidden, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


# channels and stride of each bottleneck
STAGES = ((12, 1), (16, 2), (16, 1), (24, 2), (24, 1))


class Bottlenecks(M.Module):
    """A stem, five inverted bottlenecks and a classifier."""

    def __init__(self, activation: str, gated: bool, stem: int = 12, last: int = 64) -> None:
        super().__init__()
        layers = [*conv_bn(1, stem, 3), Activation(activation)]
        inputs = stem
        for outputs, stride in STAGES:
            layers.append(Bottleneck(inputs, outputs, stride, activation, gated))
            inputs = outputs
        layers += [*conv_bn(inputs, last, 1), Activation(activation)]
        self.features = M.Sequential(*layers)
        self.fc = M.Linear(last, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.mean(self.features(x), axis=[2, 3]))


# name -> what makes the network with fresh weights
CLASSIFIERS = {
    "resnet": partial(Net, 8),
    "mobilenet": partial(Bottlenecks, "relu6", False),
    "swish": partial(Bottlenecks, "silu", True),
}
