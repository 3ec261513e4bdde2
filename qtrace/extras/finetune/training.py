"""What learns, the engine of its gradients, the steps of a run, and how it goes back to a better state."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Parameter

from qtrace.calibration.choice import COMPARED_SAMPLES
from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Batch, FinetuneSettings, Samples, unpack
from qtrace.extras.finetune.evaluation import BestState, Compared, EvaluationFigures, evaluate
from qtrace.extras.finetune.twins import PARTS, MegEngineTwins, Twins, Units, Watch
from qtrace.fakequant.base import scales
from qtrace.graph.differences import NETWORK_RTOL
from qtrace.graph.nonfinite import search_nonfinite
from qtrace.graph.types import TracedModule
from qtrace.learning import Adam, UnsupportedError, try_torch
from qtrace.preparation.model import QuantizedModel
from qtrace.qat import param_groups


class Learner:
    """Adam for all parameters of a prepared graph, on numpy arrays that a checkpoint can store.

    Args:
        prepared: the prepared graph.
        settings: learning rates, clipping and the average of the weights.
        adam: the class that computes the steps of a parameter.
        writes: whether each step writes the weights into the modules; else `write` does.
    """

    def __init__(
        self,
        prepared: QuantizedModel,
        settings: FinetuneSettings,
        adam: type[Adam] = Adam,
        *,
        writes: bool = True,
    ) -> None:
        self.writes, self._behind = writes, set[int]()
        self.settings, self.adam, model = settings, adam, prepared.module
        ranges = {id(p) for p in scales(model)}
        units = Units(prepared)
        names = {id(p): name for name, p in model.named_parameters()}
        self.parameters: list[Parameter] = []
        self.names: list[str] = []
        self.steppers: list[Adam] = []
        self.units: list[np.ndarray] = []
        for group in param_groups(model, settings.lr, settings.rate_of_ranges):
            for parameter in group["params"]:
                value = parameter.numpy().copy()
                if not value.size or value.dtype.kind != "f":  # an unused input of an imported op
                    continue
                unit = units.of(parameter)
                self.parameters.append(parameter)
                self.names.append(names.get(id(parameter), "a parameter"))
                self.units.append(unit)
                self.steppers.append(adam(value, (group["lr"] * unit).astype(np.float32)))
        self.ranges = len(ranges)
        self.averages = [s.value.copy() for s in self.steppers] if settings.weight_average else []
        self._is_range = [id(p) in ranges for p in self.parameters]

    def step(
        self, gradients: Sequence[np.ndarray | None], loss: float, factor: float, fixed: set[int]
    ) -> None:
        """Moves the parameters by one step of Adam.

        Args:
            gradients: the gradient of each parameter; None for a parameter without one.
            loss: the loss, which sets the norm at which gradients are clipped.
            factor: the factor of the learning rates.
            fixed: ids of frozen parameters, which do not move.

        Raises:
            TrainingError: when a parameter or its gradient is not finite; it names the first one.
        """
        squares = []
        for name, gradient, unit in zip(self.names, gradients, self.units, strict=True):
            squares.append(0.0 if gradient is None else self.adam.square_sum(gradient, unit))
            if not np.isfinite(squares[-1]):
                raise TrainingError(f"the gradient of {name} is NaN or infinite")
        norm = float(np.sqrt(sum(squares)))
        clip = min(1.0, self.settings.clip * loss / norm) if norm else 1.0
        for index, (parameter, stepper) in enumerate(zip(self.parameters, self.steppers, strict=True)):
            gradient = gradients[index]
            if gradient is None or id(parameter) in fixed:
                continue
            stepper.step(gradient, factor, clip)
            if not stepper.is_finite():  # a clip may hide it from the loss
                raise TrainingError(f"{self.names[index]} is NaN or infinite")
            if self.writes or self._is_range[index]:
                parameter._reset(Parameter(stepper.value))
            else:
                self._behind.add(index)
            if self.averages and not self._is_range[index]:
                share = np.float32(1.0 - self.settings.weight_average)
                self.averages[index] += share * (stepper.value - self.averages[index])

    @property
    def values(self) -> dict[int, np.ndarray]:
        """Id of a parameter -> its value, for those whose module has an older one."""
        return {id(self.parameters[index]): self.steppers[index].value for index in self._behind}

    def write(self) -> None:
        """Writes the values that the modules do not have yet."""
        for index in self._behind:
            self.parameters[index]._reset(Parameter(self.steppers[index].value))
        self._behind.clear()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Gives the modules all values within the block: averages, if weights are averaged."""
        self.write()
        averaged = [i for i in range(len(self.averages)) if not self._is_range[i]]
        for index in averaged:
            self.parameters[index]._reset(Parameter(self.averages[index]))
        try:
            yield
        finally:
            for index in averaged:
                self.parameters[index]._reset(Parameter(self.steppers[index].value))

    def rewind(self) -> None:
        """Restarts Adam and the averages at the values that the modules have."""
        self._behind.clear()
        pairs = zip(self.parameters, self.steppers, strict=True)
        self.steppers = [self.adam(parameter.numpy().copy(), stepper.lr) for parameter, stepper in pairs]
        self.averages = [s.value.copy() for s in self.steppers] if self.averages else []

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the state of Adam and the averages as arrays; the parameters belong to the model."""
        state: dict[str, np.ndarray] = {}
        for index, stepper in enumerate(self.steppers):
            state[f"{index}/value"] = stepper.value
            state[f"{index}/first"], state[f"{index}/second"] = stepper.first, stepper.second
            state[f"{index}/steps"] = np.array(stepper.steps)
        state.update({f"{index}/average": a for index, a in enumerate(self.averages)})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        for index, stepper in enumerate(self.steppers):
            stepper.value = np.array(state[f"{index}/value"])
            stepper.first = np.array(state[f"{index}/first"])
            stepper.second = np.array(state[f"{index}/second"])
            stepper.steps = int(state[f"{index}/steps"])
        self.averages = [np.array(state[f"{index}/average"]) for index in range(len(self.averages))]


def choose_twins(
    requested: str,
    student: TracedModule,
    teacher: TracedModule,
    samples: Samples,
    blocks: Sequence[str],
    jit: bool,
) -> tuple[Twins, str]:
    """Builds both graphs in the chosen engine, and gives the reason of the choice as a clause.

    ``auto`` takes torch if it is installed, every op of both graphs has a form in torch, and torch and
    MegEngine agree on the float graph of some samples.

    Args:
        requested: ``auto``, ``megengine`` or ``torch``.
        student: the prepared graph, in eval mode.
        teacher: the float graph.
        samples: the samples to learn from.
        blocks: names of the nodes whose values are compared.
        jit: whether the steps of MegEngine run under ``jit.trace``.

    Raises:
        TrainingError: when torch is requested and does not apply.
    """
    megengine = MegEngineTwins(student, teacher, samples.form, blocks, jit)
    if requested == "megengine":
        return megengine, "as requested"

    def build() -> Twins:
        from qtrace.extras.finetune.torch_twins import TorchTwins

        twins = TorchTwins(student, teacher, samples.form, blocks)
        _compare(twins, megengine, _first_samples(samples))
        return twins

    torch, reason = try_torch(build)
    if torch is not None:
        return torch, "as requested" if requested == "torch" else "torch has a form of every op"
    if requested == "torch":
        raise TrainingError(
            f"finetune: the engine torch does not apply: {reason}; use the engine megengine, or auto."
        )
    return megengine, f"torch does not apply: {reason}"


def _first_samples(samples: Samples) -> Batch:
    """Returns a batch with as few samples as the data can be divided into."""
    batch = samples.batches[0]
    if not samples.joined:
        return batch
    return Batch(batch.number, [leaf[:COMPARED_SAMPLES] for leaf in batch.leaves])


def _compare(torch: Twins, megengine: Twins, batch: Batch) -> None:
    """Refuses torch if a node of the float graph has other values than in MegEngine."""
    values, fast_values = (
        {f"output {index}": value for index, value in enumerate(outputs)} | blocks
        for outputs, blocks in (twins.run_teacher(batch) for twins in (megengine, torch))
    )
    for name, value in values.items():
        if not _agree(value, fast_values.get(name)):
            raise UnsupportedError(f"its float values differ from MegEngine's at {name}")


def _agree(value: np.ndarray, fast: np.ndarray | None) -> bool:
    if fast is None or fast.shape != value.shape:
        return False
    if value.dtype.kind != "f" or not value.size:
        return True  # integers and selections may turn on the last bit of a float
    bound = NETWORK_RTOL * float(np.max(np.abs(value), initial=0.0))
    return bool(np.all((np.abs(fast - value) <= bound) | ~np.isfinite(value)))


_MAX_EVALUATIONS = 20
_MIN_EVALUATION_INTERVAL = 5  # steps: an evaluation may take as long as several


class Pace:
    """The clock of a run, which starts when the object is made.

    Args:
        max_minutes: the most minutes that the run may take; None for no limit.

    Attributes:
        step_seconds: how long the latest step took; 0 before the first.
        evaluation_seconds: how long the latest evaluation took; 0 before the first.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self.max_minutes = max_minutes
        self.step_seconds = self.evaluation_seconds = 0.0
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.monotonic() - self._start

    def has(self, seconds: float) -> bool:
        """Returns whether work of ``seconds`` fits into the rest of the time."""
        return self.max_minutes is None or self.seconds + seconds <= 60 * self.max_minutes

    def has_step(self, evaluations: int) -> bool:
        """Returns whether a step, ``evaluations`` and the evaluation for the report fit into the time."""
        return self.has(self.step_seconds + (evaluations + 1) * self.evaluation_seconds)


