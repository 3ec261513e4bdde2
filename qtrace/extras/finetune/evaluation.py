"""Held-back outputs of both graphs: what is compared, and how close they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from qtrace.comparing.groups import ColumnGroup, find_groups
from qtrace.comparing.sums import ErrorSums
from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Batch, Samples
from qtrace.graph.types import TracedModule
from qtrace.numerics import SMALLEST_NORMAL
from qtrace.preparation.phases import in_phase

Values = tuple[list[np.ndarray], dict[str, np.ndarray]]
"""The outputs of a graph, and the values of the named nodes."""


class BothGraphs(Protocol):
    """Runs the quantized graph and the float graph on a batch of arrays."""

    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""

    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph, in its current phase."""


@dataclass(frozen=True)
class Compared:
    """The outputs and nodes that are compared, and the mean squares by which errors are divided.

    Attributes:
        outputs: index of an output -> mean square in float.
        classes: indices of the outputs of shape (N, C).
        blocks: name of a node -> mean square in float.
        left: a line with the reason for every output that is not compared.
        groups: the column groups of the outputs.
        weights: index of an output with several column groups -> the weights of its squared errors, by
            column, in the place of its mean square. Each group counts alike, relative to its own power.
    """

    outputs: dict[int, float]
    classes: tuple[int, ...]
    blocks: dict[str, float]
    left: tuple[str, ...]
    groups: tuple[ColumnGroup, ...] = ()
    weights: dict[int, np.ndarray] = field(default_factory=dict)


def choose_compared(
    twins: BothGraphs, blocks: Sequence[str], batches: Sequence[Batch], model: TracedModule | None = None
) -> Compared:
    """Chooses the outputs that can be compared, and measures mean squares of outputs and blocks in float.

    Args:
        twins: the quantized graph and the float graph.
        blocks: names of the nodes whose values are compared.
        batches: the batches to measure the mean squares on.
        model: the quantized graph, whose joins show column groups; None to look only at the values.

    Raises:
        TrainingError: when nothing can be compared, or the float graph gives values that are not finite.
    """
    sums: dict[Any, list[float]] = {}
    left: dict[int, str] = {}
    flat: set[int] = set()
    exact: list[list[np.ndarray]] = []
    for batch in batches:
        references, inside = twins.run_teacher(batch)
        exact.append(references)
        values, _ = twins.run_student(batch)
        if len(references) != len(values):
            raise TrainingError(
                f"the float network has {len(references)} outputs, the quantized one {len(values)}."
            )
        for index, (reference, value) in enumerate(zip(references, values, strict=True)):
            if reference.dtype.kind != "f":
                left[index] = f"output {index} holds {reference.dtype}"
            elif reference.shape != value.shape:
                left[index] = f"output {index} is a selection, of another size in the quantized graph"
            elif reference.ndim == 2 and reference.shape[1] > 1:
                flat.add(index)
        for key, value in (*enumerate(references), *inside.items()):
            if key not in left:
                array = value.astype(np.float64)
                total = sums.setdefault(key, [0.0, 0.0])
                total[0] += float(np.sum(array * array))
                total[1] += array.size
    powers = {key: total / max(size, 1) for key, (total, size) in sums.items() if key not in left}
    for key, power in powers.items():
        if not np.isfinite(power):
            name = f"output {key}" if isinstance(key, int) else key
            raise TrainingError(
                f"{name} of the float graph is NaN or infinite on the data: look at both; "
                "the model is left as it was."
            )
    for key in [key for key, power in powers.items() if power < SMALLEST_NORMAL]:  # 0 as a float32
        if isinstance(key, int):
            left[key] = f"output {key} is 0 everywhere"
        del powers[key]
    outputs = {key: power for key, power in powers.items() if isinstance(key, int)}
    inside_powers = {name: powers[name] for name in blocks if name in powers}
    if not outputs and not inside_powers:
        raise TrainingError(
            f"no output can be compared with the float graph's ({'; '.join(left.values())}): name "
            "nodes in blocks."
        )
    groups = tuple(group for group in find_groups(model, exact) if group.output in outputs)
    weights = _column_weights(groups, exact)
    classes = tuple(sorted(flat & set(outputs) - set(weights)))  # columns of several sorts are no classes
    return Compared(outputs, classes, inside_powers, tuple(left.values()), groups, weights)


def _column_weights(
    groups: Sequence[ColumnGroup], exact: Sequence[Sequence[np.ndarray]]
) -> dict[int, np.ndarray]:
    """Returns the weights of outputs with several column groups; see `Compared`."""
    weights: dict[int, np.ndarray] = {}
    for group in groups:
        if group.axis is None:
            continue
        values = [batch[group.output] for batch in exact]
        power = float(np.mean([np.square(group.select(v), dtype=np.float64).mean() for v in values]))
        shape = [1] * values[0].ndim
        shape[group.axis] = values[0].shape[group.axis]
        weight = weights.setdefault(group.output, np.zeros(shape, np.float32))
        count = sum(other.output == group.output for other in groups)
        share = weight.size / (len(group.columns) * count)
        np.moveaxis(weight, group.axis, 0)[group.columns] = share / max(power, SMALLEST_NORMAL)
    return weights


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
