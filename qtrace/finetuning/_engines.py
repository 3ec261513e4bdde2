"""The engines of a fine-tuning: each runs both graphs, and computes the loss and its gradients as arrays."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.jit import trace

from qtrace.finetuning._data import Batch
from qtrace.finetuning._twins import PARTS, Compared, Twins, Values
from qtrace.finetuning.settings import FinetuneSettings
from qtrace.gradients.adam import Adam

__all__ = ["MegEngineEngine", "TrainingEngine"]


class TrainingEngine(abc.ABC):
    """Abstract base: from a batch of arrays to arrays. The parameters are always those of the modules.

    Attributes:
        name: the name that `FinetuneSettings.engine` has for it.
        jit: whether steps run under ``jit.trace``.
        reads_arrays: whether `gradients` takes the values of weights as arrays, so that a step need not write
            them into the modules.
        adam: computes the steps of the optimizer.
    """

    name: str
    jit: bool = False
    reads_arrays: bool = False
    adam: type[Adam] = Adam

    @abc.abstractmethod
    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""

    @abc.abstractmethod
    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph, in its current phase."""

    @abc.abstractmethod
    def loss(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> float:
        """Computes the loss of a batch."""

    @abc.abstractmethod
    def gradients(
        self,
        batch: Batch,
        compared: Compared,
        settings: FinetuneSettings,
        parameters: Sequence[Parameter],
        values: Mapping[int, np.ndarray],
    ) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradient of every parameter; None for a missing gradient.

        Args:
            batch: the samples.
            compared: the outputs and blocks that the loss compares.
            settings: the weights of the loss.
            parameters: the parameters, with the values of the moment.
            values: id of a parameter -> its value, where the module's is older; only if `reads_arrays`.
        """

    def forget(self) -> None:
        """Drops what was compiled for a step: a module computes something else from now on."""
        return


class MegEngineEngine(TrainingEngine):
    """Runs both graphs in MegEngine.

    Args:
        twins: both graphs.
        jit: whether steps run under ``jit.trace``.

    Attributes:
        unchanged: gives the context in which calls of a step have no lasting effect on the model.
    """

    name = "megengine"

    def __init__(self, twins: Twins, jit: bool) -> None:
        self.twins, self.jit = twins, jit
        self.unchanged: Callable[[], AbstractContextManager[None]] | None = None
        self._captured: Any = None
        self._present: list[int] = []

    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""
        return _arrays(*self.twins.run_teacher(batch.tensors()))

    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph, in its current phase."""
        return _arrays(*self.twins.run_student(batch.tensors()))

    def loss(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> float:
        """Computes the loss of a batch."""
        return float(self.twins.loss(batch.tensors(), compared, settings)[0].item())

    def gradients(
        self,
        batch: Batch,
        compared: Compared,
        settings: FinetuneSettings,
        parameters: Sequence[Parameter],
        values: Mapping[int, np.ndarray],
    ) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradient of every parameter, traced if `jit` is set."""
        assert not values
        batch = batch.tensors()

        def compute(*inputs: Tensor) -> list[Tensor | None]:
            return self.twins.gradients(Batch(batch.number, inputs), compared, settings, parameters)

        if not self.jit:
            return [None if value is None else value.numpy() for value in compute(*batch.leaves)]
        if self._captured is None:
            self._capture(batch, compute)
        result: list[np.ndarray | None] = [None] * (1 + len(PARTS) + len(parameters))
        for index, value in zip(self._present, self._captured(*batch.leaves), strict=True):
            result[index] = value.numpy()
        return result

    def _capture(self, batch: Batch, compute: Callable[..., list[Tensor | None]]) -> None:
        """Traces a step and discards its first calls, since compiled calls may differ from them in a bit."""

        def present(*inputs: Tensor) -> tuple[Tensor, ...]:
            results = compute(*inputs)
            self._present[:] = [i for i, value in enumerate(results) if value is not None]
            return tuple(value for value in results if value is not None)

        self._captured = trace(present, symbolic=False)
        assert self.unchanged is not None
        with self.unchanged():
            for _ in range(2):
                self._captured(*batch.leaves)

    def forget(self) -> None:
        """Drops the traced step: a frozen BatchNorm, for one, computes something else."""
        self._captured = None


def _arrays(outputs: Sequence[Tensor], blocks: dict[str, Tensor]) -> Values:
    return [value.numpy() for value in outputs], {name: value.numpy() for name, value in blocks.items()}
