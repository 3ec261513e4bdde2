"""Helpers for a training loop of one's own: parameter groups, freezing, damped oscillations.

Nothing here is needed to train: a prepared module in the phase ``train`` is an ordinary Module.

With few bits the straight-through estimator drives weights to the threshold between two levels. There they
flip at every other step, and the statistics of BatchNorm fit neither side (Nagel et al. 2022, "Overcoming
Oscillations in Quantization-Aware Training"). Its two cures are here: a loss that draws weights to the middle
of their level (section 4.2), and fixing those that flip too often (section 4.3, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Parameter, Tensor
from megengine.module import Module
from megengine.module.batchnorm import _BatchNorm

from qtrace.errors import ConfigError, shorten_list
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import get_module
from qtrace.numerics import round_to
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.insert import CONTAINER

# Parameter groups for an optimizer, schedules that freeze statistics, and loading of a ``state_dict``.

_NORMS = (_BatchNorm, M.LayerNorm, M.GroupNorm, M.InstanceNorm)


def param_groups(
    prepared: Module,
    lr: float,
    range_lr: float | None = None,
    weight_decay: float = 0.0,
    range_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups the parameters of a prepared module for one of MegEngine's optimizers.

    Weights decay. Biases and the parameters of norms do not: shrinking them regularizes nothing. What ranges
    learn (scales, offsets, thresholds) has a rate of its own. It does not decay either, since that would make
    a range smaller whatever the data. The exception is PACT, whose paper wants it.

    Args:
        prepared: a module made by ``qtrace.prepare``, or one that holds such modules next to float ones.
        lr: the learning rate of weights, biases and norms.
        range_lr: the learning rate of ranges; None for a tenth of `lr`.
        weight_decay: the decay of weights.
        range_decay: the decay of ranges.

    Returns:
        A list of ``{"params", "lr", "weight_decay"}`` without empty groups, every Parameter in one of them:
        ``SGD(qtrace.param_groups(prepared, 0.01, weight_decay=1e-4), lr=0.01, momentum=0.9)``.

    Raises:
        ConfigError: when a rate or a decay is negative or not finite, or there are no parameters.
    """
    if not isinstance(prepared, Module):
        raise ConfigError(f"param_groups takes a prepared module, not {type(prepared).__name__}.")
    range_lr = lr / 10 if range_lr is None else range_lr
    options = {"lr": lr, "range_lr": range_lr, "weight_decay": weight_decay, "range_decay": range_decay}
    for name, value in options.items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise ConfigError(f"param_groups: {name} is {value!r}: give a number that is 0 or more.")
    weights: list[Parameter] = []
    plain: list[Parameter] = []
    ranges: list[Parameter] = []
    seen: set[int] = set()
    for module in prepared.modules():
        for name, parameter in module.named_parameters(recursive=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, FakeQuant):
                ranges.append(parameter)
            elif isinstance(module, _NORMS) or name == "bias" or name.endswith("_bias"):
                plain.append(parameter)
            else:
                weights.append(parameter)
    if not seen:
        raise ConfigError(
            "param_groups: the module lacks parameters: give one that qtrace.prepare made, before convert."
        )
    groups = ((weights, lr, weight_decay), (plain, lr, 0.0), (ranges, range_lr, range_decay))
    return [{"params": p, "lr": rate, "weight_decay": decay} for p, rate, decay in groups if p]


def freeze_batchnorm(module: Module, frozen: bool = True) -> int:
    """Stops (or resumes) the batch statistics of every BatchNorm that was kept; weights go on learning.

    A layer with its BatchNorm then computes what ``convert`` writes: folded weights. ``module.train()``
    resumes them all: freeze after it, or use `Schedule`.

    Args:
        module: a module made by ``qtrace.prepare``, or any other.
        frozen: False resumes.

    Returns:
        The number of BatchNorms.
    """
    norms = [child for child in module.modules() if isinstance(child, _BatchNorm)]
    for norm in norms:
        norm.training = not frozen
    return len(norms)


def freeze_ranges(prepared: TracedModule, frozen: bool = True) -> None:
    """Stops (or resumes) the learning of ranges; values are rounded as before, weights go on learning.

    Optimizers skip parameters without a gradient, momentum included. A ``jit.trace`` captured before must be
    captured again.

    Args:
        prepared: a module made by ``qtrace.prepare``, in the phase ``train``.
        frozen: False resumes.

    Raises:
        GraphError: when the module is not prepared.
        ConfigError: when it is not being trained.
    """
    _set_ranges(QuantizedModel(prepared, "prepared"), frozen)


def _set_ranges(prepared: QuantizedModel, frozen: bool) -> None:
    for fake in prepared.fake_quants.values():
        if fake.phase not in ("quantize", "train"):
            raise ConfigError(
                f"the module is in the phase {fake.phase!r}: call qtrace.set_phase(prepared, 'train') first."
            )
        fake.phase = "quantize" if frozen else "train"


