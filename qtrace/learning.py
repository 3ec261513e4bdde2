"""What every algorithm that learns by gradients shares: the engines, Adam, the loop, the choice of an engine.

``qat.py`` has what your own training loop may use. ``finetune`` needs no labels. What learns by gradients,
here and in ``ptq/rounding/``, brings its loss and what a step moves: the loop, Adam and the engines,
MegEngine and torch, are here. In a run of ``finetune``, ``training.py`` takes the
steps, judges them on held-back data and keeps the time, and ``running.py`` writes the checkpoint.
"""

from __future__ import annotations

import abc
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol, TypeVar

import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager
from megengine.jit import trace

from qtrace.errors import CalibrationError, ConfigError, QtraceError, install
from qtrace.graph.types import TracedModule
from qtrace.plugins import load_object

__all__ = [
    "ENGINES",
    "MIN_TRACED_STEPS",
    "Adam",
    "Descent",
    "LearningEngine",
    "LearningStep",
    "Losses",
    "MegEngineEngine",
    "UnsupportedError",
    "choose_learning",
    "descend",
    "try_torch",
]


# The loop of everything that learns, and Adam on numpy arrays.


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) for one array, which is changed in place.

    Args:
        value: the array to optimize.
        lr: the learning rate.
    """

    def __init__(self, value: np.ndarray, lr: float | np.ndarray) -> None:
        self.value, self.lr = value, lr
        self.first, self.second, self.steps = np.zeros_like(value), np.zeros_like(value), 0

    def step(self, gradient: np.ndarray, factor: float = 1.0, share: float = 1.0) -> None:
        """Moves the value by one step against ``gradient``.

        Args:
            gradient: the gradient.
            factor: the factor of the learning rate.
            share: the factor of the gradient.
        """
        self.steps += 1
        if share != 1.0:
            gradient = gradient * np.float32(share)
        self.first += 0.1 * (gradient - self.first)
        self.second += 0.001 * (gradient * gradient - self.second)
        first = self.first / (1.0 - 0.9**self.steps)
        second = self.second / (1.0 - 0.999**self.steps)
        self.value -= self.lr * factor * first / (np.sqrt(second) + 1e-8)

    def is_finite(self) -> bool:
        """Returns whether all values are numbers."""
        return bool(np.isfinite(self.value).all())

    @staticmethod
    def square_sum(values: np.ndarray, unit: np.ndarray) -> float:
        """Returns the sum of the squares of ``values * unit``, summed in float64."""
        return float(np.sum(np.square(values * unit, dtype=np.float64)))


class Descent(Protocol):
    """What learns, as `descend` sees it."""

    def compute(self, step: int) -> tuple[list[float], Sequence[np.ndarray | None]]:
        """Computes the losses of a step, the first one to minimize, and the gradient of each parameter."""

    def move(self, step: int, losses: list[float], gradients: Sequence[np.ndarray | None]) -> None:
        """Moves the parameters by one step of the optimizer."""

    def fail(self, loss: float, step: int) -> QtraceError:
        """Returns the error for a loss that is not finite."""


def descend(descent: Descent, steps: range, ends: Callable[[int], bool] = lambda completed: False) -> None:
    """Takes steps until the last one, or until ``ends`` says so.

    Args:
        descent: what learns.
        steps: the numbers of the steps.
        ends: gets the number of completed steps after each; returns whether to end.

    Raises:
        QtraceError: when a loss is not finite; see `Descent.fail`.
    """
    for step in steps:
        losses, gradients = descent.compute(step)
        if not math.isfinite(losses[0]):
            raise descent.fail(losses[0], step)
        descent.move(step, losses, gradients)
        if ends(step + 1):
            return


# The engines of what learns: each computes the loss of a step and its gradients, as arrays.

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


# The choice of the engine that computes the steps of what learns.

ENGINES = ("auto", "megengine", "torch")

_T = TypeVar("_T")


def try_torch(build: Callable[[], _T]) -> tuple[_T | None, str]:
    """Returns what ``build`` makes with torch; None, and the reason as a clause, if torch does not apply.

    Args:
        build: imports torch; it may raise an `UnsupportedError`.
    """
    if importlib.util.find_spec("torch") is None:
        return None, f"it is not installed ({install('torch')})"
    try:
        return build(), ""
    except UnsupportedError as error:
        return None, str(error)


def choose_learning(model: TracedModule, requested: str = "auto") -> LearningEngine | None:
    """Chooses the engine of ``adaround`` and ``reconstruct``.

    Args:
        model: the calibrated graph.
        requested: ``auto``, ``megengine`` or ``torch``. ``auto`` takes torch if it is installed and every op
            has a form in torch.

    Returns:
        torch; None for MegEngine.

    Raises:
        ConfigError: for an unknown engine.
        CalibrationError: when torch is requested and does not apply.
    """
    if requested not in ENGINES:
        raise ConfigError(f"unknown learning engine {requested!r}: choose one of {', '.join(ENGINES)}.")
    if requested == "megengine":
        return None

    def build() -> LearningEngine:
        engine: LearningEngine = load_object("qtrace.engines", "torch", FunctionType)(model)
        return engine

    torch, reason = try_torch(build)
    if torch is None and requested == "torch":
        raise CalibrationError(f"the learning engine torch does not apply: {reason}; use megengine, or auto.")
    return torch
