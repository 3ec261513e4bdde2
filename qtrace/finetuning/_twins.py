"""The quantized graph beside the float graph on one batch: the loss and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager

from qtrace.calibration.base import Arguments
from qtrace.data.batches import translate_errors
from qtrace.errors import TrainingError
from qtrace.finetuning._data import Batch, unpack
from qtrace.finetuning.settings import FinetuneSettings
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TracedModule
from qtrace.numerics import SMALLEST_NORMAL
from qtrace.outputs import ColumnGroup, find_groups
from qtrace.verification.runs import leaves as outputs_in

__all__ = ["PARTS", "Compared", "Twins", "Values", "choose_compared"]

PARTS = ("outputs", "classes", "blocks")
"""The terms of the loss: error of outputs, divergence of class probabilities, error of block outputs."""

Values = tuple[list[np.ndarray], dict[str, np.ndarray]]
"""The outputs of a graph, and the values of the named nodes."""


class _NodeRecorder(Interpreter):
    """Runs a graph and records the values of the named nodes."""

    def __init__(self, traced: TracedModule, names: Sequence[str]) -> None:
        super().__init__(traced)
        self.names, self.values = frozenset(names), dict[str, Any]()

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.names:
            self.values[node.name] = value
        return value

    def call(self, arguments: Arguments, number: int) -> tuple[list[Tensor], dict[str, Any]]:
        """Returns the outputs of a call, and the values of the named nodes.

        Raises:
            CalibrationError: when MegEngine refuses the call; it names the batch by ``number``.
        """
        self.values = {}
        args, kwargs = arguments
        with translate_errors(self.traced, arguments, number):
            outputs = self.run(*args, **kwargs)
        return outputs_in(outputs), self.values


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
            column, that replace its mean square: each group counts alike, relative to its own power.
    """

    outputs: dict[int, float]
    classes: tuple[int, ...]
    blocks: dict[str, float]
    left: tuple[str, ...]
    groups: tuple[ColumnGroup, ...] = ()
    weights: dict[int, np.ndarray] = field(default_factory=dict)


class TwinEngine(Protocol):
    """Runs the quantized graph and the float graph on a batch of arrays."""

    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""

    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph."""


class Twins:
    """The quantized graph and its float twin.

    Args:
        student: the prepared graph, in the phase ``train``.
        teacher: a copy of it with the float weights, in the phase ``float`` and in eval mode.
        form: the arguments of a call, with the index of a leaf in place of each array.
        blocks: names of the nodes whose values are compared.
    """

    def __init__(
        self, student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str]
    ) -> None:
        self.student, self.teacher = _NodeRecorder(student, blocks), _NodeRecorder(teacher, blocks)
        self.form = form

    def run_teacher(self, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """Returns the outputs and block outputs of the float graph on a batch of Tensors."""
        return self.teacher.call(unpack(self.form, list(batch.leaves)), batch.number)

    def run_student(self, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """Returns the outputs and block outputs of the quantized graph on a batch of Tensors."""
        return self.student.call(unpack(self.form, list(batch.leaves)), batch.number)

    def loss(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> tuple[Tensor, ...]:
        """Computes the loss of a batch of Tensors and its parts, each a scalar, in the order of `PARTS`."""
        references, reference_blocks = self.run_teacher(batch)
        values, value_blocks = self.run_student(batch)
        zero = Tensor(0.0)
        errors = [
            _weighted_error(values[i], references[i], compared.weights[i])
            if i in compared.weights
            else _error(values[i], references[i]) / power
            for i, power in compared.outputs.items()
        ]
        divergences = [_divergence(values[i], references[i], settings.temperature) for i in compared.classes]
        blocks = [
            _error(value_blocks[n], reference_blocks[n]) / power for n, power in compared.blocks.items()
        ]
        parts = [sum(part, zero) / max(len(part), 1) for part in (errors, divergences, blocks)]
        total = parts[0] + settings.kl_weight * parts[1] + settings.block_weight * parts[2]
        return (total, *parts)

    def gradients(
        self, batch: Batch, compared: Compared, settings: FinetuneSettings, parameters: Sequence[Parameter]
    ) -> list[Tensor | None]:
        """Computes the loss, its parts and the gradient of every parameter; None for a missing gradient."""
        manager = GradManager().attach(list(parameters))
        with manager:
            losses = self.loss(batch, compared, settings)
            manager.backward(losses[0])
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [*losses, *gradients]


def _error(value: Tensor, reference: Tensor) -> Tensor:
    return ((value - reference.detach()) ** 2).mean()


def _weighted_error(value: Tensor, reference: Tensor, weights: np.ndarray) -> Tensor:
    return ((value - reference.detach()) ** 2 * Tensor(weights)).mean()


def _divergence(logits: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of softened probabilities, times T**2 (Hinton et al. 2015, section 2.1)."""
    log_q, log_p = F.logsoftmax(logits / temperature, 1), F.logsoftmax(reference.detach() / temperature, 1)
    return (F.exp(log_p) * (log_p - log_q)).sum(1).mean() * temperature**2


def choose_compared(
    engine: TwinEngine, blocks: Sequence[str], batches: Sequence[Batch], model: TracedModule | None = None
) -> Compared:
    """Chooses the outputs that can be compared, and measures mean squares of outputs and blocks in float.

    Args:
        engine: runs the quantized graph and the float graph.
        blocks: names of the nodes whose values are compared.
        batches: the batches to measure the mean squares on.
        model: the quantized graph, whose joins show column groups; None to look at the values alone.

    Raises:
        TrainingError: when nothing can be compared, or the float graph gives values that are not finite.
    """
    sums: dict[Any, list[float]] = {}
    left: dict[int, str] = {}
    flat: set[int] = set()
    exact: list[list[np.ndarray]] = []
    for batch in batches:
        references, inside = engine.run_teacher(batch)
        exact.append(references)
        values, _ = engine.run_student(batch)
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
            f"no output can be compared with that of the float graph ({'; '.join(left.values())}): name "
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
