"""finetune: a quantized graph learns from its float twin, on data without labels.

The loss compares outputs and block outputs with the float graph's. Each error counts relative to the
power of its reference, so that the sum means the same for any network. An output of logits adds the
divergence of its class probabilities (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network").

Weights, biases and norms learn; so do ranges, unless the fake quant is ``fixed``. Ranges and the statistics
of kept BatchNorms are averaged, and frozen once they hardly move. Outputs are evaluated on held-back data at
the start and at intervals. If the loss or the held-back error grows to three times its start, the run returns
to the best state and goes on with smaller rates.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qtrace.calibration.algorithms import restoring
from qtrace.data.batches import evaluating
from qtrace.display import Displayed, format_table, progress_bar
from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Data, FinetuneSettings, split_data
from qtrace.extras.finetune.evaluation import Evaluation, EvaluationFigures, choose_compared
from qtrace.extras.finetune.training import Monitor, Pace, Retreat, RunSchedule, Trainer, choose_twins
from qtrace.extras.finetune.twins import PARTS, Frozen, block_outputs
from qtrace.graph.kernels import synchronous
from qtrace.graph.opaque import opaque_calls, say_stopped_gradients
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.inspection.twin import changed_weights, float_twin
from qtrace.learning import MIN_TRACED_STEPS, descend
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import QuantizedModel, graph_hash
from qtrace.preparation.phases import in_phase, say_wrong_gradients
from qtrace.process import on_engine_thread
from qtrace.storage import checkpoints


@dataclass(frozen=True)
class OutputChange:
    """An output of the graph, compared with the float graph's on the evaluation data.

    Attributes:
        index: the number of the output.
        shape: the shape of one sample of the output.
        before: the SQNR before the fine-tuning, in dB, of the worst column group.
        after: the SQNR after the fine-tuning, in dB, of the worst column group.
        agreement_before: share of samples whose largest value has the same index in both graphs, before the
            fine-tuning; None unless the output has the shape (N, C).
        agreement_after: the same share after the fine-tuning.
    """

    index: int
    shape: tuple[int, ...]
    before: float
    after: float
    agreement_before: float | None = None
    agreement_after: float | None = None


@dataclass(frozen=True, repr=False)
class FineTuned(Displayed):
    """The result of ``qtrace.finetune``; the module itself was changed in place.

    Attributes:
        settings: the settings of the run, with the number of steps that it planned.
        samples: number of samples that were learned from; of batches, if these cannot be split into samples.
        measured: number of samples, or batches, that the outputs were evaluated on.
        measured_on: where these come from: ``held back``, ``given``, or ``learned from`` if there was too
            little data.
        left_out: number of batches that did not fit into ``settings.memory``.
        parameters: number of parameters that learned, ranges included.
        ranges: number of ranges that learned; 0 with the fake quant ``fixed``.
        outputs: the compared outputs, before and after the run.
        evaluations: the held-back error at the start and at each evaluation.
        best_step: number of steps after which the module's state was reached; 0 if no step was better than
            the start and the module did not change.
        retreats: the returns to the best state after the run diverged.
        stopped: why the run ended before its last step; "" if it did not.
        seconds: how long the call took, since the last resumption.
        blocks: the nodes that were compared besides the outputs.
        left: a line with the reason for every output that was not compared.
        loss: the loss of each step.
        parts: part of the loss -> its value in each step.
        frozen: the ranges and statistics that were frozen up to ``best_step``.
        moving: number of ranges and statistics that were not frozen then; they took their averages.
        resumed: the step at which an interrupted run went on; None if it was not interrupted.
        engine: the engine of the steps, ``megengine`` or ``torch``.
        engine_reason: why this engine was chosen, as a clause.
        jit: whether steps ran under ``jit.trace``.
    """

    settings: FinetuneSettings
    samples: int
    measured: int
    measured_on: str
    left_out: int
    parameters: int
    ranges: int
    outputs: tuple[OutputChange, ...]
    evaluations: tuple[Evaluation, ...]
    best_step: int
    retreats: tuple[Retreat, ...]
    stopped: str
    seconds: float
    blocks: tuple[str, ...]
    left: tuple[str, ...]
    loss: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]
    frozen: tuple[Frozen, ...]
    moving: int
    resumed: int | None
    engine: str
    engine_reason: str
    jit: bool

    @property
    def improved(self) -> bool:
        """Whether an output improved and none became worse."""
        gains = [o.after - o.before for o in self.outputs]
        return bool(gains) and min(gains) >= 0 and max(gains) > 0

    @property
    def error_before(self) -> float:
        """The held-back error at the start."""
        return self.evaluations[0].error

    @property
    def error_after(self) -> float:
        """The held-back error of the best state, which the module has: the smallest of all evaluations."""
        return min(e.error for e in self.evaluations)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data; numbers that are not finite become None."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data.update(
            settings=dataclasses.asdict(self.settings),
            outputs=[_finite(dataclasses.asdict(o)) for o in self.outputs],
            evaluations=[_finite(dataclasses.asdict(e)) for e in self.evaluations],
            retreats=[dataclasses.asdict(r) for r in self.retreats],
            frozen=[dataclasses.asdict(f) for f in self.frozen],
            error_before=self.error_before,
            error_after=self.error_after,
            improved=self.improved,
        )
        return data

    def table(self) -> str:
        """Formats the report for a terminal."""
        count = f"{self.parameters - self.ranges} parameters and {self.ranges} of ranges"
        lines = [*self._verdict(), f"learned: {count}, from {self.samples} samples in {len(self.loss)} steps"]
        lines.append(f"engine: {self.engine}, {self.engine_reason}")
        if self.ranges == 0:
            lines.append("ranges stay as calibrated: prepare with fakequant: lsq for ranges that learn")
        if self.left_out:
            lines.append(f"{self.left_out} batches were not used: they did not fit into settings.memory")
        lines.append("compared besides the outputs: " + (", ".join(self.blocks) or "nothing"))
        lines += [f"left: {line}" for line in self.left]
        lines += ["", format_table(("steps", "loss", *self.parts), self._curve()), ""]
        rows = [_row(o) for o in self.outputs]
        headers = ("output", "SQNR before", "after", "same class before", "after")
        lines.append(format_table(headers, rows))
        lines.append(f"on {self.measured} samples, {self.measured_on}")
        for frozen in self.frozen:
            lines.append(
                f"frozen after step {frozen.step}: {frozen.sort} {frozen.name}, {frozen.drift:.1e} a step"
            )
        if self.moving:
            lines.append(f"{self.moving} ranges or statistics moved up to the end and took their averages")
        return "\n".join(lines)

    def _verdict(self) -> list[str]:
        """Says how the held-back error changed, where the run retreated, and why it stopped early."""
        evaluated = f"{len(self.evaluations) - 1} evaluations"
        if self.best_step:
            change = f"{self.error_before:.4g} -> {self.error_after:.4g}"
            verdict = f"held-back error {change}: the state after step {self.best_step}, best of {evaluated}"
        else:
            best = min((e.error for e in self.evaluations[1:]), default=self.error_before)
            verdict = (
                "NO STEP WAS BETTER than the start: the model is as it was. "
                f"Held-back error {self.error_before:.4g}, the best of {evaluated} {best:.4g}"
            )
        stopped = [f"ended after step {len(self.loss)}: {self.stopped}"] if self.stopped else []
        return [verdict, *map(str, self.retreats), *stopped]

    def _curve(self) -> list[Sequence[str]]:
        """Returns the mean losses of up to ten parts of the run."""
        rows = []
        for part in np.array_split(np.arange(len(self.loss)), min(10, len(self.loss))):
            values = [np.mean([curve[i] for i in part]) for curve in (self.loss, *self.parts.values())]
            rows.append((f"{part[0] + 1}..{part[-1] + 1}", *(f"{v:.4g}" for v in values)))
        return list(rows)


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


def _row(output: OutputChange) -> tuple[str, ...]:
    shares = (output.agreement_before, output.agreement_after)
    agreement = [f"{100 * share:.1f} %" if share is not None else "" for share in shares]
    return str(output.index), f"{output.before:.2f} dB", f"{output.after:.2f} dB", *agreement


def compare_outputs(before: EvaluationFigures, after: EvaluationFigures) -> tuple[OutputChange, ...]:
    """Compares the outputs at two evaluations."""
    return tuple(
        OutputChange(index, shape, sqnr_db, after.outputs[index][1], agreement, after.outputs[index][2])
        for index, (shape, sqnr_db, agreement) in before.outputs.items()
    )


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
        if limit is None and steps < self.schedule.interval(steps):
            return  # it takes hardly longer than timing a step
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


@check_arguments
@on_engine_thread
def finetune(
    prepared: TracedModule,
    batches: Iterable[Any],
    settings: FinetuneSettings | None = None,
    *,
    evaluation: Iterable[Any] | None = None,
    teacher: TracedModule | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> FineTuned:
    """Trains a calibrated graph to give what it gives in float; no labels are needed.

    Afterwards the module has the state with the smallest held-back error. If no step improved that error,
    it is the state before the call, bit for bit; the report says so. Phases and training flags do not change.
    On an error or an interruption the module is left as it was. The logger ``qtrace`` gets an estimate of the
    time before the first step (INFO) and warnings (WARNING).

    Args:
        prepared: a module made by ``qtrace.prepare``, calibrated; it is trained in place.
        batches: inputs as for ``qtrace.calibrate``; samples of several batches are mixed if the first axis of
            each input counts samples.
        settings: steps, rates and the terms of the loss; None for the defaults.
        evaluation: inputs on which the outputs are evaluated; None to hold back a part of ``batches``.
        teacher: the traced float network; None for the graph itself in float. It is needed if an algorithm of
            ``ptq`` has changed the weights.
        checkpoint: a file for the state, written every ``settings.checkpoint_every`` steps and removed at the
            end; None for no checkpoint.
        resume: whether to go on from ``checkpoint`` if it exists, which either engine may have written. With
            one engine and on one machine, the result equals an uninterrupted run, bit for bit.
        progress: whether to show a progress bar on stderr.

    Returns:
        The loss of each step, the held-back errors, the outputs before and after, and what was frozen.

    Raises:
        GraphError: when the module is not prepared.
        CalibrationError: when the module is not calibrated, there are no batches, or a batch does not fit the
            model.
        ConfigError: when the settings name no node of the graph, no parameter can learn, or the model names
            user code in a module that is not imported.
        TrainingError: when the loss is not finite, the teacher is missing or another network, the checkpoint
            belongs to another run. Also when MegEngine's gradient of a layer is wrong, or the engine torch is
            requested and cannot run the graph.
    """
    settings = settings or FinetuneSettings()
    pace, model = Pace(settings.max_minutes), QuantizedModel(prepared, "prepared")
    if sentence := say_wrong_gradients(prepared):
        raise TrainingError(sentence)
    file = _checkpoint_file(model, checkpoint, resume)
    original = _teacher(model, teacher)
    known = {node.name for expr in exprs(original) for node in expr.outputs}
    blocks = block_outputs(model, settings.blocks, settings.most_blocks, known)
    data = split_data(prepared, batches, evaluation, settings)
    with restoring(prepared), evaluating(prepared), in_phase(prepared, "train"), synchronous():
        run = TuningRun(model, original, data, settings, blocks, pace, file)
        run.learn(resume, progress)
        result = run.result()
    if file is not None:
        file.unlink(missing_ok=True)
    return result


def _checkpoint_file(prepared: QuantizedModel, checkpoint: str | Path | None, resume: bool) -> Path | None:
    """Returns the file of the checkpoint; refuses a model without ranges and the loss of another run."""
    for fake_quant in prepared.fake_quants.values():
        fake_quant.qparams()  # raises if it is not calibrated
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists() and not resume:
        raise TrainingError(f"the checkpoint {file} exists: go on with resume=True, or remove it.")
    return file


def _teacher(prepared: QuantizedModel, network: TracedModule | None) -> TracedModule:
    """Builds the float twin of ``prepared``, from the float ``network`` if there is one."""
    changed = changed_weights(prepared)
    if network is None and changed:
        raise TrainingError(
            f"{', '.join(changed)} changed the weights, so that the graph in float is no longer the "
            "float network: give that one, too (teacher=, or --teacher)."
        )
    return float_twin(prepared, network)
