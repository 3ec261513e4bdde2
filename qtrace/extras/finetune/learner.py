"""Adam in quantization steps: the learning parameters, clipped gradients and averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace.errors import TrainingError
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.units import Units
from qtrace.fakequant.base import scales
from qtrace.learning.adam import Adam
from qtrace.preparation.model import QuantizedModel
from qtrace.qat import param_groups

__all__ = ["Learner"]


class Learner:
    """Adam for all parameters of a prepared graph, on numpy arrays that a checkpoint can store.

    Args:
        prepared: the prepared graph.
        settings: learning rates, clipping and the average of the weights.
        adam: the class that computes the steps of a parameter.
        writes: whether each step writes the weights into the modules; else `write` does.
    """

    def __init__(
        self,
        prepared: QuantizedModel,
        settings: FinetuneSettings,
        adam: type[Adam] = Adam,
        *,
        writes: bool = True,
    ) -> None:
        self.writes, self._behind = writes, set[int]()
        self.settings, self.adam, model = settings, adam, prepared.module
        ranges = {id(p) for p in scales(model)}
        units = Units(prepared)
        names = {id(p): name for name, p in model.named_parameters()}
        self.parameters: list[Parameter] = []
        self.names: list[str] = []
        self.steppers: list[Adam] = []
        self.units: list[np.ndarray] = []
        for group in param_groups(model, settings.lr, settings.rate_of_ranges):
            for parameter in group["params"]:
                value = parameter.numpy().copy()
                if not value.size or value.dtype.kind != "f":  # an unused input of an imported op
                    continue
                unit = units.of(parameter)
                self.parameters.append(parameter)
                self.names.append(names.get(id(parameter), "a parameter"))
                self.units.append(unit)
                self.steppers.append(adam(value, (group["lr"] * unit).astype(np.float32)))
        self.ranges = len(ranges)
        self.averages = [s.value.copy() for s in self.steppers] if settings.weight_average else []
        self._is_range = [id(p) in ranges for p in self.parameters]

    def step(
        self, gradients: Sequence[np.ndarray | None], loss: float, factor: float, fixed: set[int]
    ) -> None:
        """Moves the parameters by one step of Adam.

        Args:
            gradients: the gradient of each parameter; None for a parameter without one.
            loss: the loss, which sets the norm at which gradients are clipped.
            factor: the factor of the learning rates.
            fixed: ids of frozen parameters, which do not move.

        Raises:
            TrainingError: when a parameter or its gradient is not finite; it names the first one.
        """
        squares = []
        for name, gradient, unit in zip(self.names, gradients, self.units, strict=True):
            squares.append(0.0 if gradient is None else self.adam.square_sum(gradient, unit))
            if not np.isfinite(squares[-1]):
                raise TrainingError(f"the gradient of {name} is NaN or infinite")
        norm = float(np.sqrt(sum(squares)))
        clip = min(1.0, self.settings.clip * loss / norm) if norm else 1.0
        for index, (parameter, stepper) in enumerate(zip(self.parameters, self.steppers, strict=True)):
            gradient = gradients[index]
            if gradient is None or id(parameter) in fixed:
                continue
            stepper.step(gradient, factor, clip)
            if not stepper.is_finite():  # a clip may hide it from the loss
                raise TrainingError(f"{self.names[index]} is NaN or infinite")
            if self.writes or self._is_range[index]:
                parameter._reset(Parameter(stepper.value))
            else:
                self._behind.add(index)
            if self.averages and not self._is_range[index]:
                share = np.float32(1.0 - self.settings.weight_average)
                self.averages[index] += share * (stepper.value - self.averages[index])

    @property
    def values(self) -> dict[int, np.ndarray]:
        """Id of a parameter -> its value, for those whose module has an older one."""
        return {id(self.parameters[index]): self.steppers[index].value for index in self._behind}

    def write(self) -> None:
        """Writes the values that the modules do not have yet."""
        for index in self._behind:
            self.parameters[index]._reset(Parameter(self.steppers[index].value))
        self._behind.clear()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Gives the modules all values within the block: averages, if weights are averaged."""
        self.write()
        averaged = [i for i in range(len(self.averages)) if not self._is_range[i]]
        for index in averaged:
            self.parameters[index]._reset(Parameter(self.averages[index]))
        try:
            yield
        finally:
            for index in averaged:
                self.parameters[index]._reset(Parameter(self.steppers[index].value))

    def rewind(self) -> None:
        """Restarts Adam and the averages at the values that the modules have."""
        self._behind.clear()
        pairs = zip(self.parameters, self.steppers, strict=True)
        self.steppers = [self.adam(parameter.numpy().copy(), stepper.lr) for parameter, stepper in pairs]
        self.averages = [s.value.copy() for s in self.steppers] if self.averages else []

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the state of Adam and the averages as arrays; the parameters belong to the model."""
        state: dict[str, np.ndarray] = {}
        for index, stepper in enumerate(self.steppers):
            state[f"{index}/value"] = stepper.value
            state[f"{index}/first"], state[f"{index}/second"] = stepper.first, stepper.second
            state[f"{index}/steps"] = np.array(stepper.steps)
        state.update({f"{index}/average": a for index, a in enumerate(self.averages)})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        for index, stepper in enumerate(self.steppers):
            stepper.value = np.array(state[f"{index}/value"])
            stepper.first = np.array(state[f"{index}/first"])
            stepper.second = np.array(state[f"{index}/second"])
            stepper.steps = int(state[f"{index}/steps"])
        self.averages = [np.array(state[f"{index}/average"]) for index in range(len(self.averages))]
