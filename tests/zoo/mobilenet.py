"""MobileNet V1, V2 (its relu6 in the ways it is written) and V3."""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import Gate, SqueezeExcite, conv_bn, global_mean, settle

SHAPE = (3, 32, 32)
Act = Callable[[], M.Module]


class MobileNetV1(M.Module):
    """Depthwise and pointwise convs in turn."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        plan = ((1, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2))
        layers = [conv_bn(3, width, 3, 2)]
        for inside, outside, stride in plan:
            layers.append(conv_bn(inside * width, inside * width, 3, stride, groups=inside * width))
            layers.append(conv_bn(inside * width, outside * width, 1))
        self.features = M.Sequential(*layers)
        self.classifier = M.Linear(8 * width, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.avg_pool2d(self.features(x), 4)
        return self.classifier(F.flatten(x, 1))


class Inverted(M.Module):
    """Expand, depthwise, (squeeze and excite,) project; the sum where shapes agree."""

    def __init__(
        self, inside: int, middle: int, outside: int, stride: int, act: Act, kernel: int = 3, se: bool = False
    ) -> None:
        super().__init__()
        self.add = stride == 1 and inside == outside
        layers = [conv_bn(inside, middle, 1, act=act)] if middle != inside else []
        layers.append(conv_bn(middle, middle, kernel, stride, act, groups=middle))
        if se:
            layers.append(SqueezeExcite(middle, middle // 4, gate=lambda: Gate(F.hsigmoid)))
        layers.append(conv_bn(middle, outside, 1, act=None))
        self.layers = M.Sequential(*layers)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.layers(x)
        return x + y if self.add else y


class MobileNetV2(M.Module):
    """Inverted residuals with linear bottlenecks."""

    def __init__(self, act: Act, width: int = 8) -> None:
        super().__init__()
        plan = ((1, 1, 1), (6, 1, 1), (6, 2, 2), (6, 2, 1), (6, 3, 2))
        layers, inside = [conv_bn(3, width, 3, 2, act)], width
        for factor, outside, stride in plan:
            layers.append(Inverted(inside, factor * inside, outside * width, stride, act))
            inside = outside * width
        layers.append(conv_bn(inside, 8 * width, 1, act=act))
        self.features = M.Sequential(*layers)
        self.classifier = M.Sequential(M.Dropout(0.2), M.Linear(8 * width, 10))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.classifier(F.mean(self.features(x), axis=[2, 3]))


class MobileNetV3(M.Module):
    """Inverted residuals, some with squeeze and excite; ReLU first, hard swish later."""

    def __init__(self, swish: Act, width: int = 8) -> None:
        super().__init__()
        # kernel, middle, outside, gate, swish, stride
        plan = (
            (3, 16, 8, True, False, 2),
            (3, 24, 8, False, False, 1),
            (5, 32, 16, True, True, 2),
            (5, 48, 16, True, True, 1),
        )
        layers, inside = [conv_bn(3, width, 3, 2, swish)], width
        for kernel, middle, outside, se, swished, stride in plan:
            act = swish if swished else M.ReLU
            layers.append(Inverted(inside, middle, outside, stride, act, kernel, se))
            inside = outside
        layers.append(conv_bn(inside, 48, 1, act=swish))
        self.features = M.Sequential(*layers)
        self.classifier = M.Sequential(M.Linear(48, 64), swish(), M.Dropout(0.2), M.Linear(64, 10))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.classifier(global_mean(self.features(x)))


def mobilenet_v1() -> M.Module:
    return settle(MobileNetV1(), *SHAPE)


def mobilenet_v2_relu6() -> M.Module:
    return settle(MobileNetV2(lambda: Gate(lambda x: F.relu6(x))), *SHAPE)


def mobilenet_v2_clip() -> M.Module:
    return settle(MobileNetV2(lambda: Gate(lambda x: F.clip(x, 0, 6))), *SHAPE)


def mobilenet_v2_minimum() -> M.Module:
    return settle(MobileNetV2(lambda: Gate(lambda x: F.minimum(F.relu(x), 6.0))), *SHAPE)


def mobilenet_v2_relu() -> M.Module:
    return settle(MobileNetV2(M.ReLU), *SHAPE)


def mobilenet_v3() -> M.Module:
    return settle(MobileNetV3(lambda: Gate(lambda x: F.hswish(x))), *SHAPE)


def mobilenet_v3_composed() -> M.Module:
    return settle(MobileNetV3(lambda: Gate(lambda x: x * F.relu6(x + 3.0) / 6.0)), *SHAPE)
