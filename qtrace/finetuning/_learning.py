"""The parameters that learn: rates relative to their size, clipped gradients, averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace.errors import TrainingError
from qtrace.fakequant.base import scales
from qtrace.finetuning._watching import range_unit
from qtrace.finetuning.settings import Settings
from qtrace.graph.types import TracedModule
from qtrace.passes.record import fake_quants
from qtrace.ptq._rounding import Adam
from qtrace.qat import param_groups

__all__ = ["Learner"]

_SMALLEST = 0.01  # what a parameter of zeros may change by, times the rate


class Learner:
    """Adam for all parameters of a prepared graph, on numpy arrays, so that a checkpoint is its arrays.

    Args:
        model: the prepared graph.
        settings: its rates.
    """

    def __init__(self, model: TracedModule, settings: Settings) -> None:
        self.settings = settings
        learned = scales(model)
        ranges = {id(p) for p in learned}
        units = {
            id(p): range_unit(f, p.numpy()) for f in fake_quants(model) for p in f.parameters(recursive=False)
        }
        names = {id(p): name for name, p in model.named_parameters()}
        self.parameters: list[Parameter] = []
        self.names: list[str] = []
        self.steppers: list[Adam] = []
        self.units: list[np.ndarray] = []
        for group in param_groups(model, settings.lr, settings.rate_of_ranges):
            for parameter in group["params"]:
                value = parameter.numpy().copy()
                unit = units[id(parameter)] if id(parameter) in ranges else size_of(value)
                self.parameters.append(parameter)
                self.names.append(names.get(id(parameter), "a parameter"))
                self.units.append(unit)
                self.steppers.append(Adam(value, (group["lr"] * unit).astype(np.float32)))
        self.ranges = len(ranges)
        self.averages = [s.value.copy() for s in self.steppers] if settings.weight_average else []
        self._is_range = [id(p) in ranges for p in self.parameters]

    def step(self, gradients: Sequence[np.ndarray | None], factor: float, fixed: set[int]) -> float:
        """Takes a step against the gradients.

        Args:
            gradients: of each parameter; None where there is none.
            factor: what rates are multiplied by.
            fixed: ids of parameters that stay as they are.

        Returns:
            The norm of the gradients before they were clipped, relative to the size of the parameters.

        Raises:
            TrainingError: naming the first parameter that is not finite, or whose gradient is not.
        """
        parts = []
        for name, gradient, unit in zip(self.names, gradients, self.units, strict=True):
            parts.append(
                0.0 if gradient is None else float(np.sum(np.square(gradient * unit, dtype=np.float64)))
            )
            if not np.isfinite(parts[-1]):
                raise TrainingError(f"the gradient of {name} is NaN or infinite")
        norm = float(np.sqrt(sum(parts)))
        clip = min(1.0, self.settings.clip / norm) if norm else 1.0
        for index, (parameter, stepper) in enumerate(zip(self.parameters, self.steppers, strict=True)):
            gradient = gradients[index]
            if gradient is None or id(parameter) in fixed:
                continue
            stepper.step(gradient * np.float32(clip), factor)
            if not np.isfinite(stepper.value).all():  # a clip may hide it from the loss
                raise TrainingError(f"{self.names[index]} is NaN or infinite")
            parameter._reset(Parameter(stepper.value))
            if self.averages and not self._is_range[index]:
                share = np.float32(1.0 - self.settings.weight_average)
                self.averages[index] += share * (stepper.value - self.averages[index])
        return norm

    def settle(self) -> None:
        """Ends: weights take their averages, if there are any."""
        for index, average in enumerate(self.averages):
            if not self._is_range[index]:
                self.parameters[index]._reset(Parameter(average))

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state of Adam and the averages, as arrays; the parameters themselves are the model's."""
        found: dict[str, np.ndarray] = {}
        for index, stepper in enumerate(self.steppers):
            found[f"{index}/value"] = stepper.value
            found[f"{index}/first"], found[f"{index}/second"] = stepper.first, stepper.second
            found[f"{index}/steps"] = np.array(stepper.steps)
        found.update({f"{index}/average": a for index, a in enumerate(self.averages)})
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        for index, stepper in enumerate(self.steppers):
            stepper.value = np.array(state[f"{index}/value"])
            stepper.first, stepper.second = (
                np.array(state[f"{index}/first"]),
                np.array(state[f"{index}/second"]),
            )
            stepper.steps = int(state[f"{index}/steps"])
        self.averages = [np.array(state[f"{index}/average"]) for index in range(len(self.averages))]


def size_of(value: np.ndarray) -> np.ndarray:
    """What counts as a change of 1: the root mean square of a tensor, of a weight by output channel.

    Args:
        value: a weight, output channels first (linear, convolution; those of groups behind the groups), or a
            bias or the parameter of a norm.

    Returns:
        An array that broadcasts to ``value``; a channel that is next to 0 counts as a hundredth of the whole.
    """
    whole = float(np.sqrt(np.mean(np.square(value, dtype=np.float64))))
    axes = tuple(range(1 if value.ndim < 5 else 2, value.ndim))
    if not axes:
        return np.full(value.shape, whole or _SMALLEST, np.float32)
    each = np.sqrt(np.mean(np.square(value, dtype=np.float64), axis=axes, keepdims=True))
    return np.maximum(each, 0.01 * whole if whole else _SMALLEST).astype(np.float32)