class RunSchedule:
    """When a run evaluates, and how many steps fit into its time.

    Args:
        settings: the size of a batch, and the steps between evaluations.
        unseen: the samples to evaluate on.
        pace: the clock of the run.
    """

    def __init__(self, settings: FinetuneSettings, unseen: Samples, pace: Pace) -> None:
        self.pace, self._evaluate_every = pace, settings.evaluate_every
        self._batches = math.ceil(unseen.count / (settings.batch_size if unseen.joined else 1))

    def interval(self, total: int) -> int:
        """The steps between two evaluations in a run of ``total``, so that these take little of its time."""
        if self._evaluate_every is not None:
            return self._evaluate_every
        return max(math.ceil(total / _MAX_EVALUATIONS), self._batches, _MIN_EVALUATION_INTERVAL)

    def evaluations(self, steps: int, total: int | None) -> int:
        """How often ``steps`` of ``total`` (None: there are no others) are evaluated, report included."""
        return math.ceil(steps / self.interval(total or steps)) + 1

    def has_time(self, steps: int, total: int | None) -> bool:
        """Whether ``steps`` and their evaluations fit into the time, as far as both were timed."""
        evaluations = self.evaluations(steps, total)
        return self.pace.has(steps * self.pace.step_seconds + evaluations * self.pace.evaluation_seconds)

    def fit(self, steps: int, total: int | None) -> int:
        """Returns how many of ``steps`` fit into the time; at least one."""
        return next((n for n in range(steps, 1, -1) if self.has_time(n, total)), 1)

    def describe(self, steps: int, total: int | None) -> str:
        """Estimates the time of ``steps`` in a clause."""
        pace, evaluations = self.pace, self.evaluations(steps, total)
        seconds = steps * pace.step_seconds + evaluations * pace.evaluation_seconds
        return (
            f"about {_format_seconds(seconds)}: {steps} steps of {pace.step_seconds:.2g} s and {evaluations} "
            f"evaluations of {pace.evaluation_seconds:.2g} s"
        )


