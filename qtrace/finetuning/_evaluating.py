"""The held-back error of the quantized graph against the float graph, and the best state so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.finetuning._data import Samples
from qtrace.finetuning._engines import LearningEngine
from qtrace.finetuning._twins import Compared
from qtrace.graph.types import TracedModule
from qtrace.metrics import ErrorSums
from qtrace.preparation.phases import in_phase

__all__ = ["BestState", "Evaluation", "Figures", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """The held-back error after a step.

    Attributes:
        step: number of steps before the evaluation; 0 for the start.
        error: the mean, over the outputs, of noise relative to signal; over the block outputs if no output
            can be compared.
    """

    step: int
    error: float


@dataclass(frozen=True)
class Figures:
    """The results of one evaluation.

    Attributes:
        error: see `Evaluation`.
        outputs: index of an output -> shape of a sample, SQNR in dB, share of samples with an equal class.
    """

    error: float
    outputs: dict[int, tuple[tuple[int, ...], float, float | None]]


class _Noise:
    """Sums of one place over batches."""

    def __init__(self) -> None:
        self.sums, self.shape = ErrorSums(), tuple[int, ...]()

    def add(self, reference: np.ndarray, value: np.ndarray, classes: bool) -> None:
        self.sums.add(reference, value, classes=classes)
        self.shape = reference.shape[1:]

    def relative_to(self, power: float) -> float:
        return self.sums.noise / max(self.sums.values, 1) / power


def evaluate(
    model: TracedModule, engine: LearningEngine, compared: Compared, samples: Samples, size: int
) -> Figures:
    """Compares the outputs of both graphs in the phase ``quantize``, as the model is deployed.

    Args:
        model: the prepared graph, in eval mode.
        engine: runs the quantized graph and the float graph.
        compared: the outputs and the mean squares by which errors are divided.
        samples: the samples to run both graphs on.
        size: samples in a batch.
    """
    outputs = {index: _Noise() for index in compared.outputs}
    blocks = {} if outputs else {name: _Noise() for name in compared.blocks}
    with in_phase(model, "quantize"):
        for batch in samples.in_order(size):
            references, reference_blocks = engine.run_teacher(batch)
            values, value_blocks = engine.run_student(batch)
            for index, noise in outputs.items():
                noise.add(references[index], values[index], index in compared.classes)
            for name, noise in blocks.items():
                noise.add(reference_blocks[name], value_blocks[name], False)
    powers: Mapping[Any, float] = compared.outputs if outputs else compared.blocks
    errors = [noise.relative_to(powers[key]) for key, noise in (*outputs.items(), *blocks.items())]
    error = float(np.mean(errors))
    return Figures(
        error if np.isfinite(error) else float("inf"),
        {index: (noise.shape, noise.sums.sqnr_db, noise.sums.agreement) for index, noise in outputs.items()},
    )


class BestState:
    """The values of all parameters and buffers at the evaluation with the smallest error.

    Args:
        model: the prepared graph, before the first step.
        error: the held-back error before the first step.
    """

    def __init__(self, model: TracedModule, error: float) -> None:
        self.model = model
        self.evaluations = [Evaluation(0, error)]
        self.best = self.evaluations[0]
        self._values = self._current_values()

    @property
    def start(self) -> Evaluation:
        """The evaluation before the first step."""
        return self.evaluations[0]

    def _current_values(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.model.named_tensors()}

    def consider(self, step: int, error: float) -> None:
        """Records an evaluation, and keeps the model's values if its error is the smallest."""
        self.evaluations.append(Evaluation(step, error))
        if error < self.best.error:
            self.best, self._values = self.evaluations[-1], self._current_values()

    def restore(self) -> None:
        """Gives the model the values of the best evaluation, bit for bit."""
        for name, tensor in self.model.named_tensors():
            if tensor.numpy().tobytes() != self._values[name].tobytes():
                tensor._reset(type(tensor)(self._values[name]))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the evaluations and the best values as arrays."""
        rows = np.array([[e.step, e.error] for e in self.evaluations], np.float64)
        values = {f"values/{name}": value for name, value in self._values.items()}
        return {"evaluations": rows, "best": np.array(self.best.step), **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        self.evaluations = [Evaluation(int(step), float(error)) for step, error in state["evaluations"]]
        self.best = next(e for e in self.evaluations if e.step == int(state["best"]))
        self._values = {name: np.array(state[f"values/{name}"]) for name in self._values}
