"""The quantized graph compared with the float graph on one batch: the loss and its gradients."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor

from qtrace.data.batches import translate_errors
from qtrace.extras.finetune.compared import Compared, Values
from qtrace.extras.finetune.data import Batch, unpack
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TracedModule
from qtrace.learning.engine import LearningEngine, LearningStep, MegEngineEngine
from qtrace.verification.lanes import leaves as outputs_in

__all__ = ["PARTS", "Arithmetic", "MegEngineTwins", "Twins"]

PARTS = ("outputs", "classes", "blocks")
"""The terms of the loss: error of outputs, divergence of class probabilities, error of block outputs."""


@dataclass(frozen=True)
class Arithmetic:
    """The functions of the loss in one library.

    Attributes:
        tensor: makes a tensor of an array.
        error: the mean squared error of a tensor and its reference.
        log_softmax: the logarithms of class probabilities, from logits and the axis of classes.
        exp: the exponential.
    """

    tensor: Callable[[np.ndarray], Any]
    error: Callable[[Any, Any], Any]
    log_softmax: Callable[[Any, int], Any]
    exp: Callable[[Any], Any]

    def weighted_error(self, value: Any, reference: Any, weights: np.ndarray) -> Any:
        """Computes the mean of the squared errors times ``weights``."""
        return ((value - reference.detach()) ** 2 * self.tensor(weights)).mean()

    def divergence(self, logits: Any, reference: Any, temperature: float) -> Any:
        """Kullback-Leibler divergence of softened classes, times T**2 (Hinton et al. 2015, section 2.1)."""
        log_q, log_p = (self.log_softmax(v / temperature, 1) for v in (logits, reference.detach()))
        return (self.exp(log_p) * (log_p - log_q)).sum(1).mean() * temperature**2


class Twins(abc.ABC):
    """Abstract base: the quantized graph and its float twin in one engine.

    Args:
        student: the prepared graph, in the phase ``train``.
        teacher: a copy of it with the float weights, in the phase ``float`` and in eval mode.
        form: the arguments of a call, with the index of a leaf in place of each array.
        engine: computes the gradients.
        arithmetic: the functions of the loss.
    """

    def __init__(
        self,
        student: TracedModule,
        teacher: TracedModule,
        form: Any,
        engine: LearningEngine,
        arithmetic: Arithmetic,
    ) -> None:
        self.student, self.teacher, self.form = student, teacher, form
        self.engine, self._arithmetic = engine, arithmetic

    @abc.abstractmethod
    def call(self, student: bool, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the result of one graph and its block outputs, as tensors of the engine.

        Args:
            student: whether to run the quantized graph; else the float graph.
            args: positional arguments of forward, with Tensors of MegEngine.
            kwargs: keyword arguments of forward.
        """

    def _run(self, student: bool, batch: Batch) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = arguments = unpack(self.form, list(batch.tensors().leaves))
        with translate_errors(self.student if student else self.teacher, arguments, batch.number):
            result, blocks = self.call(student, args, kwargs)
        return outputs_in(result), blocks

    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""
        return _arrays(*self._run(False, batch))

    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph, in its current phase."""
        return _arrays(*self._run(True, batch))

    def losses(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> list[Any]:
        """Computes the loss of a batch and its parts, each a scalar, in the order of `PARTS`."""
        maths = self._arithmetic
        references, reference_blocks = self._run(False, batch)
        values, value_blocks = self._run(True, batch)
        errors = [
            maths.weighted_error(values[i], references[i], compared.weights[i])
            if i in compared.weights
            else maths.error(values[i], references[i]) / power
            for i, power in compared.outputs.items()
        ]
        divergences = [
            maths.divergence(values[i], references[i], settings.temperature) for i in compared.classes
        ]
        blocks = [
            maths.error(value_blocks[n], reference_blocks[n]) / power for n, power in compared.blocks.items()
        ]
        zero = maths.tensor(np.zeros((), np.float32))
        parts = [sum(part, zero) / max(len(part), 1) for part in (errors, divergences, blocks)]
        total = parts[0] + settings.kl_weight * parts[1] + settings.block_weight * parts[2]
        return [total, *parts]

    def loss(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> float:
        """Computes the loss of a batch."""
        return float(self.losses(batch, compared, settings)[0].item())

    def gradients(
        self,
        batch: Batch,
        compared: Compared,
        settings: FinetuneSettings,
        parameters: Sequence[Parameter],
        values: Mapping[int, np.ndarray],
    ) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradients; see `LearningEngine.gradients`.

        Args:
            batch: the samples.
            compared: the outputs and blocks that the loss compares.
            settings: the weights of the loss.
            parameters: the parameters, with the values of the moment.
            values: id of a parameter -> its value, where the module's is older.
        """

        def losses(*inputs: Any) -> list[Any]:
            return self.losses(Batch(batch.number, inputs), compared, settings)

        return self.engine.gradients(LearningStep(losses, parameters, batch.leaves, values))


class _NodeRecorder(Interpreter):
    """Runs a graph and records the values of the named nodes."""

    def __init__(self, traced: TracedModule, names: Sequence[str]) -> None:
        super().__init__(traced)
        self.names, self.values = frozenset(names), dict[str, Any]()

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.names:
            self.values[node.name] = value
        return value


class MegEngineTwins(Twins):
    """Both graphs in MegEngine.

    Args:
        student, teacher, form: as for `Twins`.
        blocks: names of the nodes whose values are compared.
        jit: whether steps run under ``jit.trace``.
    """

    def __init__(
        self, student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str], jit: bool
    ) -> None:
        arithmetic = Arithmetic(Tensor, _error, F.logsoftmax, F.exp)
        super().__init__(student, teacher, form, MegEngineEngine(jit), arithmetic)
        self._graphs = [_NodeRecorder(graph, blocks) for graph in (teacher, student)]

    def call(self, student: bool, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Runs one graph; see `Twins`."""
        graph = self._graphs[student]
        graph.values = {}
        return graph.run(*args, **kwargs), graph.values


def _error(value: Tensor, reference: Tensor) -> Tensor:
    return ((value - reference.detach()) ** 2).mean()


def _arrays(outputs: Sequence[Any], blocks: dict[str, Any]) -> Values:
    return [value.numpy() for value in outputs], {name: value.numpy() for name, value in blocks.items()}
