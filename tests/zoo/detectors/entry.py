"""The facts of a detector or a transformer that its tests need.

The fields are those of ``tests.zoo.catalog.Entry``, but inputs are made by a function: these networks take
more than one image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megengine as mge
import megengine.module as M
import numpy as np

from tests.nets import images, randomize

__all__ = ["Entry", "Inputs", "bounded", "pictures", "trained"]

Inputs = Callable[[int, int, int], tuple[Any, ...]]


def bounded(count: int, seed: int, size: int, channels: int = 3) -> np.ndarray:
    """Images of ``size`` pixels a side whose values have bounds, as those of photographs have."""
    return np.clip(images(count, channels, size, size, seed=seed), -1.5, 1.5)


def pictures(count: int, seed: int, size: int) -> tuple[Any, ...]:
    """One argument: ``count`` images."""
    return (bounded(count, seed, size),)


@dataclass(frozen=True)
class Entry:
    """A detector or a transformer of the zoo.

    Attributes:
        name: the name of the network; unique.
        family: the family of networks that share a recipe; the recipe's name, unless ``plain``.
        build: makes the module, with the same weights every time.
        sqnr: the least SQNR of every output in 8 bits after calibration, in dB.
        note: why ``sqnr`` is below 20, if it is.
        inputs: (batch size, seed, image size) -> positional arguments.
        size: image size of the example.
        other_size: another size that the module takes; None where it takes one only.
        ends: modules behind which the graph stays float; None for all of it on integers.
        slow: whether only the slow tests run it.
        plain: whether its family has no recipe: it is quantized by the default one.
        share: the least share of the whole graph's MACs that is computed on integers; for its layers alone
            it is always 0.99.
    """

    name: str
    family: str
    build: Callable[[], M.Module]
    sqnr: float = 20.0
    note: str = ""
    inputs: Inputs = pictures
    size: int = 64
    other_size: int | None = 96
    ends: tuple[str, ...] | None = None
    slow: bool = False
    plain: bool = False
    share: float = 0.99

    @property
    def recipe(self) -> str:
        """The name of the recipe that it is quantized by."""
        return "onnxruntime" if self.plain else self.family

    @property
    def other_sqnr(self) -> None:
        """No bound: boxes and scores of other images may lie anywhere."""

    def example(self) -> tuple[Any, ...]:
        """Two images, with what else the network takes."""
        return self.inputs(2, 0, self.size)

    def calibration(self) -> list[tuple[Any, ...]]:
        """Two batches of eight."""
        return [self.inputs(8, seed, self.size) for seed in (1, 2)]

    def probes(self) -> list[tuple[Any, ...]]:
        """Another sample; then another batch size, and another image size where the network takes one."""
        return [self.inputs(2, 3, self.size), self.inputs(3, 4, self.other_size or self.size)]


def trained(module: M.Module, seed: int = 0) -> M.Module:
    """Gives a module parameters as training leaves them, and returns it in eval mode.

    Layers and BatchNorms as ``randomize`` does; the factors of other norms scatter around 1, and bare
    parameters that are still zero (tokens, position tables) get small values.
    """
    randomize(module, seed)
    rng = np.random.default_rng(seed + 1)
    layers = (M.Conv2d, M.Linear, M.ConvTranspose2d, M.BatchNorm2d, M.BatchNorm1d)
    handled = {
        id(p) for m in module.modules() if isinstance(m, layers) for p in m.parameters(recursive=False)
    }
    for parameter in module.parameters():
        if id(parameter) in handled:
            continue
        value = parameter.numpy()
        noise = rng.normal(size=value.shape) * (0.3 if value.ndim > 1 and not value.any() else 0.1)
        parameter._reset(mge.Parameter((value + noise).astype(np.float32)))
    return module
