"""Networks with random weights in their published sizes, whose times are measured."""

from __future__ import annotations

from collections.abc import Callable

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from benchmarks.nets import MobileNetV2, ResNet18, ResNet50
from tests.zoo.darknet import CSPDarknet
from tests.zoo.detectors import yolo
from tests.zoo.efficientnet import MBConv
from tests.zoo.mobilenet import Inverted
from tests.zoo.parts import Gate, conv_bn, settle
from tests.zoo.repvgg import Block as RepBlock
from tests.zoo.repvgg import deploy

__all__ = ["BUILDERS", "build"]

_SETTLED_AT = 96  # pixels: statistics of BatchNorms hardly depend on the size of the images

# kernel, middle, outside, gate, swish, stride: table 1 of Howard et al. 2019, MobileNetV3-Large
_V3_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
# factor, outside, number, stride, kernel: table 1 of Tan and Le 2019; Lite0 has no gates, and relu6
_LITE0 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
# outside, number: RepVGG-A0 of Ding et al. 2021; the first block of each stage has stride 2
_A0 = ((48, 1), (48, 2), (96, 4), (192, 14), (1280, 1))


class Classifier(M.Module):
    """Features, their means, and linear layers."""

    def __init__(self, features: list[M.Module], *head: M.Module) -> None:
        super().__init__()
        self.features = M.Sequential(*features)
        self.head = M.Sequential(*head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.flatten(F.mean(self.features(x), axis=[2, 3], keepdims=True), 1))


def mobilenet_v3() -> M.Module:
    """MobileNetV3-Large."""

    def swish() -> M.Module:
        return Gate(F.hswish)

    layers, inside = [conv_bn(3, 16, 3, 2, swish)], 16
    for kernel, middle, outside, gated, swished, stride in _V3_LARGE:
        layers.append(Inverted(inside, middle, outside, stride, swish if swished else M.ReLU, kernel, gated))
        inside = outside
    layers.append(conv_bn(inside, 960, 1, act=swish))
    return Classifier(layers, M.Linear(960, 1280), swish(), M.Linear(1280, 1000))


def efficientnet_lite0() -> M.Module:
    """EfficientNet-Lite0."""

    def act() -> M.Module:
        return Gate(F.relu6)

    layers, inside = [conv_bn(3, 32, 3, 2, act)], 32
    for factor, outside, count, stride, kernel in _LITE0:
        for index in range(count):
            layers.append(MBConv(inside, outside, factor, kernel, 1 if index else stride, act, False))
            inside = outside
    layers.append(conv_bn(inside, 1280, 1, act=act))
    return Classifier(layers, M.Linear(1280, 1000))


def repvgg_a0() -> M.Module:
    """RepVGG-A0, its branches not merged yet."""
    layers, inside = [], 3
    for outside, count in _A0:
        for index in range(count):
            layers.append(RepBlock(inside, outside, 1 if index else 2, 1, False))
            inside = outside
    return Classifier(layers, M.Linear(inside, 1000))


class _Csp(yolo.Csp):
    """CSP with several inner blocks."""

    def __init__(self, inside: int, outside: int, shortcut: bool, conv: type[M.Module], count: int) -> None:
        super().__init__(inside, outside, shortcut, conv)
        self.m = M.Sequential(*(yolo.Narrow(outside // 2, shortcut, conv) for _ in range(count)))


class Yolox(M.Module):
    """YOLOX (Ge et al. 2021) as far as the raw outputs of its three levels.

    Args:
        width: factor of all channels.
        depth: factor of the number of blocks.
        depthwise: whether 3x3 convolutions are depthwise ones and pointwise ones.
    """

    def __init__(self, width: float, depth: float = 0.33, depthwise: bool = False) -> None:
        super().__init__()
        conv = yolo.Separable if depthwise else yolo.Block
        c1, c2, c3, c4, c5 = (int(c * width) for c in (64, 128, 256, 512, 1024))
        few, many = max(round(3 * depth), 1), max(round(9 * depth), 1)
        self.stem = yolo.Focus(c1)
        self.dark2 = M.Sequential(conv(c1, c2, 3, 2), _Csp(c2, c2, True, conv, few))
        self.dark3 = M.Sequential(conv(c2, c3, 3, 2), _Csp(c3, c3, True, conv, many))
        self.dark4 = M.Sequential(conv(c3, c4, 3, 2), _Csp(c4, c4, True, conv, many))
        self.dark5 = M.Sequential(conv(c4, c5, 3, 2), yolo.Spp(c5), _Csp(c5, c5, False, conv, few))
        self.lateral, self.reduce = yolo.Block(c5, c4, 1), yolo.Block(c4, c3, 1)
        self.p4, self.p3 = _Csp(2 * c4, c4, False, conv, few), _Csp(2 * c3, c3, False, conv, few)
        self.down3, self.down4 = conv(c3, c3, 3, 2), conv(c4, c4, 3, 2)
        self.n3, self.n4 = _Csp(2 * c3, c4, False, conv, few), _Csp(2 * c4, c5, False, conv, few)
        self.head = yolo.Decoupled((c3, c4, c5), c3, conv)

    def forward(self, x: Tensor) -> list[Tensor]:
        third = self.dark3(self.dark2(self.stem(x)))
        fourth = self.dark4(third)
        fifth = self.lateral(self.dark5(fourth))
        middle = self.reduce(self.p4(F.concat([_grow(fifth), fourth], 1)))
        high = self.p3(F.concat([_grow(middle), third], 1))
        level4 = self.n3(F.concat([self.down3(high), middle], 1))
        level5 = self.n4(F.concat([self.down4(level4), fifth], 1))
        return self.head((high, level4, level5), False)


def _grow(x: Tensor) -> Tensor:
    return F.vision.interpolate(x, scale_factor=2, mode="nearest")


BUILDERS: dict[str, Callable[[], M.Module]] = {
    "ResNet-18": ResNet18,
    "ResNet-50": ResNet50,
    "MobileNetV2": MobileNetV2,
    "MobileNetV3": mobilenet_v3,
    "EfficientNet-Lite0": efficientnet_lite0,
    "RepVGG-A0": repvgg_a0,
    "CSPDarknet": lambda: CSPDarknet(M.SiLU, 64),
    "YOLOX-nano": lambda: Yolox(0.25, depthwise=True),
    "YOLOX-tiny": lambda: Yolox(0.375),
    "YOLOX-s": lambda: Yolox(0.5),
}


def build(name: str) -> M.Module:
    """Builds a network with settled random weights; RepVGG is merged, as it is deployed."""
    net = settle(BUILDERS[name](), 3, _SETTLED_AT, _SETTLED_AT)
    return deploy(net) if name.startswith("RepVGG") else net
