"""Small networks of our own for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants


def net(forward: Callable[..., object], **children: object) -> M.Module:
    """A module with ``children`` as attributes and ``forward(self, *inputs)``."""

    def init(self: M.Module) -> None:
        M.Module.__init__(self)
        for name, child in children.items():
            setattr(self, name, child)

    return randomize(type("Net", (M.Module,), {"__init__": init, "forward": forward})())


def side_by_side(modules: Mapping[str, M.Module]) -> M.Module:
    """One network of several, each with an input of its own, and each an attribute by its name."""

    def forward(self: M.Module, *inputs: Any) -> dict[str, Any]:
        return {name: getattr(self, name)(x) for name, x in zip(modules, inputs, strict=True)}

    return net(forward, **modules)


def spread(names: Iterable[str], count: int) -> list[list[str]]:
    """Names in lists for `side_by_side`: a network for each name takes thrice the time."""
    ordered = list(names)
    return [ordered[start::count] for start in range(min(count, len(ordered)))]


def without_sites(names: Iterable[str], sites: Iterable[str]) -> list[str]:
    """The networks of `side_by_side` of which no site is among ``sites``, neither inside nor at the input."""
    own = [(name, (f"{name}_", f"inputs_{i}_")) for i, name in enumerate(names)]
    return [name for name, starts in own if not any(site.startswith(starts) for site in sites)]


def calibrated_if_quantized(prepared: TracedModule, batches: list[Any]) -> TracedModule:
    """``prepared``, calibrated where it has a site; `qtrace.calibrate` refuses a graph without one."""
    return qtrace.calibrate(prepared, batches, progress=False) if any(fake_quants(prepared)) else prepared


def randomize(module: M.Module, seed: int = 0) -> M.Module:
    """Gives BatchNorms the statistics of a trained net, and biases values; returns the module in eval."""
    rng = np.random.default_rng(seed)
    for child in module.modules():
        if isinstance(child, (M.BatchNorm2d, M.BatchNorm1d)):
            shape = child.running_mean.shape
            child.running_mean._reset(mge.Tensor(rng.normal(size=shape).astype(np.float32) * 0.2))
            child.running_var._reset(mge.Tensor(rng.uniform(0.5, 1.5, shape).astype(np.float32)))
            child.weight._reset(mge.Parameter(rng.uniform(0.5, 1.5, shape).astype(np.float32)))
            child.bias._reset(mge.Parameter(rng.normal(size=shape).astype(np.float32) * 0.2))
        elif isinstance(child, (M.Conv2d, M.Linear, M.ConvTranspose2d)):
            for name in ("weight", "bias"):
                value = getattr(child, name)
                if value is not None:
                    fan = max(int(np.prod(value.shape)) // int(max(value.shape[0], 1)), 1)
                    noise = rng.normal(size=value.shape) / np.sqrt(fan if name == "weight" else 25.0)
                    value._reset(mge.Parameter(noise.astype(np.float32)))
    module.eval()
    return module


def left_lines(report: Mapping[str, Any]) -> list[str]:
    """The sites that an algorithm left, each with the reason in a line."""
    return [f"{item['site']}: {item['reason']}".removeprefix(": ") for item in report["left"]]


class Residual(M.Module):
    """conv-bn-relu-conv-bn + shortcut, relu."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = M.BatchNorm2d(outside)
        self.conv2 = M.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = M.BatchNorm2d(outside)
        same = inside == outside and stride == 1
        projection = [M.Conv2d(inside, outside, 1, stride, bias=False), M.BatchNorm2d(outside)]
        self.shortcut = M.Identity() if same else M.Sequential(*projection)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class ResNet(M.Module):
    """ResNet-18 at any width."""

    def __init__(self, width: int = 8, blocks: tuple[int, ...] = (2, 2, 2, 2), classes: int = 10) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = M.BatchNorm2d(width)
        self.maxpool = M.MaxPool2d(3, 2, 1)
        inside = width
        stages = []
        for index, count in enumerate(blocks):
            outside = width * 2**index
            layers = []
            for number in range(count):
                layers.append(Residual(inside, outside, 2 if index and not number else 1))
                inside = outside
            stages.append(M.Sequential(*layers))
        self.stages = M.Sequential(*stages)
        self.fc = M.Linear(inside, classes)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = F.adaptive_avg_pool2d(self.stages(x), 1)
        return self.fc(F.flatten(x, 1))


class Inverted(M.Module):
    """MobileNetV2's block: expand, depthwise, project."""

    def __init__(self, inside: int, outside: int, stride: int, factor: int) -> None:
        super().__init__()
        middle = inside * factor
        self.add = stride == 1 and inside == outside
        self.expand = M.Conv2d(inside, middle, 1, bias=False)
        self.bn1 = M.BatchNorm2d(middle)
        self.depthwise = M.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False)
        self.bn2 = M.BatchNorm2d(middle)
        self.project = M.Conv2d(middle, outside, 1, bias=False)
        self.bn3 = M.BatchNorm2d(outside)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = F.relu6(self.bn1(self.expand(x)))
        y = F.relu6(self.bn2(self.depthwise(y)))
        y = self.bn3(self.project(y))
        return x + y if self.add else y


class MobileNetV2(M.Module):
    """MobileNetV2 at any width.

    Args:
        width: factor on the published widths of all layers.
        classes: number of classes.
        blocks: number of blocks of every stage; fewer numbers leave the last stages out.
    """

    def __init__(
        self, width: float = 0.25, classes: int = 10, blocks: tuple[int, ...] = (1, 2, 3, 4, 3, 3, 1)
    ) -> None:
        super().__init__()
        table = [(1, 16, 1), (6, 24, 2), (6, 32, 2), (6, 64, 2), (6, 96, 1), (6, 160, 2), (6, 320, 1)]
        inside = max(8, int(32 * width))
        self.stem = M.Conv2d(3, inside, 3, 2, 1, bias=False)
        self.stem_bn = M.BatchNorm2d(inside)
        layers = []
        for (factor, channels, stride), count in zip(table, blocks, strict=False):
            outside = max(8, int(channels * width))
            for number in range(count):
                layers.append(Inverted(inside, outside, 1 if number else stride, factor))
                inside = outside
        self.blocks = M.Sequential(*layers)
        self.head = M.Conv2d(inside, 4 * inside, 1, bias=False)
        self.head_bn = M.BatchNorm2d(4 * inside)
        self.fc = M.Linear(4 * inside, classes)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.blocks(F.relu6(self.stem_bn(self.stem(x))))
        x = F.relu6(self.head_bn(self.head(x)))
        return self.fc(F.mean(x, (2, 3)))


class Chain(M.Module):
    """conv-bn-relu, ``length`` times."""

    def __init__(self, length: int, channels: int = 4) -> None:
        super().__init__()
        self.layers = M.Sequential(
            *(
                M.Sequential(M.Conv2d(channels, channels, 3, 1, 1), M.BatchNorm2d(channels), M.ReLU())
                for _ in range(length)
            )
        )

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.layers(x)


def images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Smooth positive and negative float32 data: low-frequency waves plus noise, as images are."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(count, *shape[:-2], max(shape[-2] // 4, 1), max(shape[-1] // 4, 1)))
    smooth = coarse.repeat(4, -2).repeat(4, -1)[..., : shape[-2], : shape[-1]]
    pad = [(0, 0)] * (smooth.ndim - 2) + [
        (0, shape[-2] - smooth.shape[-2]),
        (0, shape[-1] - smooth.shape[-1]),
    ]
    return (np.pad(smooth, pad, mode="edge") + 0.3 * rng.normal(size=(count, *shape))).astype(np.float32)
