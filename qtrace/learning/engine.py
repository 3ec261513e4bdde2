"""The engines of what learns: each computes the loss of a step and its gradients, as arrays."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import megengine as mge
import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace.learning.loop import Adam

__all__ = [
    "MIN_TRACED_STEPS",
    "LearningEngine",
    "LearningStep",
    "Losses",
    "MegEngineEngine",
    "UnsupportedError",
    "queueless",
]

Losses = Callable[..., Sequence[Any]]
"""From the inputs of a step to the loss and the terms that are reported with it: scalars of the engine."""

MIN_TRACED_STEPS = 20
"""Capturing and compiling a step takes as long as some eager steps: a shorter run is not traced."""


class UnsupportedError(Exception):
    """The engine torch does not apply; the text is a clause with the reason, which names op and node."""


@dataclass(frozen=True)
class LearningStep:
    """What an engine needs for a step.

    Attributes:
        losses: computes the losses; MegEngine hands it Tensors, torch the arrays.
        parameters: the parameters, with the values of the moment.
        inputs: the inputs of ``losses``.
        values: id of a parameter -> its value, where the module's is older; only if the engine reads arrays.
    """

    losses: Losses
    parameters: Sequence[Parameter]
    inputs: Sequence[np.ndarray]
    values: Mapping[int, np.ndarray] = field(default_factory=dict)


class LearningEngine(abc.ABC):
    """Abstract base: from arrays to arrays. The parameters always belong to the MegEngine modules.

    Attributes:
        name: the name that settings and reports have for the engine.
        jit: whether steps run under ``jit.trace``.
        reads_arrays: whether `gradients` takes the values of weights as arrays, so that a step need not write
            them into the modules.
        adam: computes the steps of the optimizer.
        unchanged: gives the context in which calls of a step leave the model as it was; None where
            calls do so in any case.
    """

    name: str
    jit: bool = False
    reads_arrays: bool = False
    adam: type[Adam] = Adam
    unchanged: Callable[[], AbstractContextManager[None]] | None = None

    @abc.abstractmethod
    def gradients(self, step: LearningStep) -> list[np.ndarray | None]:
        """Returns the losses, then the gradient of the first for every parameter; None for no gradient."""

    def forget(self) -> None:
        """Drops what was compiled for a step: a module computes something else from now on."""
        return


class MegEngineEngine(LearningEngine):
    """Computes steps in MegEngine.

    Args:
        jit: whether steps run under ``jit.trace``; all then have the losses and the shapes of the first one.
    """

    name = "megengine"

    def __init__(self, jit: bool = False) -> None:
        self.jit = jit
        self._captured: Any = None
        self._present: list[bool] = []

    def gradients(self, step: LearningStep) -> list[np.ndarray | None]:
        """Computes the losses and the gradients; see `LearningEngine`."""
        assert not step.values
        tensors = [Tensor(value) for value in step.inputs]
        if not self.jit:
            return [None if value is None else value.numpy() for value in _differentiate(step, tensors)]
        if self._captured is None:
            self._capture(step, tensors)
        computed = iter(self._captured(*tensors))
        return [next(computed).numpy() if present else None for present in self._present]

    def _capture(self, step: LearningStep, tensors: Sequence[Tensor]) -> None:
        """Traces a step; discards its first calls where they may differ from compiled calls in a bit."""

        def compute(*inputs: Tensor) -> tuple[Tensor, ...]:
            results = _differentiate(step, inputs)
            self._present[:] = [value is not None for value in results]
            return tuple(value for value in results if value is not None)

        self._captured = trace(compute, symbolic=False)
        if self.unchanged is not None:
            with self.unchanged():
                for _ in range(2):
                    self._captured(*tensors)

    def forget(self) -> None:
        """Drops the traced step: a frozen BatchNorm, for one, computes something else."""
        self._captured = None


def _differentiate(step: LearningStep, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    manager = GradManager().attach(list(step.parameters))
    with manager:
        computed = step.losses(*inputs)
        manager.backward(computed[0])
    gradients = [parameter.grad for parameter in step.parameters]
    for parameter in step.parameters:
        parameter.grad = None
    return [*computed, *gradients]


@contextmanager
def queueless() -> Iterator[None]:
    """Lets MegEngine run each op at once: CPU gradients from its queue are wrong now and then."""
    before = mge.config.async_level
    mge.config.async_level = 0
    try:
        yield
    finally:
        mge.config.async_level = before
