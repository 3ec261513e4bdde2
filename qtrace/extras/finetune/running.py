"""A run from its first step to its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qtrace.display import progress_bar
from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Data
from qtrace.extras.finetune.evaluation import choose_compared
from qtrace.extras.finetune.learner import choose_twins
from qtrace.extras.finetune.report import FineTuned, compare_outputs
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.training import Monitor, Pace, RunSchedule, Trainer
from qtrace.extras.finetune.twins import PARTS
from qtrace.graph.opaque import opaque_calls, say_stopped_gradients
from qtrace.graph.types import TracedModule
from qtrace.learning import MIN_TRACED_STEPS, descend
from qtrace.preparation.model import QuantizedModel, graph_hash
from qtrace.storage import checkpoints

__all__ = ["TuningRun", "write_checkpoint"]

# Settings that a resumed run may change.
_CHANGEABLE = ("checkpoint_every", "memory", "max_minutes", "engine")


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, np.ndarray]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def identity_of(
    settings: FinetuneSettings, jit: bool, model: TracedModule, teacher: TracedModule, data: Data
) -> str:
    """Returns a text that tells a run from one with other settings, graphs or data."""
    options = dataclasses.asdict(settings).items()
    identity = {key: value for key, value in options if key not in _CHANGEABLE} | {"jit": jit}
    hashes = [graph_hash(model), graph_hash(teacher), data.learned.identity, data.unseen.identity]
    return json.dumps([identity, *hashes], sort_keys=True, default=list)


def pack_state(model: TracedModule, owners: Mapping[str, _Stateful]) -> dict[str, np.ndarray]:
    """Returns the values of the model and the states of ``owners`` as arrays."""
    state = {f"model/{name}": tensor.numpy() for name, tensor in model.named_tensors()}
    for name, owner in owners.items():
        state.update({f"{name}/{key}": value for key, value in owner.state_dict().items()})
    return state


def restore_state(
    state: Mapping[str, np.ndarray], model: TracedModule, owners: Mapping[str, _Stateful]
) -> None:
    """Gives the model and ``owners`` the state that `pack_state` returned."""
    for name, tensor in model.named_tensors():
        tensor._reset(type(tensor)(state[f"model/{name}"]))
    for name, owner in owners.items():
        prefix = f"{name}/"
        owner.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})


def write_checkpoint(path: Path, identity: str, state: dict[str, np.ndarray]) -> None:
    """Writes the arrays of a checkpoint, atomically."""
    checkpoints.write(path, checkpoints.pack(identity, state))


def read_checkpoint(path: Path, identity: str) -> dict[str, np.ndarray]:
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


_LOG = logging.getLogger("qtrace")

_POWER_BATCHES = 8  # batches from which the mean squares of outputs and blocks are computed
_MIN_TIMED_STEPS = 5  # a shorter run takes hardly longer than timing a step


class TuningRun:
    """A fine-tuning: its trainer, its monitor, its schedule and its checkpoint.

    Args:
        prepared: the prepared graph, in the phase ``train`` and in eval mode; it is changed in place.
        teacher: the float graph.
        data: the samples to learn from, and the samples to evaluate the outputs on.
        settings: steps, rates and the terms of the loss.
        blocks: names of the nodes whose values are compared.
        pace: the clock of the run, with its limit.
        checkpoint: the file of the checkpoint; None for none.
    """

    def __init__(
        self,
        prepared: QuantizedModel,
        teacher: TracedModule,
        data: Data,
        settings: FinetuneSettings,
        blocks: Sequence[str],
        pace: Pace,
        checkpoint: Path | None,
    ) -> None:
        model, samples, jit = prepared.module, data.learned, settings.jit
        if jit is None:
            jit = samples.joined and settings.steps >= MIN_TRACED_STEPS and not opaque_calls(model)
        if sentence := say_stopped_gradients(model):
            _LOG.warning("finetune: %s", sentence)
        self._data, self._checkpoint = data, checkpoint
        self._identity = identity_of(settings, jit, model, teacher, data)
        twins, self._reason = choose_twins(settings.engine, model, teacher, samples, blocks, jit)
        first = min(_POWER_BATCHES, math.ceil(samples.count / settings.batch_size))
        drawn = [samples.draw(step, settings.batch_size, settings.seed) for step in range(first)]
        compared = choose_compared(twins, blocks, drawn, model)
        self.trainer = Trainer(prepared, twins, compared, samples, settings, pace)
        self.schedule = RunSchedule(settings, data.unseen, pace)
        self.monitor = Monitor(self.trainer, data.unseen, self.schedule, drawn)
        self._resumed: int | None = None
        self._bar: Any = None

    def learn(self, resume: bool, progress: bool) -> None:
        """Runs all remaining steps, then gives the model its best state.

        Raises:
            TrainingError: when the loss or a gradient is not finite; it names the node.
        """
        if resume and self._checkpoint is not None and self._checkpoint.exists():
            self._load(self._checkpoint)
        self._plan()
        trainer, best = self.trainer, self.monitor.best
        trainer.watch.start()
        start, steps = len(trainer.curves), trainer.settings.steps
        with progress_bar(
            total=steps, initial=start, desc="finetune", unit="step", disable=not progress
        ) as self._bar:
            descend(trainer, range(start, steps), self._ends)
        trainer.watch.stop()
        best.restore()
        if best.best.step == 0:
            _LOG.warning("finetune: no step was better than the start: the model is as it was")

    def _plan(self) -> None:
        """Estimates the time, and shortens the run to the steps that fit into ``max_minutes``."""
        trainer, limit = self.trainer, self.trainer.settings.max_minutes
        steps = trainer.settings.steps - len(trainer.curves)
        total = None if self._resumed is None else trainer.settings.steps
        if steps < _MIN_TIMED_STEPS and limit is None:
            return
        if self.schedule.has_time(1, total):  # else one step is taken in any case
            trainer.time_step()
        _LOG.info(f"finetune: {self.schedule.describe(steps, total)}")
        fitting = self.schedule.fit(steps, total)
        if self._resumed is None and fitting < steps:  # a resumed run keeps the steps: rates follow them
            _LOG.warning(f"finetune: {fitting} steps instead of {steps}, to end within {limit:g} minutes")
            trainer.shorten(fitting)

    def _ends(self, completed: int) -> bool:
        """Evaluates and saves the state where that is due; returns whether the run ends early."""
        monitor, settings = self.monitor, self.trainer.settings
        monitor.judge(completed)
        loss, error = self.trainer.curves[-1][0], monitor.best.best.error
        self._bar.set_postfix(loss=f"{loss:.3g}", best_error=f"{error:.3g}", refresh=False)
        self._bar.update()
        due = completed < settings.steps and completed % settings.checkpoint_every == 0
        if self._checkpoint is not None and due and not monitor.stopped:
            write_checkpoint(self._checkpoint, self._identity, self._state())
        return bool(monitor.stopped)

    # -- the checkpoint ------------------------------------------------------------------------------

    @property
    def _owners(self) -> dict[str, Any]:
        trainer, monitor = self.trainer, self.monitor
        owners = {"learner": trainer.learner, "watch": trainer.watch}
        return {**owners, "best": monitor.best, "retreats": monitor.retreats}

    def _state(self) -> dict[str, np.ndarray]:
        trainer = self.trainer
        trainer.learner.write()
        curves, steps = np.array(trainer.curves, np.float64), np.array(trainer.settings.steps)
        return {**pack_state(trainer.model, self._owners), "curves": curves, "steps": steps}

    def _load(self, checkpoint: Path) -> None:
        state, trainer = read_checkpoint(checkpoint, self._identity), self.trainer
        trainer.shorten(int(state["steps"]))
        restore_state(state, trainer.model, self._owners)
        trainer.curves = [[float(v) for v in row] for row in state["curves"]]
        trainer.rate_factor = self.monitor.retreats.factor
        self._resumed = len(trainer.curves)

    # -- the report ----------------------------------------------------------------------------------

    def result(self) -> FineTuned:
        """Evaluates the model in its best state and reports the run."""
        trainer, monitor, data = self.trainer, self.monitor, self._data
        best, engine = monitor.best.best.step, trainer.twins.engine
        after = monitor.evaluate() if best else monitor.start
        frozen = tuple(f for f in trainer.watch.frozen if f.step <= best)
        loss, *parts = zip(*trainer.curves, strict=True)
        return FineTuned(
            settings=trainer.settings,
            samples=data.learned.count,
            measured=data.unseen.count,
            measured_on=data.source,
            left_out=data.learned.left_out,
            parameters=len(trainer.learner.parameters),
            ranges=trainer.learner.ranges,
            outputs=compare_outputs(monitor.start, after),
            evaluations=tuple(monitor.best.evaluations),
            best_step=best,
            retreats=tuple(monitor.retreats.all),
            stopped=monitor.stopped,
            seconds=self.schedule.pace.seconds,
            blocks=tuple(trainer.compared.blocks),
            left=trainer.compared.left,
            loss=loss,
            parts=dict(zip(PARTS, parts, strict=True)),
            frozen=frozen,
            moving=len(trainer.watch.all) - len(frozen),
            resumed=self._resumed,
            engine=engine.name,
            engine_reason=self._reason,
            jit=engine.jit,
        )
