"""The quantized graph and the float one on one batch: what they differ by, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.autodiff import GradManager

from qtrace.calibration.base import Arguments
from qtrace.data.batches import translate_errors
from qtrace.errors import TrainingError
from qtrace.finetuning._data import Batch, unpack
from qtrace.finetuning.settings import Settings
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TracedModule
from qtrace.numerics import SMALLEST_NORMAL
from qtrace.verification.runs import leaves as outputs_in

__all__ = ["PARTS", "Compared", "Twins", "choose_compared"]

PARTS = ("outputs", "classes", "blocks")
"""What a loss consists of: error of outputs, divergence of class probabilities, error of block outputs."""


class _Keeping(Interpreter):
    """Runs a graph and keeps what some of its nodes hold."""

    def __init__(self, traced: TracedModule, names: Sequence[str]) -> None:
        super().__init__(traced)
        self.names, self.kept = frozenset(names), dict[str, Any]()

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.names:
            self.kept[node.name] = value
        return value

    def outputs_and_kept(self, arguments: Arguments, number: int) -> tuple[list[Tensor], dict[str, Any]]:
        """The outputs of a call, and the values of the named nodes.

        Raises:
            CalibrationError: for what MegEngine refuses in the call, naming the batch by its ``number``.
        """
        self.kept = {}
        args, kwargs = arguments
        with translate_errors(self.traced, arguments, number):
            outputs = self.run(*args, **kwargs)
        return outputs_in(outputs), self.kept


@dataclass(frozen=True)
class Compared:
    """What is compared, and the mean squares by which errors are divided.

    Attributes:
        outputs: number of an output -> mean square in float.
        classes: numbers of the outputs of shape (N, C).
        blocks: name of a node -> mean square in float.
        left: a line with the reason for every output that is not compared.
    """

    outputs: dict[int, float]
    classes: tuple[int, ...]
    blocks: dict[str, float]
    left: tuple[str, ...]


class Twins:
    """Both graphs.

    Args:
        student: the prepared graph, in the phase ``train``.
        teacher: a copy of it with the float weights, in the phase ``float`` and in eval mode.
        form: the arguments of a call, with numbers for arrays.
        blocks: names of nodes.
    """

    def __init__(
        self, student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str]
    ) -> None:
        self.student, self.teacher = _Keeping(student, blocks), _Keeping(teacher, blocks)
        self.form = form

    def wanted(self, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """The outputs of the float graph on a batch of Tensors, and its block outputs."""
        return self.teacher.outputs_and_kept(unpack(self.form, list(batch.leaves)), batch.number)

    def given(self, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """The outputs of the quantized graph on a batch of Tensors, and its block outputs."""
        return self.student.outputs_and_kept(unpack(self.form, list(batch.leaves)), batch.number)

    def loss(self, batch: Batch, compared: Compared, settings: Settings) -> tuple[Tensor, ...]:
        """The loss of a batch of Tensors and its parts, each a scalar, in the order of `PARTS`."""
        want, want_inside = self.wanted(batch)
        have, have_inside = self.given(batch)
        zero = Tensor(0.0)
        errors = [_error(have[i], want[i]) / power for i, power in compared.outputs.items()]
        diverged = [_divergence(have[i], want[i], settings.temperature) for i in compared.classes]
        inside = [_error(have_inside[n], want_inside[n]) / power for n, power in compared.blocks.items()]
        parts = [sum(part, zero) / max(len(part), 1) for part in (errors, diverged, inside)]
        total = parts[0] + settings.kl_weight * parts[1] + settings.block_weight * parts[2]
        return (total, *parts)

    def gradients(
        self, batch: Batch, compared: Compared, settings: Settings, parameters: Sequence[Parameter]
    ) -> list[Tensor | None]:
        """The loss, its parts, and the gradient of every parameter; None where there is none."""
        manager = GradManager().attach(list(parameters))
        with manager:
            losses = self.loss(batch, compared, settings)
            manager.backward(losses[0])
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [*losses, *gradients]


def _error(have: Tensor, want: Tensor) -> Tensor:
    return ((have - want.detach()) ** 2).mean()


def _divergence(have: Tensor, want: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of softened probabilities, times T**2 (Hinton et al. 2015, section 2.1)."""
    log_want, log_have = F.logsoftmax(want.detach() / temperature, 1), F.logsoftmax(have / temperature, 1)
    return (F.exp(log_want) * (log_want - log_have)).sum(1).mean() * temperature**2


def choose_compared(twins: Twins, blocks: Sequence[str], batches: Sequence[Batch]) -> Compared:
    """Chooses outputs that can be compared, and measures the mean squares of all places in float.

    Args:
        twins: both graphs.
        blocks: names of nodes.
        batches: some batches.

    Raises:
        TrainingError: when nothing can be compared, or the float graph gives values that are not finite.
    """
    sums: dict[Any, list[float]] = {}
    left: dict[int, str] = {}
    flat: set[int] = set()
    for batch in batches:
        tensors = batch.tensors()
        want, inside = twins.wanted(tensors)
        have, _ = twins.given(tensors)
        if len(want) != len(have):
            raise TrainingError(f"the float network has {len(want)} outputs, the quantized one {len(have)}.")
        for index, (w, h) in enumerate(zip(want, have, strict=True)):
            if np.dtype(w.dtype).kind != "f":
                left[index] = f"output {index} holds {np.dtype(w.dtype)}"
            elif tuple(w.shape) != tuple(h.shape):
                left[index] = f"output {index} is a selection, of another size in the quantized graph"
            elif w.ndim == 2 and int(w.shape[1]) > 1:
                flat.add(index)
        for key, value in (*enumerate(want), *inside.items()):
            if key not in left:
                array = value.numpy().astype(np.float64)
                total = sums.setdefault(key, [0.0, 0.0])
                total[0] += float(np.sum(array * array))
                total[1] += array.size
    powers = {key: total / max(size, 1) for key, (total, size) in sums.items() if key not in left}
    for key, power in powers.items():
        if not np.isfinite(power):
            what = f"output {key}" if isinstance(key, int) else key
            raise TrainingError(
                f"{what} of the float graph is NaN or infinite on the data: look at both; "
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
    return Compared(outputs, tuple(sorted(flat & set(outputs))), inside_powers, tuple(left.values()))
