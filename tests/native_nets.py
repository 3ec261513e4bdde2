"""Small nets in MegEngine's own quantization, trained for a few steps, and their integers by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.quantization import (
    QConfig,
    ema_fakequant_qconfig,
    quantize,
    quantize_qat,
)
from megengine.quantization.fake_quant import FakeQuantize
from megengine.quantization.observer import ExponentialMovingAverageObserver, MinMaxObserver
from megengine.quantization.utils import QuantMode
from megengine.traced_module import TracedModule

from qtrace.graph import Interpreter
from qtrace.graph.types import Node
from qtrace.preparation.model import QuantizedModel

SHAPE = (2, 3, 16, 16)

ASYMMETRIC = QConfig(
    weight_observer=partial(MinMaxObserver, dtype="qint8_narrow"),
    act_observer=partial(ExponentialMovingAverageObserver, dtype="quint8", mode=QuantMode.ASYMMERTIC),
    weight_fake_quant=partial(FakeQuantize, dtype="qint8_narrow"),
    act_fake_quant=partial(FakeQuantize, dtype="quint8"),
)


class Residual(M.Module):
    """A block of a ResNet in MegEngine's fused modules."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.ConvBnRelu2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = M.ConvBn2d(outside, outside, 3, 1, 1, bias=False)
        same = inside == outside and stride == 1
        self.shortcut = M.Identity() if same else M.ConvBn2d(inside, outside, 1, stride, bias=False)
        self.join = M.Elemwise("FUSE_ADD_RELU")

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.join(self.conv2(self.conv1(x)), self.shortcut(x))


class ResNet(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        self.stem = M.ConvBnRelu2d(3, 8, 3, 2, 1)
        self.pool = M.MaxPool2d(2)
        self.blocks = M.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.mean = M.AvgPool2d(2)
        self.fc = M.Linear(16, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.blocks(self.pool(self.stem(self.quant(x))))
        return self.dequant(self.fc(F.flatten(self.mean(x), 1)))


class Inverted(M.Module):
    """An inverted residual block of a MobileNetV2."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        middle = 2 * inside
        self.expand = M.ConvBnRelu2d(inside, middle, 1, bias=False)
        self.depthwise = M.ConvBnRelu2d(middle, middle, 3, stride, 1, groups=middle, bias=False)
        self.project = M.ConvBn2d(middle, outside, 1, bias=False)
        self.join = M.Elemwise("ADD") if inside == outside and stride == 1 else None

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return y if self.join is None else self.join(x, y)


class MobileNet(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        self.stem = M.ConvBnRelu2d(3, 8, 3, 2, 1, bias=False)
        self.blocks = M.Sequential(Inverted(8, 8, 1), Inverted(8, 12, 2), Inverted(12, 12, 1))
        self.head = M.ConvRelu2d(12, 16, 1)
        self.mean = M.AvgPool2d(4)
        self.fc = M.Linear(16, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.head(self.blocks(self.stem(self.quant(x))))
        return self.dequant(self.fc(F.flatten(self.mean(x), 1)))


@contextmanager
def one_kernel_at_a_time() -> Iterator[None]:
    """Runs MegEngine without a queue of kernels."""
    level, mge.config.async_level = mge.config.async_level, 0
    try:
        yield
    finally:
        mge.config.async_level = level


def images(seed: int, *shape: int) -> np.ndarray:
    """Returns random values of an image's size."""
    return np.random.default_rng(seed).normal(0, 1, shape or SHAPE).astype(np.float32)


@one_kernel_at_a_time()
def trained(module: M.Module, qconfig: QConfig = ema_fakequant_qconfig, steps: int = 2) -> M.Module:
    """Returns ``module`` as QAT modules that have seen a few batches, in eval mode."""
    for index, parameter in enumerate(module.parameters()):
        if parameter.ndim > 1:
            parameter[...] = images(index, *parameter.shape) / np.sqrt(parameter[0].size)
    for norm in (m for m in module.modules() if isinstance(m, M.BatchNorm2d)):
        count = norm.num_features
        norm.running_mean[...] = images(1, 1, count, 1, 1) / 4
        norm.running_var[...] = np.abs(images(2, 1, count, 1, 1)) + 0.5
        norm.weight[...] = np.abs(images(3, 1, count, 1, 1)) + 0.5
        norm.bias[...] = images(4, 1, count, 1, 1) / 2
    qat = quantize_qat(module, qconfig=qconfig)
    for step in range(steps):
        qat.train()
        qat(mge.Tensor(images(100 + step)))
    qat.eval()
    return qat


class Integers(Interpreter):
    """Runs a converted graph on MegEngine's own values, and keeps what each layer makes of them.

    Args:
        traced: the prepared or converted graph.
        expected: name of a node -> the value that its readers get.
    """

    def __init__(self, traced: TracedModule, expected: dict[str, np.ndarray]) -> None:
        super().__init__(traced)
        self.expected = expected
        self.values: dict[str, np.ndarray] = {}

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.expected:
            self.values[node.name] = value.numpy()
            return mge.Tensor(self.expected[node.name])
        return value


def differences(qat: M.Module, prepared: TracedModule, x: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yields each layer and its largest difference to MegEngine's ``quantize``, in steps of its scale.

    Each op reads the values that MegEngine's own ops gave.
    """
    integers: dict[str, mge.Tensor] = {}
    model = quantize(qat, inplace=False)
    model.eval()
    for path, layer in model.named_modules():
        if hasattr(layer, "output_dtype") or isinstance(layer, M.AvgPool2d):
            layer.register_forward_hook(lambda _m, _i, out, path=path: integers.__setitem__(path, out))
    with one_kernel_at_a_time():
        model(mge.Tensor(x))
    view = QuantizedModel(prepared)
    origins = {
        s.node.name: str(view.record.native.get(s.group)) for s in view.sites if s.sort == "activation"
    }
    names = {}
    for path in integers:
        own = (n for n, origin in origins.items() if f"'the result of {path} (" in origin)
        node = next(own, f"{path}_out")  # an average has no origin of its own
        names[next(s.value.name for s in view.sites if s.node.name == node)] = path
    expected = {name: integers[path].astype("float32").numpy() for name, path in names.items()}
    run = Integers(prepared, expected)
    run.run(mge.Tensor(x))
    for name, path in names.items():
        scale = integers[path].dtype.metadata["mgb_dtype"]["scale"]
        yield path, float(np.abs(run.values[name] - expected[name]).max()) / scale
