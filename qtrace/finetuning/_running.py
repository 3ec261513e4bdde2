"""The run of a fine-tuning: steps, checkpoints, and what was good before and after."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.jit import trace
from tqdm import tqdm

from qtrace.comparison._tally import Difference
from qtrace.errors import TrainingError
from qtrace.finetuning import _checkpoint
from qtrace.finetuning._data import Leaves, Samples
from qtrace.finetuning._finding import first_not_finite
from qtrace.finetuning._learning import Learner
from qtrace.finetuning._twins import PARTS, Compared, Twins, choose_compared
from qtrace.finetuning._watching import Watch
from qtrace.finetuning.report import Output
from qtrace.finetuning.settings import Settings
from qtrace.graph.types import TracedModule
from qtrace.passes.record import graph_hash
from qtrace.phases import in_phase

__all__ = ["Run"]

_MEASURED_FIRST = 8  # batches from which the mean squares of outputs and blocks are taken
_TRACED_FROM = 20  # steps: capturing and compiling a step costs as much as some eager ones

# What a fine-tuning may change without becoming another one.
_FREE = ("checkpoint_every", "memory")


class Run:
    """A fine-tuning between its beginning and its end.

    Args:
        model: the prepared graph, in the phase ``train`` and in eval mode; it is changed in place.
        teacher: the float one.
        samples: what is learned from.
        settings: how.
        blocks: names of the nodes that are compared.
    """

    def __init__(
        self,
        model: TracedModule,
        teacher: TracedModule,
        samples: Samples,
        settings: Settings,
        blocks: Sequence[str],
    ) -> None:
        self.model, self.samples, self.settings = model, samples, settings
        self.jit = settings.jit
        if self.jit is None:
            self.jit = samples.joined and settings.steps >= _TRACED_FROM
        given = dataclasses.asdict(settings)
        kept = {key: value for key, value in given.items() if key not in _FREE} | {"jit": self.jit}
        hashes = [graph_hash(model), graph_hash(teacher), samples.identity]
        self.identity = json.dumps([kept, *hashes], sort_keys=True, default=list)
        self.twins = Twins(model, teacher, samples.form, blocks)
        first = min(_MEASURED_FIRST, math.ceil(samples.count / settings.batch_size))
        drawn = [samples.draw(step, settings.batch_size, settings.seed) for step in range(first)]
        self.compared: Compared = choose_compared(self.twins, blocks, drawn)
        self.learner = Learner(model, settings)
        self.watch = Watch(model, settings)
        self.curves: list[list[float]] = []
        self.resumed: int | None = None
        self._captured: Any = None
        self._present: list[int] = []

    # -- learning -----------------------------------------------------------------------------------

    def learn(self, checkpoint: Path | None, resume: bool, progress: bool) -> None:
        """Takes all steps that are left, and ends.

        Raises:
            TrainingError: when the loss or a gradient is not finite, naming where that arises.
        """
        if resume and checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        self.watch.start()
        start, steps = len(self.curves), self.settings.steps
        with tqdm(total=steps, initial=start, desc="finetune", unit="step", disable=not progress) as bar:
            for step in range(start, steps):
                self._step(step)
                bar.set_postfix(
                    loss=f"{self.curves[-1][0]:.4g}", frozen=len(self.watch.frozen), refresh=False
                )
                bar.update()
                done = step + 1
                if checkpoint is not None and done < steps and done % self.settings.checkpoint_every == 0:
                    _checkpoint.save(checkpoint, self._state(), self.identity)
        self.watch.settle()
        self.learner.settle()

    def _step(self, step: int) -> None:
        leaves = self.samples.draw(step, self.settings.batch_size, self.settings.seed)
        found = self._gradients(leaves)
        losses = [float(value) for value in found[: 1 + len(PARTS)] if value is not None]
        if not math.isfinite(losses[0]):
            raise TrainingError(self._told(f"the loss is {losses[0]}", step, leaves))
        gradients = found[1 + len(PARTS) :]
        try:
            self.learner.step(gradients, self.settings.factor(step), self.watch.fixed)
        except TrainingError as error:
            raise TrainingError(self._told(str(error), step, leaves)) from None
        self.curves.append(losses)
        if any(frozen.sort == "statistics" for frozen in self.watch.update(step + 1)):
            self._captured = None  # a frozen BatchNorm computes something else

    def _gradients(self, leaves: Leaves) -> list[np.ndarray | None]:
        """Loss, parts and gradients as arrays."""
        tensors = [Tensor(leaf) for leaf in leaves]
        count = 1 + len(PARTS) + len(self.learner.parameters)
        if not self.jit:
            found = self._computed(tensors)
            return [None if value is None else value.numpy() for value in found]
        if self._captured is None:
            self._capture(tensors)
        result: list[np.ndarray | None] = [None] * count
        for index, value in zip(self._present, self._captured(*tensors), strict=True):
            result[index] = value.numpy()
        return result

    def _computed(self, tensors: Sequence[Tensor]) -> list[Any]:
        return self.twins.gradients(tensors, self.compared, self.settings, self.learner.parameters)

    def _capture(self, tensors: Sequence[Tensor]) -> None:
        """Traces a step. The first calls are thrown away: the compiled ones may differ from them in a bit."""

        def compute(*inputs: Tensor) -> tuple[Tensor, ...]:
            found = self._computed(inputs)
            self._present[:] = [i for i, value in enumerate(found) if value is not None]
            return tuple(found[i] for i in self._present)

        statistics = [(t, t.numpy().copy()) for w in self.watch.all if w.norm is not None for t in w.tensors]
        self._captured = trace(compute, symbolic=False)
        for _ in range(2):
            self._captured(*tensors)
        for tensor, value in statistics:
            tensor._reset(Tensor(value))

    def _told(self, what: str, step: int, leaves: Leaves) -> str:
        """A sentence on values that are not finite."""
        where = first_not_finite(self.model, self.samples.form, leaves)
        place = f"the first value of the quantized graph that is not finite is {where}"
        if where is None:
            where = first_not_finite(self.twins.teacher.traced, self.samples.form, leaves)
            place = f"the first value of the float graph that is not finite is {where}"
        if where is None:
            place = "all values of both graphs are finite"
        return (
            f"{what} in step {step + 1}: {place}; the model is left as it was, so try a lower lr, and look "
            "at the data."
        )

    # -- checkpoints --------------------------------------------------------------------------------

    def _state(self) -> dict[str, np.ndarray]:
        state = {f"model/{name}": t.numpy() for name, t in self.model.named_tensors()}
        state.update({f"learner/{key}": value for key, value in self.learner.state_dict().items()})
        state.update({f"watch/{key}": value for key, value in self.watch.state_dict().items()})
        return {**state, "curves": np.array(self.curves, np.float64)}

    def _load(self, checkpoint: Path) -> None:
        state = _checkpoint.load(checkpoint, self.identity)
        for name, tensor in self.model.named_tensors():
            tensor._reset(type(tensor)(state[f"model/{name}"]))
        for part, owner in (("learner/", self.learner), ("watch/", self.watch)):
            owner.load_state_dict({k[len(part) :]: v for k, v in state.items() if k.startswith(part)})
        self.curves = [[float(v) for v in row] for row in state["curves"]]
        self.resumed = len(self.curves)

    # -- measuring ----------------------------------------------------------------------------------

    def measure(self, samples: Samples) -> dict[int, tuple[tuple[int, ...], float, float | None]]:
        """Output -> shape of a sample, SQNR in dB, and share of equal classes; in eval mode."""
        sums = {index: (Difference(), [0, 0]) for index in self.compared.outputs}
        shapes: dict[int, tuple[int, ...]] = {}
        with in_phase(self.model, "quantize"):
            for leaves in samples.in_order(4 * self.settings.batch_size):
                tensors = [Tensor(leaf) for leaf in leaves]
                want, have = self.twins.wanted(tensors)[0], self.twins.given(tensors)[0]
                for index, (difference, same) in sums.items():
                    w, h = want[index].numpy(), have[index].numpy()
                    difference.add(w, h)
                    shapes[index] = w.shape[1:]
                    if index in self.compared.classes:
                        same[0] += int(np.sum(w.argmax(1) == h.argmax(1)))
                        same[1] += len(w)
        return {
            index: (shapes[index], difference.sqnr_db, same[0] / same[1] if same[1] else None)
            for index, (difference, same) in sums.items()
        }


def outputs_of(before: dict[int, Any], after: dict[int, Any]) -> tuple[Output, ...]:
    """What `Run.measure` found before and after, by output."""
    return tuple(
        Output(index, shape, db, after[index][1], same, after[index][2])
        for index, (shape, db, same) in before.items()
    )
