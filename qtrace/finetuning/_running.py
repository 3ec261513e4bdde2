"""The loop of a fine-tuning: steps, evaluations of held-back data, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qtrace.calibration.nonfinite import nonfinite_origins
from qtrace.errors import TrainingError
from qtrace.finetuning._choice import choose_engine
from qtrace.finetuning._data import Batch, Data, unpack
from qtrace.finetuning._engines import MegEngineEngine
from qtrace.finetuning._evaluating import BestState, EvaluationFigures, evaluate
from qtrace.finetuning._learning import Learner
from qtrace.finetuning._pacing import Pace, format_seconds
from qtrace.finetuning._retreating import Retreats
from qtrace.finetuning._twins import PARTS, Compared, choose_compared
from qtrace.finetuning._watching import Watch
from qtrace.finetuning.report import FineTuned, compare_outputs
from qtrace.finetuning.settings import FinetuneSettings
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.record import graph_hash
from qtrace.storage import checkpoints

__all__ = ["TuningRun"]

_LOG = logging.getLogger("qtrace")

_POWER_BATCHES = 8  # batches from which the mean squares of outputs and blocks are computed
_MIN_TRACED_STEPS = 20  # capturing and compiling a step takes as long as some eager steps
_MIN_TIMED_STEPS = 5  # a shorter run takes hardly longer than timing a step
_MAX_EVALUATIONS = 20
_MIN_EVALUATION_INTERVAL = 5  # steps

# Settings that a resumed run may change.
_CHANGEABLE = ("checkpoint_every", "memory", "max_minutes", "engine")


class TuningRun:
    """The state of a fine-tuning, from its first evaluation to its report.

    Args:
        prepared: the prepared graph, in the phase ``train`` and in eval mode; it is changed in place.
        teacher: the float graph.
        data: the samples to learn from, and the samples to evaluate the outputs on.
        settings: steps, rates and the terms of the loss.
        blocks: names of the nodes whose values are compared.
        pace: the clock of the run, with its limit.

    Attributes:
        start: the error and the outputs before the first step.
        stopped: why the run ended before its last step; "" if it did not.
    """

    def __init__(
        self,
        prepared: QuantizedModel,
        teacher: TracedModule,
        data: Data,
        settings: FinetuneSettings,
        blocks: Sequence[str],
        pace: Pace,
    ) -> None:
        self.pace = pace
        model, samples, unseen = prepared.module, data.learned, data.unseen
        self.model, self.data, self.settings = model, data, settings
        self.samples, self.unseen = samples, unseen
        jit = settings.jit
        if jit is None:
            jit = samples.joined and settings.steps >= _MIN_TRACED_STEPS
        options = dataclasses.asdict(settings).items()
        identity = {key: value for key, value in options if key not in _CHANGEABLE} | {"jit": jit}
        hashes = [graph_hash(model), graph_hash(teacher), samples.identity, unseen.identity]
        self.identity = json.dumps([identity, *hashes], sort_keys=True, default=list)
        self.teacher = teacher
        chosen = choose_engine(settings.engine, model, teacher, samples, blocks, jit)
        self.engine, self.engine_reason = chosen
        first = min(_POWER_BATCHES, math.ceil(samples.count / settings.batch_size))
        drawn = [samples.draw(step, settings.batch_size, settings.seed) for step in range(first)]
        self.compared: Compared = choose_compared(self.engine, blocks, drawn, model)
        writes = not self.engine.reads_arrays
        self.learner = Learner(prepared, settings, self.engine.adam, writes=writes)
        self.watch = Watch(model, settings)
        self.curves: list[list[float]] = []
        self.resumed: int | None = None
        self.stopped = ""
        if isinstance(self.engine, MegEngineEngine):
            self.engine.unchanged = lambda: self.watch.unchanged()
        self._step_seconds = 0.0  # of the latest step
        self._evaluation_seconds = 0.0  # of the latest evaluation
        self.start = self.evaluate()
        self.best = BestState(model, self.start.error)
        self.retreats = Retreats(self.start.error, [self._loss(batch) for batch in drawn])

    # -- learning -----------------------------------------------------------------------------------

    def learn(self, checkpoint: Path | None, resume: bool, progress: bool) -> None:
        """Runs all remaining steps, then gives the model its best state.

        Raises:
            TrainingError: when the loss or a gradient is not finite; it names the node.
        """
        if resume and checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        self._plan()
        self.watch.start()
        start, steps = len(self.curves), self.settings.steps
        with tqdm(total=steps, initial=start, desc="finetune", unit="step", disable=not progress) as bar:
            for step in range(start, steps):
                self._step(step)
                completed = step + 1
                self._judge(completed)
                error = f"{self.best.best.error:.3g}"
                bar.set_postfix(loss=f"{self.curves[-1][0]:.3g}", best_error=error, refresh=False)
                bar.update()
                if self.stopped:
                    break
                due = completed < steps and completed % self.settings.checkpoint_every == 0
                if checkpoint is not None and due:
                    checkpoints.write(checkpoint, checkpoints.pack(self.identity, self._state()))
        self.watch.stop()
        self.best.restore()
        if self.best.best.step == 0:
            _LOG.warning("finetune: no step was better than the start: the model is as it was")

    def _plan(self) -> None:
        """Estimates the time, and shortens the run to the steps that fit into ``max_minutes``."""
        steps, limit = self.settings.steps - len(self.curves), self.settings.max_minutes
        if steps < _MIN_TIMED_STEPS and limit is None:
            return
        if self.pace.has(self._seconds_of(1)):  # else one step is taken in any case
            self._time_step()
        _LOG.info(
            f"finetune: about {format_seconds(self._seconds_of(steps))}: {steps} steps of "
            f"{self._step_seconds:.2g} s and {self._evaluations_of(steps)} evaluations of "
            f"{self._evaluation_seconds:.2g} s"
        )
        fitting = next((n for n in range(steps, 1, -1) if self.pace.has(self._seconds_of(n))), 1)
        if self.resumed is None and fitting < steps:  # a resumed run keeps the steps, since rates follow them
            _LOG.warning(f"finetune: {fitting} steps instead of {steps}, to end within {limit:g} minutes")
            self._shorten(fitting)

    def _evaluations_of(self, steps: int) -> int:
        """How often a rest of ``steps`` steps evaluates, the evaluation for the report included."""
        total = self.settings.steps if self.resumed is not None else steps
        return math.ceil(steps / self._evaluation_interval(total)) + 1

    def _seconds_of(self, steps: int) -> float:
        """How long ``steps`` steps and their evaluations take, as far as both were timed."""
        return steps * self._step_seconds + self._evaluations_of(steps) * self._evaluation_seconds

    def _shorten(self, steps: int) -> None:
        self.settings = dataclasses.replace(self.settings, steps=steps)
        self.watch = Watch(self.model, self.settings)

    def _evaluation_interval(self, steps: int) -> int:
        """The steps between two evaluations in a run of ``steps``, so that these take little of its time."""
        if self.settings.evaluate_every is not None:
            return self.settings.evaluate_every
        batches = self.unseen.count / (self.settings.batch_size if self.unseen.joined else 1)
        return max(math.ceil(steps / _MAX_EVALUATIONS), math.ceil(batches), _MIN_EVALUATION_INTERVAL)

    def evaluate(self) -> EvaluationFigures:
        """Compares the outputs of both graphs on the held-back data."""
        start, size = self.pace.seconds, 4 * self.settings.batch_size
        figures = evaluate(self.model, self.engine, self.compared, self.unseen, size)
        self._evaluation_seconds = self.pace.seconds - start
        return figures

    def _judge(self, completed: int) -> None:
        """Evaluates when it is due, keeps the best state, and returns to it if the run diverges."""
        steps = self.settings.steps
        due = completed % self._evaluation_interval(steps) == 0
        error = None
        if due or completed == steps or not self._has_time(1 + due):
            with self.watch.settled(), self.learner.settled():
                error = self.evaluate().error
                self.best.consider(completed, error)
        if completed == steps:
            return
        if not self._has_time(1):
            self.stopped = f"max_minutes ({self.settings.max_minutes:g}) leaves no time for another step"
            return
        reason = self.retreats.reason(completed, [row[0] for row in self.curves], error)
        if not reason:
            return
        if self.retreats.exhausted:
            self.stopped = f"{reason}, at the smallest learning rate that is tried"
            return
        retreat = self.retreats.retreat(completed, self.best.best.step, reason)
        _LOG.warning(f"finetune: {retreat}")
        self.best.restore()
        self.learner.rewind()
        if self.watch.rewind(self.best.best.step):
            self.engine.forget()

    def _has_time(self, evaluations: int) -> bool:
        """Whether another step, ``evaluations`` and the evaluation for the report fit into the time."""
        return self.pace.has(self._step_seconds + (evaluations + 1) * self._evaluation_seconds)

    def _loss(self, batch: Batch) -> float:
        return self.engine.loss(batch, self.compared, self.settings)

    def _step(self, step: int) -> None:
        start, batch = self.pace.seconds, self._batch(step)
        results = self._gradients(batch)
        losses = [float(value) for value in results[: 1 + len(PARTS)] if value is not None]
        if not math.isfinite(losses[0]):
            raise TrainingError(self._describe_nonfinite(f"the loss is {losses[0]}", step, batch))
        gradients = results[1 + len(PARTS) :]
        try:
            factor = self.settings.factor(step) * self.retreats.factor
            self.learner.step(gradients, losses[0], factor, self.watch.fixed)
        except TrainingError as error:
            raise TrainingError(self._describe_nonfinite(str(error), step, batch)) from None
        self.curves.append(losses)
        if any(frozen.sort == "statistics" for frozen in self.watch.update(step + 1)):
            self.engine.forget()  # a frozen BatchNorm computes something else
        self._step_seconds = self.pace.seconds - start

    def _batch(self, step: int) -> Batch:
        return self.samples.draw(step, self.settings.batch_size, self.settings.seed)

    def _gradients(self, batch: Batch) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradients as arrays."""
        learner = self.learner
        return self.engine.gradients(batch, self.compared, self.settings, learner.parameters, learner.values)

    def _time_step(self) -> None:
        """Times a step whose gradients are discarded."""
        self.watch.start()
        batch = self._batch(len(self.curves))
        with self.watch.unchanged():
            if self.engine.jit:
                self._gradients(batch)
            start = self.pace.seconds
            self._gradients(batch)
            self._step_seconds = self.pace.seconds - start

    def _describe_nonfinite(self, problem: str, step: int, batch: Batch) -> str:
        """Describes values that are not finite, with the first node that holds one."""
        self.learner.write()
        place = "all values of both graphs are finite"
        arguments = unpack(self.samples.form, list(batch.tensors().leaves))
        for graph, name in ((self.model, "quantized"), (self.teacher, "float")):
            origin = next(filter(None, nonfinite_origins(graph, arguments).values()), None)
            if origin is not None:
                first = origin.outputs[0].name
                place = f"the first value of the {name} graph that is not finite is {first}"
                break
        return (
            f"{problem} in step {step + 1}: {place}. The model is left as it was: try a lower lr, and look "
            "at the data."
        )

    def result(self) -> FineTuned:
        """Evaluates the model in its best state and reports the run."""
        best = self.best.best.step
        after = self.evaluate() if best else self.start
        frozen = tuple(f for f in self.watch.frozen if f.step <= best)
        loss, *parts = zip(*self.curves, strict=True)
        return FineTuned(
            settings=self.settings,
            samples=self.samples.count,
            measured=self.unseen.count,
            measured_on=self.data.source,
            left_out=self.samples.left_out,
            parameters=len(self.learner.parameters),
            ranges=self.learner.ranges,
            outputs=compare_outputs(self.start, after),
            evaluations=tuple(self.best.evaluations),
            best_step=best,
            retreats=tuple(self.retreats.all),
            stopped=self.stopped,
            seconds=self.pace.seconds,
            blocks=tuple(self.compared.blocks),
            left=self.compared.left,
            loss=loss,
            parts=dict(zip(PARTS, parts, strict=True)),
            frozen=frozen,
            moving=len(self.watch.all) - len(frozen),
            resumed=self.resumed,
            engine=self.engine.name,
            engine_reason=self.engine_reason,
            jit=self.engine.jit,
        )

    # -- checkpoints --------------------------------------------------------------------------------

    def _state(self) -> dict[str, np.ndarray]:
        self.learner.write()
        state = {f"model/{name}": t.numpy() for name, t in self.model.named_tensors()}
        for name, owner in self._owners.items():
            state.update({f"{name}/{key}": value for key, value in owner.state_dict().items()})
        return {**state, "curves": np.array(self.curves, np.float64), "steps": np.array(self.settings.steps)}

    @property
    def _owners(self) -> dict[str, Any]:
        return {"learner": self.learner, "watch": self.watch, "best": self.best, "retreats": self.retreats}

    def _load(self, checkpoint: Path) -> None:
        state = _read_checkpoint(checkpoint, self.identity)
        self._shorten(int(state["steps"]))
        for name, tensor in self.model.named_tensors():
            tensor._reset(type(tensor)(state[f"model/{name}"]))
        for name, owner in self._owners.items():
            prefix = f"{name}/"
            owner.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
        self.curves = [[float(v) for v in row] for row in state["curves"]]
        self.resumed = len(self.curves)


def _read_checkpoint(path: Path, identity: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint; refuses a damaged one, and one of another model, data or settings."""
    try:
        return checkpoints.unpack(path.read_bytes(), identity)[1]
    except checkpoints.OtherIdentityError:
        raise TrainingError(
            f"the checkpoint {path} belongs to another fine-tuning: the model, the data or a setting has "
            "changed since. Put it back, or remove the checkpoint and begin anew (--force)."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"the checkpoint {path} is damaged ({type(error).__name__}): remove it and begin anew (--force)."
        ) from error
