"""The classifiers in the form that MegEngine's own QAT needs: written with its fused modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from benchmarks.accuracy.networks import STAGES

__all__ = ["NATIVE", "load_float"]


class NativeBlock(M.Module):
    """The residual block of `examples.digits`."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.ConvBnRelu2d(inputs, channels, 3, stride, 1, bias=False)
        self.conv2 = M.ConvBn2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut: M.Module = M.Identity()
        if stride != 1 or inputs != channels:
            self.shortcut = M.ConvBn2d(inputs, channels, 1, stride, bias=False)
        self.add = M.Elemwise("fuse_add_relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.add(self.conv2(self.conv1(x)), self.shortcut(x))


class NativeResNet(M.Module):
    """`examples.digits.Net`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        self.stem = M.ConvBnRelu2d(1, width, 3, 1, 1, bias=False)
        self.block1 = NativeBlock(width, width, 1)
        self.block2 = NativeBlock(width, 2 * width, 2)
        self.block3 = NativeBlock(2 * width, 4 * width, 2)
        self.fc = M.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.stem(self.quant(x)))))
        return self.dequant(self.fc(F.flatten(F.avg_pool2d(x, 2), 1)))


class NativeActivation(M.Module):
    """ReLU6 or SiLU on the rounded result of the layer before; its own result is rounded again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.round = M.QuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.round(F.relu6(x) if self.name == "relu6" else F.silu(x))


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> M.Module:
    """The module that folds its BatchNorm."""
    return M.ConvBn2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class NativeGate(M.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.squeeze = M.Conv2d(channels, inner, 1)
        self.inner = NativeActivation("silu")
        self.excite = M.Conv2d(inner, channels, 1)
        self.sigmoid, self.scale = M.Elemwise("sigmoid"), M.Elemwise("mul")

    def forward(self, x: Tensor) -> Tensor:
        mean = F.mean(x, axis=[2, 3], keepdims=True)
        return self.scale(x, self.sigmoid(self.excite(self.inner(self.squeeze(mean)))))


class NativeBottleneck(M.Module):
    """An inverted bottleneck, with a gate where ``gated``."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, activation: str, gated: bool, expand: int = 4
    ) -> None:
        super().__init__()
        hidden = inputs * expand
        self.body = M.Sequential(
            conv_bn(inputs, hidden, 1),
            NativeActivation(activation),
            conv_bn(hidden, hidden, 3, stride, hidden),
            NativeActivation(activation),
            *([NativeGate(hidden, inputs // 2)] if gated else []),
            conv_bn(hidden, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs
        self.add = M.Elemwise("add")

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.body(x)) if self.residual else self.body(x)


class NativeBottlenecks(M.Module):
    """`benchmarks.accuracy.networks.Bottlenecks`."""

    def __init__(self, activation: str, gated: bool, stem: int = 12, last: int = 64) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        layers: list[M.Module] = [conv_bn(1, stem, 3), NativeActivation(activation)]
        inputs = stem
        for outputs, stride in STAGES:
            layers.append(NativeBottleneck(inputs, outputs, stride, activation, gated))
            inputs = outputs
        layers += [conv_bn(inputs, last, 1), NativeActivation(activation)]
        self.features = M.Sequential(*layers)
        self.fc = M.Linear(last, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.quant(x))
        return self.dequant(self.fc(F.mean(x, axis=[2, 3])))


NATIVE = {
    "resnet": NativeResNet,
    "mobilenet": partial(NativeBottlenecks, "relu6", False),
    "swish": partial(NativeBottlenecks, "silu", True),
}


def load_float(native: M.Module, net: M.Module) -> None:
    """Copies the weights of ``net``: layers and norms are defined in the same order in both."""
    for kind in (M.Conv2d, M.BatchNorm2d, M.Linear):
        targets = [m for m in _defined(native) if isinstance(m, kind)]
        sources = [m for m in _defined(net) if isinstance(m, kind)]
        for target, source in zip(targets, sources, strict=True):
            target.load_state_dict(source.state_dict())


def _defined(module: M.Module) -> Iterator[M.Module]:
    """All modules inside, in the order in which they are defined; MegEngine sorts them by name."""
    yield module
    for value in vars(module).values():
        if isinstance(value, M.Module):
            yield from _defined(value)
