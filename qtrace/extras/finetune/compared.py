"""The outputs and nodes of a graph that a fine-tuning compares, and their powers in float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Batch
from qtrace.graph.types import TracedModule
from qtrace.numerics import SMALLEST_NORMAL
from qtrace.outputs import ColumnGroup, find_groups

__all__ = ["BothGraphs", "Compared", "Values", "choose_compared"]

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
            column, that replace its mean square: each group counts alike, relative to its own power.
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