def _format_seconds(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


_DIVERGED = 3.0  # held-back error or mean loss, relative to the start
_LOSS_WINDOW = 10  # steps over which the loss is averaged
_RATE_FACTOR = 0.25  # of each retreat
_MAX_RETREATS = 4


@dataclass(frozen=True)
class Retreat:
    """A return to the best state.

    Attributes:
        step: number of steps after which the run diverged.
        back_to: number of steps after which the best state was reached.
        factor: the factor of the learning rates from then on.
        reason: the error or loss that showed the divergence, as a clause.
    """

    step: int
    back_to: int
    factor: float
    reason: str

    def __str__(self) -> str:
        """Formats the retreat as a sentence without a period."""
        target = f"the state after step {self.back_to}" if self.back_to else "the start"
        return f"{self.reason}: back to {target}, learning rates times {self.factor:g}"


class Retreats:
    """Decides from the loss and the held-back error when a run returns to its best state.

    Args:
        error: the held-back error at the start.
        losses: the losses of several batches at the start.
    """

    def __init__(self, error: float, losses: Sequence[float]) -> None:
        self.all: list[Retreat] = []
        self._error, self._loss = error, float(np.mean(losses))

    @property
    def factor(self) -> float:
        """The factor of the learning rates."""
        return self.all[-1].factor if self.all else 1.0

    @property
    def exhausted(self) -> bool:
        """Whether the learning rates were lowered as often as is allowed."""
        return len(self.all) >= _MAX_RETREATS

    def reason(self, completed: int, losses: Sequence[float], error: float | None) -> str:
        """Returns why the run diverges; "" if it does not.

        Args:
            completed: number of completed steps.
            losses: the loss of each completed step.
            error: the held-back error after these steps; None if it was not evaluated.
        """
        if error is not None and error > _DIVERGED * self._error:
            return (
                f"after step {completed} the held-back error is {error:.3g}, at the start {self._error:.3g}"
            )
        since = self.all[-1].step if self.all else 0
        if completed - since < _LOSS_WINDOW:
            return ""
        # The first loss counts too: kept BatchNorms use the statistics of the batch in a step.
        before, now = max(self._loss, losses[0]), float(np.mean(losses[completed - _LOSS_WINDOW : completed]))
        if now <= _DIVERGED * before:
            return ""
        mean = f"the mean loss of {_LOSS_WINDOW} steps"
        return f"up to step {completed} {mean} is {now:.3g}, at the start {before:.3g}"

    def retreat(self, step: int, back_to: int, reason: str) -> Retreat:
        """Records a return to the best state and lowers the learning rates."""
        self.all.append(Retreat(step, back_to, self.factor * _RATE_FACTOR, reason))
        return self.all[-1]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns all retreats as arrays."""
        rows = [[r.step, r.back_to, r.factor] for r in self.all]
        reasons = np.frombuffer("\n".join(r.reason for r in self.all).encode(), np.uint8)
        return {"rows": np.array(rows, np.float64).reshape(-1, 3), "reasons": reasons}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        reasons = np.asarray(state["reasons"]).tobytes().decode().split("\n")
        rows = zip(state["rows"], reasons, strict=False)
        self.all = [Retreat(int(step), int(to), float(f), reason) for (step, to, f), reason in rows]


class Trainer:
    """Takes the steps of a run; see `qtrace.learning.Descent`.

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


_LOG = logging.getLogger("qtrace")


class Monitor:
    """Evaluates a run on held-back data.

    Args:
        trainer: the run, before its first step.
        unseen: the samples to evaluate the outputs on.
        schedule: when evaluations are due.
        batches: the batches whose loss at the start tells a divergence.

    Attributes:
        start: the error and the outputs before the first step.
        stopped: why the run ended before its last step; "" if it did not.
    """

    def __init__(
        self, trainer: Trainer, unseen: Samples, schedule: RunSchedule, batches: Sequence[Batch]
    ) -> None:
        self._trainer, self._unseen, self._schedule = trainer, unseen, schedule
        self.start = self.evaluate()
        self.best = BestState(trainer.model, self.start.error)
        losses = [trainer.twins.loss(batch, trainer.compared, trainer.settings) for batch in batches]
        self.retreats = Retreats(self.start.error, losses)
        self.stopped = ""

    def evaluate(self) -> EvaluationFigures:
        """Compares the outputs of both graphs on the held-back data."""
        trainer, pace = self._trainer, self._schedule.pace
        start, size = pace.seconds, 4 * trainer.settings.batch_size
        figures = evaluate(trainer.model, trainer.twins, trainer.compared, self._unseen, size)
        pace.evaluation_seconds = pace.seconds - start
        return figures

    def judge(self, completed: int) -> None:
        """Evaluates when it is due, keeps the best state, and returns to it if the run diverges."""
        trainer, pace = self._trainer, self._schedule.pace
        steps = trainer.settings.steps
        due = completed % self._schedule.interval(steps) == 0
        error = None
        if due or completed == steps or not pace.has_step(1 + due):
            with trainer.watch.settled(), trainer.learner.settled():
                error = self.evaluate().error
                self.best.consider(completed, error)
        if completed == steps:
            return
        if not pace.has_step(1):
            self.stopped = f"max_minutes ({pace.max_minutes:g}) leaves no time for another step"
            return
        reason = self.retreats.reason(completed, [row[0] for row in trainer.curves], error)
        if not reason:
            return
        if self.retreats.exhausted:
            self.stopped = f"{reason}, at the smallest learning rate that is tried"
            return
        retreat = self.retreats.retreat(completed, self.best.best.step, reason)
        _LOG.warning(f"finetune: {retreat}")
        self.best.restore()
        trainer.rewind(retreat)
