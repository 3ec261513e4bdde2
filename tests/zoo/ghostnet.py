"""GhostNet: half of the features come from cheap depthwise convs on the other half."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M

from tests.zoo.parts import Gate, SqueezeExcite, conv_bn, settle

SHAPE = (3, 32, 32)


class Ghost(M.Module):
    """Primary features, their cheap copies, and a cut to the channels that are asked for."""

    def __init__(self, inside: int, outside: int, relu: bool = True) -> None:
        super().__init__()
        self.outside = outside
        primary = -(-outside // 2)
        act = M.ReLU if relu else None
        self.primary = conv_bn(inside, primary, 1, act=act)
        self.cheap = conv_bn(primary, primary, 3, act=act, groups=primary)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        first = self.primary(x)
        both = F.concat([first, self.cheap(first)], axis=1)
        return both[:, : self.outside, :, :]


class Bottleneck(M.Module):
    def __init__(self, inside: int, middle: int, outside: int, kernel: int, stride: int, se: bool) -> None:
        super().__init__()
        self.stride = stride
        self.ghost1 = Ghost(inside, middle)
        if stride > 1:
            self.depthwise = conv_bn(middle, middle, kernel, stride, None, groups=middle)
        gate = Gate(lambda x: F.relu6(x + 3.0) / 6.0)
        self.se = SqueezeExcite(middle, middle // 4, gate=lambda: gate) if se else None
        self.ghost2 = Ghost(middle, outside, relu=False)
        self.shortcut = M.Identity()
        if inside != outside or stride > 1:
            depthwise = conv_bn(inside, inside, kernel, stride, None, groups=inside)
            self.shortcut = M.Sequential(depthwise, conv_bn(inside, outside, 1, act=None))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.ghost1(x)
        if self.stride > 1:
            y = self.depthwise(y)
        if self.se is not None:
            y = self.se(y)
        y = self.ghost2(y)
        y += self.shortcut(x)
        return y


class GhostNet(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3, 2)
        plan = ((8, 8, 8, 3, 1, False), (8, 24, 11, 3, 2, False), (11, 36, 16, 5, 2, True))
        self.blocks = M.Sequential(*(Bottleneck(*row) for row in (*plan, (16, 40, 16, 5, 1, True))))
        self.last = conv_bn(16, 48, 1)
        self.head = M.Conv2d(48, 64, 1)
        self.classifier = M.Linear(64, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.adaptive_avg_pool2d(self.last(self.blocks(self.stem(x))), (1, 1))
        x = F.relu(self.head(x)).reshape(x.shape[0], -1)
        return self.classifier(F.dropout(x, 0.2, training=self.training))


def ghostnet() -> M.Module:
    return settle(GhostNet(), *SHAPE)
