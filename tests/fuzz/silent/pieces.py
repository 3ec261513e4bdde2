"""What the text of a random network imports."""

from __future__ import annotations

from typing import Any

import megengine as mge
import numpy as np

from tests.nets import images

__all__ = ["filled", "mask", "normal", "samples", "statistics", "visible"]


def normal(
    seed: int, *shape: int, dead: bool = False, divided: tuple[int, int, float] | None = None
) -> np.ndarray:
    """Weights for values of about the variance of the inputs; the first output is 0 with ``dead``.

    Args:
        seed: of the random numbers.
        *shape: that of the weight, outputs first.
        dead: whether the first output is 0.
        divided: inputs from the first up to the second number are divided by the third.
    """
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 1) if len(shape) > 1 else 25.0)
    if dead:
        weight[0] = 0.0
    if divided is not None:
        begin, end, number = divided
        weight[:, begin:end] /= number
    return weight.astype(np.float32)


def statistics(seed: int, width: int) -> list[np.ndarray]:
    """Weight, bias, mean and variance of a BatchNorm as after training."""
    rng = np.random.default_rng(seed)
    values = [
        rng.uniform(0.5, 1.5, width),
        *(rng.normal(size=(2, width)) * 0.2),
        rng.uniform(0.5, 1.5, width),
    ]
    return [value.astype(np.float32) for value in values]


def filled(layer: Any, seed: int, **options: Any) -> Any:
    """Gives a layer of MegEngine the numbers of `normal` or `statistics`."""
    if hasattr(layer, "running_mean"):
        names = ("weight", "bias", "running_mean", "running_var")
        for name, value in zip(names, statistics(seed, layer.num_features), strict=True):
            old = getattr(layer, name)
            old._reset(type(old)(value.reshape(old.shape)))
        return layer
    shape = layer.weight.shape
    weight = normal(seed, *shape, **options)
    layer.weight._reset(mge.Parameter(weight))
    if layer.bias is not None:
        bias = normal(seed + 1, int(np.prod(layer.bias.shape)), dead=options.get("dead", False))
        layer.bias._reset(mge.Parameter(bias.reshape(layer.bias.shape)))
    return layer


def visible(seed: int, count: int) -> np.ndarray:
    """Chooses the places of ``count`` that a mask keeps: the first two among them, and not all."""
    keep = np.random.default_rng(seed).random(count) < 0.7
    keep[:2], keep[-1] = True, False
    return keep


def mask(seed: int, count: int, value: float) -> np.ndarray:
    """A row that is 0 where a place is visible, ``value`` elsewhere."""
    return np.where(visible(seed, count), np.float32(0), np.float32(value)).astype(np.float32)


def samples(kind: str, shape: tuple[int, ...], seed: int, **options: Any) -> np.ndarray:
    """Returns the values of an input: an image, a mask whose rows differ, or the places that it keeps."""
    if kind == "image":
        x = images(shape[0], *shape[1:], seed=seed)
        return (x * options.get("spread", 1.0) + options.get("shift", 0.0)).astype(np.float32)
    rows = int(np.prod(shape[:-1]))
    keep = np.stack([visible(seed * 1000 + row, shape[-1]) for row in range(rows)]).reshape(shape)
    if kind == "keep":
        return keep.astype(np.float32)
    return np.where(keep, np.float32(0), np.float32(options["value"])).astype(np.float32)
