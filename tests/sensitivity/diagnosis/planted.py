"""Networks with a planted fault: what they compute in float stays the same, or nearly so."""

from __future__ import annotations

from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

WIDTH = 16
FACTOR = 300.0
NETS = ("plain", "residual", "depthwise")
STRONG = {"plain": 3, "residual": 3, "depthwise": 6}  # a channel that is large before the fault, too


class Net(M.Module):
    """conv, a body, two branches that are concatenated, a head, and a classifier.

    Args:
        sort: plain, residual or depthwise.
    """

    def __init__(self, sort: str) -> None:
        super().__init__()
        self.sort = sort
        self.stem = M.Conv2d(3, WIDTH, 3, 2, 1)
        groups = WIDTH if sort == "depthwise" else 1
        self.first = M.Conv2d(WIDTH, WIDTH, 3, 1, 1, groups=groups)
        self.second = M.Conv2d(WIDTH, WIDTH, 1 if sort == "depthwise" else 3, 1, 0 if groups > 1 else 1)
        self.third = M.Conv2d(WIDTH, WIDTH, 3, 1, 1)
        self.left = M.Conv2d(WIDTH, WIDTH // 2, 1)
        self.right = M.Conv2d(WIDTH, WIDTH // 2, 1)
        self.head = M.Conv2d(WIDTH, WIDTH, 3, 1, 1)
        self.fc = M.Linear(WIDTH, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.first(x))
        y = F.relu(self.second(y))
        y = self.third(y)
        x = F.relu(y + x if self.sort == "residual" else y)
        x = F.concat([F.relu(self.left(x)), F.relu(self.right(x))], 1)
        x = F.relu(self.head(x))
        return self.fc(F.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def build(sort: str) -> Net:
    """A network with weights as training begins, and small biases."""
    net = Net(sort)
    rng = np.random.default_rng(7)
    for layer in net.modules():
        if isinstance(layer, (M.Conv2d, M.Linear)):
            shape = layer.weight.shape
            out = int(np.prod(layer.bias.shape))
            fan = int(np.prod(shape)) // out
            set_weight(layer, rng.normal(size=shape) * np.sqrt(2.0 / fan))
            set_bias(layer, rng.normal(size=layer.bias.shape) * 0.1)
    net.eval()
    return net


def set_weight(layer: M.Module, value: np.ndarray) -> None:
    layer.weight._reset(mge.Parameter(value.astype(np.float32)))


def set_bias(layer: M.Module, value: np.ndarray) -> None:
    layer.bias._reset(mge.Parameter(value.astype(np.float32)))


def images(count: int, seed: int = 0) -> np.ndarray:
    """Smooth images whose channels have unlike means, and samples of unlike contrast."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(count, 3, 8, 8)).repeat(3, 2).repeat(3, 3)
    contrast = rng.uniform(0.3, 1.5, (count, 1, 1, 1))
    fine = 0.3 * rng.normal(size=coarse.shape)
    means = np.array([0.5, 0.0, -0.6]).reshape(1, 3, 1, 1)
    return ((coarse + fine) * contrast + means).astype(np.float32)


def scale_writer(layer: M.Module, factor: np.ndarray) -> None:
    """Multiplies the output channels of a layer."""
    weight = layer.weight.numpy()
    shape = (-1, *[1] * (weight.ndim - 1))
    set_weight(layer, weight * factor.reshape(shape))
    bias = layer.bias.numpy()
    set_bias(layer, bias * factor.reshape(bias.shape))


def scale_reader(layer: M.Module, factor: np.ndarray) -> None:
    """Multiplies the weights of a layer that read each input channel."""
    weight = layer.weight.numpy()
    if weight.ndim == 5:  # depthwise: (groups, 1, 1, kernel, kernel)
        set_weight(layer, weight * factor.reshape(-1, 1, 1, 1, 1))
    else:
        set_weight(layer, weight * factor.reshape(1, -1, 1, 1))


def plant_outlier(net: Net) -> None:
    """One channel between the second and the third layer is 300 times as large as the others."""
    factor = np.ones(WIDTH)
    factor[STRONG[net.sort]] = FACTOR
    scale_writer(net.second, factor)
    scale_reader(net.third, 1.0 / factor)


def plant_unlike_branches(net: Net) -> None:
    """One input of the concatenation is 300 times as large as the other."""
    scale_writer(net.right, np.full(WIDTH // 2, FACTOR))
    scale_reader(net.head, np.repeat([1.0, 1.0 / FACTOR], WIDTH // 2))


def plant_dead_channel(net: Net) -> None:
    """A channel is always 0; the weights that read it are huge, as nothing ever decayed them."""
    weight, bias = net.second.weight.numpy().copy(), net.second.bias.numpy().copy()
    weight[5], bias.reshape(-1)[5] = 0.0, -1.0
    set_weight(net.second, weight)
    set_bias(net.second, bias)
    factor = np.ones(WIDTH)
    factor[5] = FACTOR
    scale_reader(net.third, factor)


def plant_unlike_weights(net: Net) -> None:
    """The weights of two output channels of a layer are 300 times as large as the others."""
    factor = np.ones(WIDTH)
    factor[[2, 9]] = FACTOR
    scale_writer(net.second, factor)
    scale_reader(net.third, 1.0 / factor)


def nothing(net: Net) -> None:
    """Plants no fault: the fault is in the recipe or in the data."""


FAULTS: dict[str, tuple[Callable[[Net], None], str]] = {
    "outlier-channels": (plant_outlier, ""),
    # Without the rule `prepare` would leave the concatenation in float.
    "unlike-branches": (plant_unlike_branches, "rules: [{match: {op: concat}, quantize: true}]\n"),
    "clipped-range": (nothing, "observers: {activation: {percentile: {percentile: 80}}}\n"),
    "dead-channels": (plant_dead_channel, ""),
    "too-few-samples": (nothing, ""),
    "unlike-weights": (plant_unlike_weights, "activation: {bits: 16}\nweight: {axis: null}\n"),
}


def arrays() -> dict[str, np.ndarray]:
    """Calibration data, other data to judge on, and calibration data with a fault, by file name."""
    calibration, evaluation = images(128), images(64, seed=1)
    contrast = np.argsort(calibration.std(axis=(1, 2, 3)))
    return {
        "calibration": calibration,
        "evaluation": evaluation,
        "pale-first": np.concatenate([calibration[contrast[:2]], calibration[:126]]),
        "bgr": calibration[:, ::-1],
        "pixels": calibration * 60 + 120,
        "unit": calibration * 0.25 + 0.5,
    }
