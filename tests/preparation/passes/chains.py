"""Random chains of layers, constant ops, moves, pools and joins, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace.graph import lint
from qtrace.preparation.normalize import normalize
from qtrace.preparation.passes.absorb import absorb
from qtrace.preparation.passes.base import PassResult
from tests.nets import net

__all__ = ["absorbed", "random_chains"]

Step = Callable[[Any, Any], Any]  # of the module and its value


def _leaves(outputs: Any) -> list[np.ndarray]:
    return [y.numpy() for y in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]


def absorbed(module: M.Module, x: np.ndarray, **options: Any) -> tuple[Any, PassResult]:
    """Returns the graph after `absorb`, whose outputs are as before, and the result of the pass."""
    flat = normalize(qtrace.trace(module, x, check=False))
    expected = _leaves(flat(mge.Tensor(x)))
    result = absorb(flat, **options)
    assert lint(flat) == []
    for new, old in zip(_leaves(flat(mge.Tensor(x))), expected, strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * max(np.abs(old).max(), 1e-3))
    return flat, result


def random_chains(rng: np.random.Generator, count: int) -> tuple[M.Module, np.ndarray]:
    """Builds a network of several chains that read the same images, and such images."""
    images = rng.standard_normal((2, 4, 8, 8)).astype(np.float32)
    chains = {f"chain{index}": _random_chain(rng) for index in range(count)}

    def forward(self: Any, x: Any) -> Any:
        return tuple(getattr(self, name)(x) for name in chains)

    return net(forward, **chains), images


def _random_chain(rng: np.random.Generator) -> M.Module:
    """Builds a module of 3 to 9 random steps on the first 2 to 4 channels of images (2, 4, 8, 8)."""
    children: dict[str, Any] = {}
    channels = int(rng.integers(2, 5))
    shape: tuple[int, ...] = (2, channels, 8, 8)
    steps: list[Step] = [] if channels == 4 else [lambda self, x: F.copy(x[:, :channels])]
    for index in range(int(rng.integers(3, 10))):
        make = _STEPS[int(rng.integers(len(_STEPS)))]
        step = make(rng, shape, children, f"m{index}")
        module = net(lambda self, x, step=step: step(self, x), **children)
        shape = tuple(int(n) for n in module(mge.Tensor(np.zeros(shape, np.float32))).shape)
        steps.append(step)

    def forward(self: Any, x: Any) -> Any:
        for step in steps:
            x = step(self, x)
        return x

    return net(forward, **children)


def _constant(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Draws a number, or one for each channel, of any sign."""
    form = [(), (1,), (shape[1], 1, 1), (1, shape[1], 1, 1)][int(rng.integers(4))]
    values = rng.uniform(0.5, 2.0, form) * (rng.choice([-1.0, 1.0], form) if rng.random() < 0.4 else 1.0)
    return float(values) if form == () else mge.Parameter(np.asarray(values, np.float32))


def _arithmetic(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    children[name] = _constant(rng, shape)
    kind = rng.choice(["mul", "mul", "div", "add", "sub", "rsub"])
    table: dict[str, Step] = {
        "mul": lambda self, x: getattr(self, name) * x,
        "div": lambda self, x: x / getattr(self, name),
        "add": lambda self, x: x + getattr(self, name),
        "sub": lambda self, x: x - getattr(self, name),
        "rsub": lambda self, x: getattr(self, name) - x,
    }
    return table[kind]


def _layer(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    channels, groups = int(shape[1]), int(shape[1]) if rng.random() < 0.3 else 1
    options = {"groups": groups, "bias": bool(rng.random() < 0.7)}
    size, out = int(rng.choice([1, 3])), groups * int(rng.integers(1, 4))
    if rng.random() < 0.2:
        children[name] = M.ConvTranspose2d(channels, out, size, stride=int(rng.integers(1, 3)), **options)
        return lambda self, x: getattr(self, name)(x)
    if rng.random() < 0.2:
        children[name] = M.Linear(int(shape[3]), 6, bias=options["bias"])
    else:
        padding = int(rng.integers(2)) if size == 3 and shape[2] > 3 and shape[3] > 3 else size // 2
        children[name] = M.Conv2d(channels, out, size, padding=padding, **options)
    return lambda self, x: getattr(self, name)(x)


def _norm(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    children[name] = M.BatchNorm2d(int(shape[1]))
    return lambda self, x: getattr(self, name)(x)


def _activation(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    children[name] = M.PReLU(int(shape[1]))
    table: list[Step] = [
        lambda self, x: F.relu(x),
        lambda self, x: F.leaky_relu(x, 0.1),
        lambda self, x: getattr(self, name)(x),
        lambda self, x: -x,
        lambda self, x: F.tanh(x),
    ]
    return table[int(rng.integers(len(table)))]


def _window(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    if min(shape[2:]) < 3:
        return lambda self, x: F.nn.interpolate(x, scale_factor=2.0)
    table: list[Step] = [
        lambda self, x: F.max_pool2d(x, 2),
        lambda self, x: F.max_pool2d(x, 3, 2, 1),
        lambda self, x: F.avg_pool2d(x, 3, 1, 1),
        lambda self, x: F.avg_pool2d(x, 3, 1, 1, mode="average"),
        lambda self, x: F.adaptive_avg_pool2d(x, 3),
        lambda self, x: F.nn.pad(x, ((0, 0), (0, 0), (1, 1), (0, 1))),
        lambda self, x: F.nn.pad(x, ((0, 0), (0, 0), (1, 1), (0, 1)), mode="reflect"),
    ]
    return table[int(rng.integers(len(table)))]


def _move(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    n, c, h, w = (int(size) for size in shape)
    table: list[Step] = [
        lambda self, x: F.transpose(x, (0, 1, 3, 2)),
        lambda self, x: x.reshape(n, c, w, h),
        lambda self, x: x.reshape(n, 1, c * h, w),
        lambda self, x: F.transpose(x, (0, 2, 1, 3)),
        lambda self, x: x[:, ::-1],
        lambda self, x: x[:, :, :3],
        lambda self, x: F.concat([x[:, :1] * 1.5, x], 1),
    ]
    if c % 2 == 0:
        table += [lambda self, x: F.concat(F.split(x, 2, axis=1)[::-1], 1)] * 2
    if c % 4 == 0:
        table.append(lambda self, x: F.nn.pixel_shuffle(x, 2))
    move = table[int(rng.integers(len(table)))]
    return lambda self, x: F.copy(move(self, x))  # some kernels take no view


def _join(rng: np.random.Generator, shape: Any, children: dict[str, Any], name: str) -> Step:
    children[name] = M.Conv2d(int(shape[1]), 2, 1)
    children[f"{name}_s"] = _constant(rng, (1, 2))
    table: list[Step] = [
        lambda self, x: F.concat([getattr(self, name)(x) * getattr(self, f"{name}_s"), x], 1),
        lambda self, x: F.concat([getattr(self, name)(x), getattr(self, name)(F.relu(x))], 1),
        lambda self, x: getattr(self, name)(x) + getattr(self, name)(x * 2),
    ]
    return table[int(rng.integers(len(table)))]


_STEPS = (_arithmetic, _arithmetic, _arithmetic, _layer, _layer, _norm, _activation, _window, _move, _join)
