"""The engine torch of a fine-tuning: loss and gradients by torch, on the parameters of the modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megengine import Parameter

from qtrace.data.batches import translate_errors
from qtrace.finetuning._data import Batch, unpack
from qtrace.finetuning._engines import TrainingEngine
from qtrace.finetuning._twins import Compared, Values
from qtrace.finetuning.settings import FinetuneSettings
from qtrace.graph.types import TracedModule
from qtrace.ptq.torch.adam import TorchAdam
from qtrace.ptq.torch.graph import TorchGraph

__all__ = ["TorchEngine"]


class TorchEngine(TrainingEngine):
    """Runs both graphs in torch.

    Args:
        student: the prepared graph.
        teacher: the float graph.
        form: the arguments of a call, with the index of a leaf in place of each array.
        blocks: names of the nodes whose values are compared.

    Raises:
        UnsupportedError: when an op of a graph has no form in torch.
    """

    name = "torch"
    reads_arrays = True
    adam = TorchAdam

    def __init__(
        self, student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str]
    ) -> None:
        self.student, self.form = TorchGraph(student, blocks), form
        self.teacher = TorchGraph(teacher, blocks, fixed=True)

    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""
        return _arrays(*self._run(self.teacher, batch))

    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph, in its current phase."""
        return _arrays(*self._run(self.student, batch))

    def loss(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> float:
        """Computes the loss of a batch."""
        return float(self._losses(batch, compared, settings, (), {})[0].item())

    def gradients(
        self,
        batch: Batch,
        compared: Compared,
        settings: FinetuneSettings,
        parameters: Sequence[Parameter],
        values: Mapping[int, np.ndarray],
    ) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradient of every parameter; None for a missing gradient."""
        losses = self._losses(batch, compared, settings, parameters, values)
        if losses[0].requires_grad:
            losses[0].backward()
        gradients = [self.student.gradient(parameter) for parameter in parameters]
        self.student.release()
        return [*(loss.detach().numpy() for loss in losses), *gradients]

    def _run(self, graph: TorchGraph, batch: Batch, *learning: Any) -> tuple[list[Any], dict[str, Any]]:
        arguments = unpack(self.form, list(batch.tensors().leaves))
        args, kwargs = arguments
        with translate_errors(graph.traced, arguments, batch.number):
            outputs = graph.call(args, kwargs, *learning)
        return outputs, graph.values

    def _losses(
        self,
        batch: Batch,
        compared: Compared,
        settings: FinetuneSettings,
        parameters: Sequence[Parameter],
        arrays: Mapping[int, np.ndarray],
    ) -> list[Any]:
        """Computes the loss and its parts, as `Twins.loss` does."""
        references, reference_blocks = self._run(self.teacher, batch)
        values, value_blocks = self._run(self.student, batch, parameters, arrays)
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
        zero = torch.zeros(())
        parts = [sum(part, zero) / max(len(part), 1) for part in (errors, divergences, blocks)]
        total = parts[0] + settings.kl_weight * parts[1] + settings.block_weight * parts[2]
        return [total, *parts]


def _error(value: Any, reference: Any) -> Any:
    return torch.nn.functional.mse_loss(value, reference)


def _weighted_error(value: Any, reference: Any, weights: np.ndarray) -> Any:
    return ((value - reference) ** 2 * torch.from_numpy(weights)).mean()


def _divergence(logits: Any, reference: Any, temperature: float) -> Any:
    """Kullback-Leibler divergence of softened probabilities, times T**2, as in ``_twins.py``."""
    log_q, log_p = (torch.log_softmax(v / temperature, 1) for v in (logits, reference))
    return (log_p.exp() * (log_p - log_q)).sum(1).mean() * temperature**2


def _arrays(outputs: Sequence[Any], blocks: dict[str, Any]) -> Values:
    return [value.numpy() for value in outputs], {name: value.numpy() for name, value in blocks.items()}
