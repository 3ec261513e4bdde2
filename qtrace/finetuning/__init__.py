"""finetune: a quantized graph learns from its float twin, on data without labels.

Outputs, and the outputs of blocks, are compared with those of the float graph; the error of each counts
relative to its own power, so that the sum means the same for any network. Where an output is a row of
logits, the divergence of the class probabilities is added (Hinton et al. 2015, "Distilling the Knowledge in
a Neural Network").
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qtrace.calibration.algorithms import restoring
from qtrace.data.batches import evaluating, told
from qtrace.errors import TrainingError
from qtrace.finetuning._data import Samples, held_back, read, unpack
from qtrace.finetuning._evaluating import Evaluation
from qtrace.finetuning._places import block_outputs
from qtrace.finetuning._retreating import Retreat
from qtrace.finetuning._running import Run
from qtrace.finetuning._twins import PARTS
from qtrace.finetuning._watching import Frozen
from qtrace.finetuning.report import FineTuned, Output, outputs_of
from qtrace.finetuning.settings import Settings
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.inspection.twin import changed_weights, float_twin
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from qtrace.process.thread import on_engine_thread
from qtrace.ptq.learning.blockwise import queueless

__all__ = ["Evaluation", "FineTuned", "Frozen", "Output", "Retreat", "Settings", "finetune"]


@on_engine_thread
def finetune(
    prepared: TracedModule,
    batches: Iterable[Any],
    settings: Settings | None = None,
    *,
    evaluation: Iterable[Any] | None = None,
    teacher: TracedModule | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> FineTuned:
    """Trains a calibrated graph to give what it gives in float; no labels are needed.

    Weights, biases and norms learn, and ranges where the fake quant has some that learn (all but ``fixed``).
    Ranges, and the statistics of BatchNorms that were kept, are averaged and stay as they are once they
    hardly move.

    The outputs are evaluated on held-back data at the start and at intervals. In the end the module has the
    state with the smallest held-back error. That is the start, bit for bit, if no step was better; the report
    says so. If the loss or the held-back error grows to three times its start, the run returns to the best
    state and goes on with smaller rates.

    The logger ``qtrace`` gets an estimate of the time before the first step (INFO), and what a user should
    know besides (WARNING). Phases and training flags are as before in the end; on an error or an interruption
    the module is left as it was.

    Args:
        prepared: a module made by ``qtrace.prepare``, calibrated; it is trained in place.
        batches: inputs as for ``qtrace.calibrate``; where their first axis counts samples, they are mixed.
        settings: steps, rates, and what is compared; None for the defaults.
        evaluation: inputs on which the outputs are evaluated; None to hold back a part of ``batches``.
        teacher: the float network, as traced; None for the graph itself in float. Needed where an algorithm
            of ``ptq`` has changed its weights.
        checkpoint: a file for the state, written every ``settings.checkpoint_every`` steps and removed at the
            end; None for none.
        resume: whether to go on where ``checkpoint`` stopped, if it is there. On one machine, the result is
            that of an uninterrupted run, bit for bit.
        progress: whether to show a progress bar on stderr.

    Returns:
        Loss, held-back error, outputs before and after, and what was frozen when; with ``table()`` and
        ``to_dict()``.

    Raises:
        GraphError: when the module is not prepared.
        CalibrationError: when it is not calibrated, there are no batches, or one does not fit the model.
        ConfigError: when the settings name no node of the graph, nothing can learn, or the model names code
            of its own in a module that nobody has imported.
        TrainingError: when the loss is not finite, naming where that arises; when the teacher is missing or
            another network, or the checkpoint that of another run.
    """
    settings = settings or Settings()
    model = QuantizedModel(prepared, "prepared")
    for fake in model.fake_quants.values():
        fake.qparams()  # asks whether it is calibrated
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists() and not resume:
        raise TrainingError(f"the checkpoint {file} exists: go on with resume=True, or remove it.")
    original = _teacher(model, teacher)
    blocks = block_outputs(model, settings.blocks, settings.most_blocks)
    _check_twin(original, blocks)
    samples, unseen, measured_on = _data(prepared, batches, evaluation, settings)
    leaves = next(samples.in_order(settings.batch_size))
    args, kwargs = unpack(samples.form, leaves)
    with restoring(prepared), evaluating(prepared), in_phase(prepared, "train"):
        with told(prepared, (args, kwargs), 0):
            run = Run(model, original, samples, unseen, settings, blocks)
        with queueless():
            run.learn(file, resume, progress)
        after = run.evaluate() if run.best.best.step else run.start
    if file is not None:
        file.unlink(missing_ok=True)
    best = run.best.best.step
    frozen = tuple(f for f in run.watch.frozen if f.step <= best)
    curves = list(zip(*run.curves, strict=True))
    return FineTuned(
        settings=settings,
        samples=samples.count,
        measured=unseen.count,
        measured_on=measured_on,
        left_out=samples.left_out,
        parameters=len(run.learner.parameters),
        ranges=run.learner.ranges,
        outputs=outputs_of(run.start, after),
        evaluations=tuple(run.best.evaluations),
        best_step=best,
        retreats=tuple(run.retreats.all),
        stopped=run.stopped,
        seconds=run.pace.seconds,
        blocks=tuple(run.compared.blocks),
        left=run.compared.left,
        loss=curves[0],
        parts=dict(zip(PARTS, curves[1:], strict=True)),
        frozen=frozen,
        moving=len(run.watch.all) - len(frozen),
        resumed=run.resumed,
        jit=bool(run.jit),
    )


def _teacher(prepared: QuantizedModel, given: TracedModule | None) -> TracedModule:
    """A graph of its own that computes what the float network computes, with the nodes of ``prepared``."""
    changed = changed_weights(prepared)
    if given is None and changed:
        raise TrainingError(
            f"{', '.join(changed)} changed the weights, so that the graph in float is no longer the "
            "float network: give that one, too (teacher=, or --teacher)."
        )
    return float_twin(prepared, given)


def _check_twin(teacher: TracedModule, blocks: tuple[str, ...]) -> None:
    known = {node.name for expr in exprs(teacher) for node in expr.outputs}
    missing = [name for name in blocks if name not in known]
    if missing:
        raise TrainingError(
            f"the teacher has no node {missing[0]}: give the float network that was prepared, not another."
        )


def _data(
    prepared: TracedModule, batches: Iterable[Any], evaluation: Iterable[Any] | None, settings: Settings
) -> tuple[Samples, Samples, str]:
    """What is learned from, what is evaluated on, and how that was chosen."""
    samples = read(batches, prepared, settings.memory, "the data")
    if evaluation is not None:
        return samples, read(evaluation, prepared, settings.memory, "the evaluation data"), "given"
    learned, unseen = held_back(samples, settings.holdout, settings.seed)
    return (learned, learned, "learned from") if unseen is None else (learned, unseen, "held back")
