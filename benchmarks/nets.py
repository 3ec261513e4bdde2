"""The networks that are measured, of configurable width; written here, so that nothing is downloaded."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

__all__ = ["MobileNetV2", "NativeResNet18", "ResNet18", "ResNet50", "chain", "image_batches", "settle"]


class BasicBlock(M.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016, "Deep Residual Learning")."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = M.BatchNorm2d(outputs)
        self.conv2 = M.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = M.BatchNorm2d(outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            conv = M.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.down = M.Sequential(conv, M.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.down is None else self.down(x)))


def _stages(block: type, width: int) -> M.Sequential:
    """The eight blocks of ResNet-18; width is 64 in the paper."""
    blocks = []
    inputs = width
    for stage in range(4):
        for i in range(2):
            outputs = width << stage
            blocks.append(block(inputs, outputs, 2 if stage and not i else 1))
            inputs = outputs
    return M.Sequential(*blocks)


class ResNet18(M.Module):
    """ResNet-18 as a MegEngine user writes it."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = M.BatchNorm2d(width)
        self.pool = M.MaxPool2d(3, 2, 1)
        self.stages = _stages(BasicBlock, width)
        self.fc = M.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(F.flatten(F.mean(x, axis=[2, 3], keepdims=True), 1))


class Bottleneck(M.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * middle
        self.conv1 = M.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = M.BatchNorm2d(middle)
        self.conv2 = M.Conv2d(middle, middle, 3, stride=stride, padding=1, bias=False)
        self.bn2 = M.BatchNorm2d(middle)
        self.conv3 = M.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = M.BatchNorm2d(outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            conv = M.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.down = M.Sequential(conv, M.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.down is None else self.down(x)))


class ResNet50(M.Module):
    """ResNet-50; width 64 is the paper's."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = M.BatchNorm2d(width)
        self.pool = M.MaxPool2d(3, 2, 1)
        blocks, inputs = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not i else 1))
                inputs = 4 * width << stage
        self.stages = M.Sequential(*blocks)
        self.fc = M.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(F.flatten(F.mean(x, axis=[2, 3], keepdims=True), 1))


class NativeBlock(M.Module):
    """`BasicBlock`, rewritten the way MegEngine's own quantization asks for."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.ConvBnRelu2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv2 = M.ConvBn2d(outputs, outputs, 3, padding=1, bias=False)
        self.add = M.Elemwise("FUSE_ADD_RELU")
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = M.ConvBn2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return self.add(y, x if self.down is None else self.down(x))


class NativeResNet18(M.Module):
    """`ResNet18`, rewritten the way ``quantize_qat`` asks for."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        self.conv1 = M.ConvBnRelu2d(3, width, 7, stride=2, padding=3, bias=False)
        self.pool = M.MaxPool2d(3, 2, 1)
        self.stages = _stages(NativeBlock, width)
        self.fc = M.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.pool(self.conv1(self.quant(x))))
        return self.dequant(self.fc(F.flatten(F.mean(x, axis=[2, 3], keepdims=True), 1)))


class InvertedResidual(M.Module):
    """Expand, depthwise, project (Sandler et al. 2018, "MobileNetV2")."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        head = [] if expand == 1 else _conv_bn_relu6(inputs, hidden, 1)
        body = _conv_bn_relu6(hidden, hidden, 3, stride=stride, groups=hidden)
        tail = [M.Conv2d(hidden, outputs, 1, bias=False), M.BatchNorm2d(outputs)]
        self.body = M.Sequential(*head, *body, *tail)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class Relu6(M.Module):
    """ReLU6, for which MegEngine has a function only."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x)


def _conv_bn_relu6(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[M.Module]:
    conv = M.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, M.BatchNorm2d(outputs), Relu6()]


# expansion, channels, blocks, stride: table 2 of the paper
_MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(M.Module):
    """MobileNetV2; width 32 is the paper's."""

    def __init__(self, width: int = 32, classes: int = 1000) -> None:
        super().__init__()
        layers = _conv_bn_relu6(3, width, 3, stride=2)
        inputs = width
        for expand, channels, count, stride in _MOBILE_STAGES:
            outputs = channels * width // 32
            for i in range(count):
                layers.append(InvertedResidual(inputs, outputs, 1 if i else stride, expand))
                inputs = outputs
        layers += _conv_bn_relu6(inputs, 40 * width, 1)
        self.features = M.Sequential(*layers)
        self.fc = M.Linear(40 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.flatten(F.mean(self.features(x), axis=[2, 3], keepdims=True), 1))


def chain(length: int, width: int = 4) -> M.Module:
    """``length`` times conv, BatchNorm, ReLU in a row, in eval mode."""
    layers: list[M.Module] = []
    for _ in range(length):
        layers += [M.Conv2d(width, width, 3, padding=1, bias=False), M.BatchNorm2d(width), M.ReLU()]
    net = M.Sequential(*layers)
    net.eval()
    return net


def image_batches(count: int, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Batches of normally distributed pixels."""
    rng = np.random.default_rng(seed)
    return [Tensor(rng.standard_normal(shape, dtype=np.float32)) for _ in range(count)]


def settle(module: M.Module, batch: Tensor) -> M.Module:
    """Takes BatchNorm statistics from a batch, so that activations keep their size; leaves eval mode."""
    norms = [m for m in module.modules() if isinstance(m, M.BatchNorm2d)]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = 0.0  # MegEngine: new = momentum * old + (1 - momentum) * batch
    module.train()
    module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    module.eval()
    return module
