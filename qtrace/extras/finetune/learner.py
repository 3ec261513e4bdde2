"""What learns, and the engine that computes its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Batch, Samples
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.twins import MegEngineTwins, Twins, Units
from qtrace.fakequant.base import scales
from qtrace.graph.types import TracedModule
from qtrace.learning import Adam, UnsupportedError, try_torch
from qtrace.preparation.model import QuantizedModel
from qtrace.qat import param_groups

__all__ = ["Learner", "choose_twins"]


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


# The engines agree when no float value differs by more than this share of the largest one of its node.
_TOLERANCE = 1e-3
_COMPARED_SAMPLES = 2


def choose_twins(
    requested: str,
    student: TracedModule,
    teacher: TracedModule,
    samples: Samples,
    blocks: Sequence[str],
    jit: bool,
) -> tuple[Twins, str]:
    """Builds both graphs in the chosen engine, and gives the reason of the choice as a clause.

    ``auto`` takes torch if it is installed, every op of both graphs has a form in torch, and torch and
    MegEngine agree on the float graph of some samples.

    Args:
        requested: ``auto``, ``megengine`` or ``torch``.
        student: the prepared graph, in eval mode.
        teacher: the float graph.
        samples: the samples to learn from.
        blocks: names of the nodes whose values are compared.
        jit: whether the steps of MegEngine run under ``jit.trace``.

    Raises:
        TrainingError: when torch is requested and does not apply.
    """
    megengine = MegEngineTwins(student, teacher, samples.form, blocks, jit)
    if requested == "megengine":
        return megengine, "as requested"

    def build() -> Twins:
        from qtrace.extras.finetune.torch_twins import TorchTwins

        twins = TorchTwins(student, teacher, samples.form, blocks)
        _compare(twins, megengine, _first_samples(samples))
        return twins

    torch, reason = try_torch(build)
    if torch is not None:
        return torch, "as requested" if requested == "torch" else "torch has a form of every op"
    if requested == "torch":
        raise TrainingError(
            f"finetune: the engine torch does not apply: {reason}; use the engine megengine, or auto."
        )
    return megengine, f"torch does not apply: {reason}"


def _first_samples(samples: Samples) -> Batch:
    """Returns a batch with as few samples as the data can be divided into."""
    batch = samples.batches[0]
    if not samples.joined:
        return batch
    return Batch(batch.number, [leaf[:_COMPARED_SAMPLES] for leaf in batch.leaves])


def _compare(torch: Twins, megengine: Twins, batch: Batch) -> None:
    """Refuses torch if a node of the float graph has other values than in MegEngine."""
    values, fast_values = (
        {f"output {index}": value for index, value in enumerate(outputs)} | blocks
        for outputs, blocks in (twins.run_teacher(batch) for twins in (megengine, torch))
    )
    for name, value in values.items():
        if not _agree(value, fast_values.get(name)):
            raise UnsupportedError(f"its float values differ from MegEngine's at {name}")


def _agree(value: np.ndarray, fast: np.ndarray | None) -> bool:
    if fast is None or fast.shape != value.shape:
        return False
    if value.dtype.kind != "f" or not value.size:
        return True  # integers and selections may turn on the last bit of a float
    bound = _TOLERANCE * float(np.max(np.abs(value), initial=0.0))
    return bool(np.all((np.abs(fast - value) <= bound) | ~np.isfinite(value)))
