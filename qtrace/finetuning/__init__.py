"""finetune: a quantized graph learns from its float twin, on data without labels.

Outputs, and the outputs of blocks, are compared with those of the float graph; the error of each counts
relative to its own power, so that the sum means the same for any network. Where an output is a row of
logits, the divergence of the class probabilities is added (Hinton et al. 2015, "Distilling the Knowledge in
a Neural Network").

Weights, biases and norms learn, and ranges where the fake quant has some that learn (all but ``fixed``).
Ranges, and the statistics of BatchNorms that were kept, are averaged and stay as they are once they hardly
move. The outputs are evaluated on held-back data at the start and at intervals. If the loss or the held-back
error grows to three times its start, the run returns to the best state and goes on with smaller rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qtrace.calibration.algorithms import restoring
from qtrace.data.batches import evaluating
from qtrace.errors import TrainingError
from qtrace.finetuning._data import split_data
from qtrace.finetuning._evaluating import Evaluation
from qtrace.finetuning._places import block_outputs
from qtrace.finetuning._retreating import Retreat
from qtrace.finetuning._running import Run
from qtrace.finetuning._watching import Frozen
from qtrace.finetuning.report import FineTuned, Output
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

    In the end the module has the state with the smallest held-back error. That is the start, bit for bit, if
    no step was better; the report says so. Phases and training flags are as before in the end; on an error or
    an interruption the module is left as it was. The logger ``qtrace`` gets an estimate of the time before
    the first step (INFO), and what a user should know besides (WARNING).

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
        Loss, held-back error, outputs before and after, and what was frozen when.

    Raises:
        GraphError: when the module is not prepared.
        CalibrationError: when it is not calibrated, there are no batches, or one does not fit the model.
        ConfigError: when the settings name no node of the graph, nothing can learn, or the model names code
            of its own in a module that nobody has imported.
        TrainingError: when the loss is not finite; when the teacher is missing or another network, or the
            checkpoint that of another run.
    """
    settings, model = settings or Settings(), QuantizedModel(prepared, "prepared")
    file = _checkpoint_file(model, checkpoint, resume)
    original = _teacher(model, teacher)
    blocks = block_outputs(model, settings.blocks, settings.most_blocks)
    _check_twin(original, blocks)
    data = split_data(prepared, batches, evaluation, settings)
    with restoring(prepared), evaluating(prepared), in_phase(prepared, "train"), queueless():
        run = Run(model, original, data, settings, blocks)
        run.learn(file, resume, progress)
        result = run.result()
    if file is not None:
        file.unlink(missing_ok=True)
    return result


def _checkpoint_file(prepared: QuantizedModel, checkpoint: str | Path | None, resume: bool) -> Path | None:
    """The file of the checkpoint, once it is known that the model is calibrated and no other run is lost."""
    for fake_quant in prepared.fake_quants.values():
        fake_quant.qparams()  # raises where it is not calibrated
    file = None if checkpoint is None else Path(checkpoint)
    if file is not None and file.exists() and not resume:
        raise TrainingError(f"the checkpoint {file} exists: go on with resume=True, or remove it.")
    return file


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
