"""The parts that networks of the zoo share: building blocks, and weights as a trained net has them."""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from tests.nets import images

__all__ = ["Gate", "SqueezeExcite", "conv_bn", "global_mean", "pictures", "settle"]


def conv_bn(
    inside: int,
    outside: int,
    kernel: int = 3,
    stride: int = 1,
    act: Callable[[], M.Module] | None = M.ReLU,
    groups: int = 1,
    dilation: int = 1,
) -> M.Sequential:
    """conv, norm and (unless ``act`` is None) activation; "same" padding."""
    padding = dilation * (kernel // 2)
    conv = M.Conv2d(inside, outside, kernel, stride, padding, dilation, groups, bias=False)
    layers = [conv, M.BatchNorm2d(outside)] + ([act()] if act is not None else [])
    return M.Sequential(*layers)


class Gate(M.Module):
    """An activation function as a module: of what public code writes as a function, a child of Sequential."""

    def __init__(self, function: Callable[[mge.Tensor], mge.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.function(x)


class SqueezeExcite(M.Module):
    """Global pooling, two 1x1 convs and a gate that scales the channels.

    There are 8 values in the middle at least: of fewer, all may lie below zero.
    """

    def __init__(
        self,
        channels: int,
        middle: int,
        act: Callable[[], M.Module] = M.ReLU,
        gate: Callable[[], M.Module] = M.Sigmoid,
    ) -> None:
        super().__init__()
        middle = max(middle, 8)
        self.pool = M.AdaptiveAvgPool2d(1)
        self.reduce = M.Conv2d(channels, middle, 1)
        self.act = act()
        self.expand = M.Conv2d(middle, channels, 1)
        self.gate = gate()

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.act(self.reduce(self.pool(x)))
        return x * self.gate(self.expand(y))


def pictures(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Images whose values are bounded, as those of pixels are."""
    return 1.5 * np.tanh(images(count, *shape, seed=seed))


_LAYERS = (M.Conv2d, M.Linear, M.ConvTranspose2d)
_BATCH_NORMS = (M.BatchNorm2d, M.BatchNorm1d)
_NORMS = (M.LayerNorm, M.GroupNorm, M.InstanceNorm)


def settle(module: M.Module, *shape: int, seed: int = 0) -> M.Module:
    """Gives layers weights by their fan-in, and BatchNorms nearly the statistics of what they see on images.

    Nearly, because those of a trained net are never those of the next batch.

    Args:
        module: the net; changed in place.
        *shape: of one image.
        seed: seed of all random numbers.

    Returns:
        ``module``, in eval mode.
    """
    rng = np.random.default_rng(seed)
    hooks = []
    for child in module.modules():
        if isinstance(child, _LAYERS):
            _draw_layer(child, rng)
        elif isinstance(child, _BATCH_NORMS):
            hooks.append(child.register_forward_pre_hook(lambda norm, inputs: _fit(norm, inputs[0], rng)))
        elif isinstance(child, _NORMS) and child.weight is not None:
            _set(child.weight, rng.uniform(0.5, 1.5, child.weight.shape))
            _set(child.bias, rng.normal(0, 0.2, child.bias.shape))
    module.eval()
    module(mge.Tensor(pictures(16, *shape, seed=seed)))
    for hook in hooks:
        hook.remove()
    return module


def _fit(norm: M.Module, x: mge.Tensor, rng: np.random.Generator) -> None:
    """Statistics near those of ``x``; gain and shift so that a random net is as tame as a trained one.

    A channel of little variance keeps little, and most values stay above a ReLU's zero: otherwise an error
    would grow by half in power from one layer to the next.
    """
    values = np.moveaxis(x.numpy(), 1, 0).reshape(x.shape[1], -1)
    mean, var = values.mean(1), values.var(1) + 1e-6
    gain = rng.uniform(0.5, 1.5, var.shape) * np.minimum(np.sqrt(var / var.mean()), 1.0)
    _set(norm.running_mean, mean + 0.1 * np.sqrt(var) * rng.normal(size=var.shape))
    _set(norm.running_var, var * rng.uniform(0.8, 1.25, var.shape))
    _set(norm.weight, gain)
    _set(norm.bias, gain * rng.normal(0.8, 0.3, var.shape))


def _draw_layer(layer: M.Module, rng: np.random.Generator) -> None:
    shape = layer.weight.shape
    fan = int(np.prod(shape[1:] if isinstance(layer, M.Linear) else shape[-3:]))
    if isinstance(layer, M.ConvTranspose2d):
        fan = int(np.prod(shape)) // int(shape[-3]) // int(np.prod(layer.stride))
    _set(layer.weight, rng.normal(0, np.sqrt(2.0 / max(fan, 1)), shape))
    if layer.bias is not None:
        _set(layer.bias, rng.normal(0, 0.1, layer.bias.shape))


def _set(tensor: mge.Tensor, value: np.ndarray) -> None:
    tensor._reset(type(tensor)(np.asarray(value, np.float32).reshape(tensor.shape)))


def global_mean(x: mge.Tensor) -> mge.Tensor:
    """Means over height and width, flat."""
    return F.flatten(F.adaptive_avg_pool2d(x, 1), 1)