class Schedule:
    """Freezes BatchNorm's statistics and the ranges after fractions of a training; one call for each step.

    ``schedule = Schedule(prepared, steps=1000, freeze_bn=0.5, freeze_ranges=0.8)`` before the loop and
    ``schedule.step()`` in it, before the forward pass. What was frozen stays so when the loop calls
    ``prepared.train()`` again.

    Args:
        prepared: a module made by ``qtrace.prepare``, in the phase ``train``.
        steps: the number of steps of the training.
        freeze_bn: the fraction after which BatchNorm's statistics stay; None for the recipe's value
            (``qat: {bn: {freeze_after: ...}}``), never if it lacks one.
        freeze_ranges: the fraction after which ranges stay; None for never.
        done: the number of steps before a resumption.

    Raises:
        GraphError: when the module is not prepared.
        ConfigError: when a number is out of bounds.
    """

    def __init__(
        self,
        prepared: TracedModule,
        steps: int,
        *,
        freeze_bn: float | None = None,
        freeze_ranges: float | None = None,
        done: int = 0,
    ) -> None:
        self._model = QuantizedModel(prepared, "prepared")
        recipe = self._model.record.qconfig
        if freeze_bn is None:
            freeze_bn = ((recipe.get("qat") or {}).get("bn") or {}).get("freeze_after")
        for name, count, minimum in (("steps", steps, 1), ("done", done, 0)):
            if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
                raise ConfigError(f"Schedule: {name} is {count!r}: give a whole number from {minimum} on.")
        for name, value in (("freeze_bn", freeze_bn), ("freeze_ranges", freeze_ranges)):
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 1):
                raise ConfigError(f"Schedule: {name} is {value!r}: give a fraction from 0 to 1, or None.")
        self.prepared, self.steps, self.done = prepared, steps, done
        self.freeze_bn, self.freeze_ranges = freeze_bn, freeze_ranges

    @property
    def fraction(self) -> float:
        """The completed share of the training, 0 to 1, for `cosine`."""
        return min(self.done / self.steps, 1.0)

    @property
    def frozen(self) -> tuple[bool, bool]:
        """Whether BatchNorm's statistics and the ranges are to be frozen at the present step."""
        ends = (self.freeze_bn, self.freeze_ranges)
        bn, ranges = (end is not None and self.done >= end * self.steps for end in ends)
        return bn, ranges

    def step(self) -> tuple[bool, bool]:
        """Freezes BatchNorms and ranges that are due, counts a step, and returns `frozen` of that step.

        Raises:
            ConfigError: when the module is not being trained.
        """
        bn, ranges = self.frozen
        if bn:
            freeze_batchnorm(self.prepared)
        if ranges:
            _set_ranges(self._model, True)
        self.done += 1
        return bn, ranges


def cosine(fraction: float, start: float, end: float) -> float:
    """Half a cosine from `start` (at fraction 0) to `end` (at 1), for rates and for `Dampening`.

    Args:
        fraction: the completed share of the training.
        start: the value at the beginning.
        end: the value at the end.
    """
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))


_BATCHNORM = ("running_mean", "running_var")


def load_state(prepared: Module, state: Mapping[str, np.ndarray]) -> None:
    """Loads what ``state_dict()`` of a module that was prepared with the same config returned.

    Averages of such states load, too: numbers stand for arrays without axes, and zero points are rounded.
    ``load_state_dict`` of MegEngine refuses those, and raises a KeyError with the names of all tensors where
    the configs differ. Nothing is loaded if anything differs.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        state: the weights, scales and zero points by name.

    Raises:
        ConfigError: when a site or a parameter is missing or has another shape or other values to learn,
            naming the first ones of each kind.
    """
    own = prepared.state_dict()
    sites, others = _groups(own), _groups(state)
    differing = [name for name in sites if name in others and sites[name] != others[name]]
    shapes = [
        f"{name} {_shape(state[name])} instead of {_shape(own[name])}"
        for name in own
        if name in state and np.size(state[name]) != own[name].size
    ]
    lost = [name for name in own if name not in state and not _is_site(name)]
    extra = [name for name in state if name not in own and not _is_site(name)]
    fakes = [f"{name} ({', '.join(others[name])} instead of {', '.join(sites[name])})" for name in differing]
    differences = {
        "it has no values for the sites": [name for name in sites if name not in others],
        "it has sites that this graph does not have": [name for name in others if name not in sites],
        "other fake quants stood at": fakes,
        "it has no": lost,
        "it has parameters that this graph does not have": extra,
        "other shapes": shapes,
    }
    if problems := [_listed(subject, names) for subject, names in differences.items() if names]:
        norms = any(name.endswith(_BATCHNORM) for name in (*lost, *extra))
        cause = ", such as qat.bn.fold, which keeps or removes BatchNorms" if norms else ""
        raise ConfigError(
            f"the state is of a graph that was prepared otherwise: {'; '.join(problems)}. "
            f"Prepare the model with the config that the state is of{cause}, or calibrate this one."
        )
    prepared.load_state_dict({name: _as_own(name, state[name], value) for name, value in own.items()})


def _as_own(name: str, value: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns a tensor of a state with the type and shape of the module's own; a zero point as an integer."""
    array = np.asarray(value, np.float64)
    return np.asarray(np.rint(array) if name.endswith(".zero_point") else array, own.dtype).reshape(own.shape)


def _is_site(name: str) -> bool:
    return name.startswith(f"{CONTAINER}.")


def _groups(state: Mapping[str, object]) -> dict[str, list[str]]:
    """Returns the names of the tensors of each site."""
    groups: dict[str, list[str]] = {}
    for name in sorted(filter(_is_site, state)):
        site, _, tensor = name.removeprefix(f"{CONTAINER}.").rpartition(".")
        groups.setdefault(site, []).append(tensor)
    return groups


def _shape(value: np.ndarray) -> str:
    return "x".join(map(str, np.shape(value))) or "one number"


def _listed(subject: str, names: Sequence[str]) -> str:
    """Names the first entries, and counts the others."""
    return f"{subject} {shorten_list(names)}"


# Oscillating weights, which flip between two levels: counting and damping them.

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
    exceeds the threshold is set to the level that it was at on average. It is put back there after each step,
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
