"""Oscillating weights, which flip between two levels: counting and damping them.

With few bits the straight-through estimator drives weights to the threshold between two levels, where they
flip at every other step, and the statistics of BatchNorm fit neither side (Nagel et al. 2022, "Overcoming
Oscillations in Quantization-Aware Training"). Its two cures are here: a loss that draws weights to the
middle of their level (section 4.2), and fixing those that flip too often (section 4.3, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor

from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import get_module
from qtrace.numerics import round_to
from qtrace.preparation.model import QuantizedModel

__all__ = ["Dampening", "Oscillations"]

_KEYS = ("integers", "direction", "frequency", "average", "frozen")


@dataclass(frozen=True)
class _Weight:
    """A weight and the fake quant that rounds it."""

    site: str
    value: Parameter
    fake: FakeQuant


def _weights(prepared: TracedModule) -> list[_Weight]:
    """Collects the weights that no fake quant transforms, in site order; a shared weight once."""
    weights: dict[str, _Weight] = {}
    for site in QuantizedModel(prepared, "prepared").sites:
        expr, fake = site.node.expr, site.fake_quant
        if site.sort != "weight" or not isinstance(expr, GetAttr):
            continue
        if not fake.transforms:
            weights.setdefault(expr.name, _Weight(site.name, get_module(prepared, expr.name), fake))
    return list(weights.values())


class Dampening:
    """``sum (w_rounded - clip(w))**2`` over all weights, to be added to the loss with a factor.

    The gradient goes only to the weights and draws each to the middle of its level; weights that clip get
    none. The paper's factor grows from 0 along a cosine: ``loss + cosine(schedule.fraction, 0, peak) *
    dampening()``.

    Weights that ``dorefa`` transforms are left out.

    Args:
        prepared: a module made by ``qtrace.prepare``, calibrated.

    Raises:
        GraphError: when the module is not prepared.
    """

    def __init__(self, prepared: TracedModule) -> None:
        self._weights = _weights(prepared)

    def __call__(self) -> Tensor:
        """Computes the dampening loss, a scalar."""
        total = Tensor(0.0)
        for weight in self._weights:
            scheme, fake = weight.fake.scheme, weight.fake
            scale, zero_point = fake.effective_scale().detach(), fake.effective_zero_point().detach()
            low, high = (scheme.qmin - zero_point) * scale, (scheme.qmax - zero_point) * scale
            clipped = F.minimum(F.maximum(fake.in_blocks(weight.value), low), high)
            middle = fake.in_blocks(fake.quantize_dequantize(weight.value.detach())).detach()
            total = total + ((middle - clipped) ** 2).sum()
        return total


class Oscillations:
    """Counts how often each weight flips back to the level it came from, and fixes those that do too often.

    ``update()`` belongs after each ``optimizer.step()``. The frequency of a weight is an exponential average
    of 1 (its integer changed, in the direction opposite to its last change) and 0. A weight whose frequency
    exceeds the threshold is set to the level that it was at on average and put back there after each step,
    following the scale as it learns.

    It reads all weights at each step; their integers are kept in memory. Weights that ``dorefa`` transforms
    are left out.

    Args:
        prepared: a module made by ``qtrace.prepare``, calibrated.
        threshold: the frequency above which a weight is fixed; None to count only.
        momentum: the weight of the newest step in the averages.

    Raises:
        GraphError: when the module is not prepared.
        ConfigError: when a number is out of bounds.
    """

    def __init__(
        self, prepared: TracedModule, threshold: float | None = None, momentum: float = 0.01
    ) -> None:
        _check("threshold", threshold, optional=True)
        _check("momentum", momentum)
        self.threshold, self.momentum = threshold, momentum
        self._weights = _weights(prepared)
        self._state: dict[str, dict[str, np.ndarray]] = {}
        for weight in self._weights:
            integers = _integers(weight)
            self._state[weight.site] = {
                "integers": integers,
                "direction": np.zeros(integers.shape, np.int8),
                "frequency": np.zeros(integers.shape, np.float32),
                "average": integers.astype(np.float32),
                "frozen": np.zeros(integers.shape, np.bool_),
            }

    def update(self, threshold: float | None = None) -> None:
        """Counts the flips of a step, and fixes weights.

        Args:
            threshold: a new threshold, as the paper lowers it during training; None to keep the old one.
        """
        _check("threshold", threshold, optional=True)
        self.threshold = self.threshold if threshold is None else threshold
        for weight in self._weights:
            self._update(weight, self._state[weight.site])

    def _update(self, weight: _Weight, state: dict[str, np.ndarray]) -> None:
        m = np.float32(self.momentum)
        free = ~state["frozen"]
        integers = np.where(free, _integers(weight), state["integers"])
        direction = np.sign(integers - state["integers"]).astype(np.int8)
        flipped = (direction != 0) & (direction == -state["direction"])
        state["frequency"] += m * (flipped - state["frequency"]) * free
        state["average"] += m * (integers - state["average"]) * free
        state["direction"] = np.where(direction != 0, direction, state["direction"])
        if self.threshold is not None:
            oscillating = free & (state["frequency"] > self.threshold)
            integers = np.where(oscillating, np.rint(state["average"]).astype(np.int32), integers)
            state["frozen"] |= oscillating
        state["integers"] = integers
        if state["frozen"].any():
            levels = integers.astype(np.float32) * weight.fake.grid_of(integers.shape)[0]
            value = np.where(state["frozen"], levels, weight.value.numpy())
            weight.value._reset(Parameter(value.astype(np.float32)))

    def share(self, above: float = 0.005) -> float:
        """Returns the share of weights that flip more often than `above` or are fixed; 0 without weights.

        Args:
            above: the frequency; the paper calls weights above 0.005 oscillating.
        """
        return self._share(lambda state: state["frozen"] | (state["frequency"] > above))

    @property
    def frozen(self) -> float:
        """The share of weights that are fixed."""
        return self._share(lambda state: state["frozen"])

    def _share(self, chosen: Any) -> float:
        counts = [(int(chosen(s).sum()), s["frozen"].size) for s in self._state.values()]
        return sum(n for n, _ in counts) / max(sum(size for _, size in counts), 1)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns all counts for ``np.savez``: ``SITE/KEY`` -> array."""
        return {f"{site}/{key}": state[key].copy() for site, state in self._state.items() for key in _KEYS}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores a `state_dict` of the same network.

        Raises:
            ConfigError: when the state belongs to another network.
        """
        own = self.state_dict()
        for name in {*own, *state}:
            if name not in own or name not in state or own[name].shape != np.shape(state[name]):
                raise ConfigError(
                    f"Oscillations: {name} of the saved state does not fit this network: prepare the one "
                    "that it was saved for."
                )
        for name, value in own.items():
            site, _, key = name.rpartition("/")
            self._state[site][key] = np.asarray(state[name]).astype(value.dtype)


def _check(name: str, value: Any, optional: bool = False) -> None:
    fits = isinstance(value, (int, float)) and 0 < value <= 1
    if not fits and not (optional and value is None):
        raise ConfigError(f"Oscillations: {name} is {value!r}: give a number above 0, at most 1.")


def _integers(weight: _Weight) -> np.ndarray:
    """Returns the integers of a weight minus the zero point, int32 in the weight's shape."""
    scheme = weight.fake.scheme
    value = weight.value.numpy()
    scale, zero_point = weight.fake.grid_of(value.shape)
    rounded = round_to((value / scale).astype(np.float32), scheme.rounding)
    return np.clip(rounded, scheme.qmin - zero_point, scheme.qmax - zero_point).astype(np.int32)
