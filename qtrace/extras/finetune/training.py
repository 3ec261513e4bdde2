"""The steps of a fine-tuning: a batch, its loss and gradients, and what moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from qtrace.errors import TrainingError
from qtrace.extras.finetune.compared import Compared
from qtrace.extras.finetune.data import Batch, Samples, unpack
from qtrace.extras.finetune.learner import Learner
from qtrace.extras.finetune.pacing import Pace
from qtrace.extras.finetune.retreating import Retreat
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.twins import PARTS, Twins
from qtrace.extras.finetune.watching import Watch
from qtrace.graph.nonfinite import search_nonfinite
from qtrace.preparation.model import QuantizedModel

__all__ = ["Trainer"]


class Trainer:
    """Takes the steps of a run; see `qtrace.learning.loop.Descent`.

    Args:
        prepared: the prepared graph, in the phase ``train`` and in eval mode; it is changed in place.
        twins: that graph and the float graph.
        compared: the outputs and blocks that the loss compares.
        samples: the samples to learn from.
        settings: steps, rates and the terms of the loss.
        pace: gets the time of each step.

    Attributes:
        curves: the loss of each step and its parts.
        rate_factor: the factor of the learning rates, which a retreat lowers.
    """

    def __init__(
        self,
        prepared: QuantizedModel,
        twins: Twins,
        compared: Compared,
        samples: Samples,
        settings: FinetuneSettings,
        pace: Pace,
    ) -> None:
        self.model, self.twins, self.compared, self.samples = prepared.module, twins, compared, samples
        self.settings, self._pace = settings, pace
        engine = twins.engine
        self.learner = Learner(prepared, settings, engine.adam, writes=not engine.reads_arrays)
        self.watch = Watch(self.model, settings)
        self.curves: list[list[float]] = []
        self.rate_factor, self._started = 1.0, 0.0
        engine.unchanged = lambda: self.watch.unchanged()

    def shorten(self, steps: int) -> None:
        """Plans a run of ``steps`` steps; none is taken yet."""
        self.settings = dataclasses.replace(self.settings, steps=steps)
        self.watch = Watch(self.model, self.settings)

    def compute(self, step: int) -> tuple[list[float], list[np.ndarray | None]]:
        """Computes the loss of a step, its parts, and the gradients."""
        self._started = self._pace.seconds
        results = self.gradients(self._batch(step))
        losses = [float(value) for value in results[: 1 + len(PARTS)] if value is not None]
        return losses, results[1 + len(PARTS) :]

    def move(self, step: int, losses: list[float], gradients: Sequence[np.ndarray | None]) -> None:
        """Moves weights and ranges by a step, and their averages.

        Raises:
            TrainingError: when a parameter or its gradient is not finite; it names the node.
        """
        try:
            factor = self.settings.factor(step) * self.rate_factor
            self.learner.step(gradients, losses[0], factor, self.watch.fixed)
        except TrainingError as error:
            raise self._error(str(error), step) from None
        self.curves.append(losses)
        if any(frozen.sort == "statistics" for frozen in self.watch.update(step + 1)):
            self.twins.engine.forget()  # a frozen BatchNorm computes something else
        self._pace.step_seconds = self._pace.seconds - self._started

    def rewind(self, retreat: Retreat) -> None:
        """Goes on from the model's values, which are the best state's."""
        self.rate_factor = retreat.factor
        self.learner.rewind()
        if self.watch.rewind(retreat.back_to):
            self.twins.engine.forget()

    def time_step(self) -> None:
        """Times a step whose gradients are discarded."""
        self.watch.start()
        batch = self._batch(len(self.curves))
        with self.watch.unchanged():
            if self.twins.engine.jit:
                self.gradients(batch)
            start = self._pace.seconds
            self.gradients(batch)
            self._pace.step_seconds = self._pace.seconds - start

    def fail(self, loss: float, step: int) -> TrainingError:
        """Returns the error for a loss that is not finite; it names the node."""
        return self._error(f"the loss is {loss}", step)

    def _error(self, problem: str, step: int) -> TrainingError:
        """Describes values that are not finite, with the first node that holds one."""
        self.learner.write()
        place = "all values of both graphs are finite"
        arguments = unpack(self.samples.form, list(self._batch(step).tensors().leaves))
        for graph, name in ((self.twins.student, "quantized"), (self.twins.teacher, "float")):
            origin = search_nonfinite(graph, *arguments).origin
            if origin is not None:
                first = origin.outputs[0].name
                place = f"the first value of the {name} graph that is not finite is {first}"
                break
        return TrainingError(
            f"{problem} in step {step + 1}: {place}. The model is left as it was: try a lower lr, and look "
            "at the data."
        )

    def gradients(self, batch: Batch) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradients as arrays."""
        learner = self.learner
        return self.twins.gradients(batch, self.compared, self.settings, learner.parameters, learner.values)

    def _batch(self, step: int) -> Batch:
        return self.samples.draw(step, self.settings.batch_size, self.settings.seed)
