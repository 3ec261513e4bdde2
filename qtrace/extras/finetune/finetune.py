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

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qtrace.calibration.algorithms import restoring
from qtrace.data.batches import evaluating
from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import split_data
from qtrace.extras.finetune.report import FineTuned
from qtrace.extras.finetune.running import TuningRun
from qtrace.extras.finetune.settings import FinetuneSettings
from qtrace.extras.finetune.training import Pace
from qtrace.extras.finetune.twins import block_outputs
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.inspection.twin import changed_weights, float_twin
from qtrace.learning.engine import queueless
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase, say_wrong_gradients
from qtrace.process import on_engine_thread

__all__ = ["finetune"]


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
    with restoring(prepared), evaluating(prepared), in_phase(prepared, "train"), queueless():
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
