"""Parameter groups for an optimizer: weights decay, biases and norms do not, ranges learn more slowly."""

from __future__ import annotations

import math
from typing import Any

import megengine.module as M
from megengine import Parameter
from megengine.module import Module
from megengine.module.batchnorm import _BatchNorm

from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant

__all__ = ["param_groups"]

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
    learn (scales, offsets, thresholds) has a rate of its own and does not decay either, since that would
    make a range smaller whatever the data (the exception is PACT, whose paper wants it).

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
