"""The held-back error of the quantized graph against the float graph, and the best state so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.extras.finetune.compared import BothGraphs, Compared
from qtrace.extras.finetune.data import Samples
from qtrace.graph.types import TracedModule
from qtrace.metrics import ErrorSums
from qtrace.outputs import ColumnGroup
from qtrace.preparation.phases import in_phase

__all__ = ["BestState", "Evaluation", "EvaluationFigures", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """The held-back error after a step.

    Attributes:
        step: number of steps before the evaluation; 0 for the start.
        error: the mean, over the outputs, of noise relative to signal, which is the mean over an output's
            column groups; over the block outputs if no output can be compared.
    """

    step: int
    error: float


@dataclass(frozen=True)
class EvaluationFigures:
    """The results of one evaluation.

    Attributes:
        error: see `Evaluation`.
        outputs: index of an output -> shape of a sample, SQNR of the worst column group in dB, share of
            samples with an equal class.
    """

    error: float
    outputs: dict[int, tuple[tuple[int, ...], float, float | None]]


class _Noise:
    """Sums of one place over batches.

    Args:
        groups: the column groups of an output that has several; () for any other place.
    """

    def __init__(self, groups: Sequence[ColumnGroup] = ()) -> None:
        self.sums, self.shape = ErrorSums(), tuple[int, ...]()
        self.groups = [(group, ErrorSums()) for group in groups]

    def add(self, reference: np.ndarray, value: np.ndarray, classes: bool) -> None:
        self.sums.add(reference, value, classes=classes)
        self.shape = reference.shape[1:]
        for group, sums in self.groups:
            sums.add(group.select(reference), group.select(value))

    def relative_to(self, power: float) -> float:
        if not self.groups:
            return self.sums.noise / max(self.sums.values, 1) / power
        return float(np.mean([sums.noise / sums.signal for sums in self._alive()] or [0.0]))

    @property
    def sqnr_db(self) -> float:
        return min((sums.sqnr_db for sums in self._alive()), default=self.sums.sqnr_db)

    def _alive(self) -> list[ErrorSums]:
        """Returns the sums of the column groups that are not 0 everywhere in float."""
        return [sums for _, sums in self.groups if sums.signal > 0]


def evaluate(
    model: TracedModule, twins: BothGraphs, compared: Compared, samples: Samples, size: int
) -> EvaluationFigures:
    """Compares the outputs of both graphs in the phase ``quantize``, as the model is deployed.

    Args:
        model: the prepared graph, in eval mode.
        twins: the quantized graph and the float graph.
        compared: the outputs and the mean squares by which errors are divided.
        samples: the samples to run both graphs on.
        size: samples in a batch.
    """
    outputs = {
        index: _Noise([g for g in compared.groups if g.output == index and not g.whole])
        for index in compared.outputs
    }
    blocks = {} if outputs else {name: _Noise() for name in compared.blocks}
    with in_phase(model, "quantize"):
        for batch in samples.in_order(size):
            references, reference_blocks = twins.run_teacher(batch)
            values, value_blocks = twins.run_student(batch)
            for index, noise in outputs.items():
                noise.add(references[index], values[index], index in compared.classes)
            for name, noise in blocks.items():
                noise.add(reference_blocks[name], value_blocks[name], False)
    powers: Mapping[Any, float] = compared.outputs if outputs else compared.blocks
    errors = [noise.relative_to(powers[key]) for key, noise in (*outputs.items(), *blocks.items())]
    error = float(np.mean(errors))
    return EvaluationFigures(
        error if np.isfinite(error) else float("inf"),
        {index: (noise.shape, noise.sqnr_db, noise.sums.agreement) for index, noise in outputs.items()},
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
