"""The quantized graph against the float one on data that is not learned from, and the best state so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.finetuning._data import Samples
from qtrace.finetuning._twins import Compared, Twins
from qtrace.graph.types import TracedModule
from qtrace.metrics import ErrorSums
from qtrace.preparation.phases import in_phase

__all__ = ["BestState", "Evaluation", "Figures", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """The held-back error at one moment of a run.

    Attributes:
        step: after how many steps; 0 for the start.
        error: the mean, over the outputs, of noise relative to signal; over the block outputs where no output
            can be compared.
    """

    step: int
    error: float


@dataclass(frozen=True)
class Figures:
    """What one evaluation measured.

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

    def add(self, want: np.ndarray, have: np.ndarray, classes: bool) -> None:
        self.sums.add(want, have, classes=classes)
        self.shape = want.shape[1:]

    def relative_to(self, power: float) -> float:
        return self.sums.noise / max(self.sums.values, 1) / power


def evaluate(model: TracedModule, twins: Twins, compared: Compared, samples: Samples, size: int) -> Figures:
    """Compares the outputs of both graphs as they would be deployed: in the phase ``quantize``.

    Args:
        model: the prepared graph, in eval mode.
        twins: both graphs.
        compared: the outputs, and the mean squares that errors are divided by.
        samples: what to run both graphs on.
        size: samples in a batch.
    """
    outputs = {index: _Noise() for index in compared.outputs}
    blocks = {} if outputs else {name: _Noise() for name in compared.blocks}
    with in_phase(model, "quantize"):
        for batch in samples.in_order(size):
            tensors = batch.tensors()
            want, want_inside = twins.wanted(tensors)
            have, have_inside = twins.given(tensors)
            for index, noise in outputs.items():
                noise.add(want[index].numpy(), have[index].numpy(), index in compared.classes)
            for name, noise in blocks.items():
                noise.add(want_inside[name].numpy(), have_inside[name].numpy(), False)
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
        error: its error there.
    """

    def __init__(self, model: TracedModule, error: float) -> None:
        self.model = model
        self.evaluations = [Evaluation(0, error)]
        self.best = self.evaluations[0]
        self._values = self._present()

    @property
    def start(self) -> Evaluation:
        """The evaluation before the first step."""
        return self.evaluations[0]

    def _present(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.model.named_tensors()}

    def consider(self, step: int, error: float) -> None:
        """Takes note of an evaluation, and keeps the model's present values if its error is the smallest."""
        self.evaluations.append(Evaluation(step, error))
        if error < self.best.error:
            self.best, self._values = self.evaluations[-1], self._present()

    def restore(self) -> None:
        """Gives the model the values of the best evaluation, bit for bit."""
        for name, tensor in self.model.named_tensors():
            if tensor.numpy().tobytes() != self._values[name].tobytes():
                tensor._reset(type(tensor)(self._values[name]))

    def state_dict(self) -> dict[str, np.ndarray]:
        """The evaluations and the best values, as arrays."""
        rows = np.array([[e.step, e.error] for e in self.evaluations], np.float64)
        values = {f"values/{name}": value for name, value in self._values.items()}
        return {"evaluations": rows, "best": np.array(self.best.step), **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.evaluations = [Evaluation(int(step), float(error)) for step, error in state["evaluations"]]
        self.best = next(e for e in self.evaluations if e.step == int(state["best"]))
        self._values = {name: np.array(state[f"values/{name}"]) for name in self._values}
