"""Runs a graph on some batches: at once by a fast engine where there is one, else by MegEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from qtrace.comparing.selections import SelectionTape, TapedRun
from qtrace.comparing.sums import Outputs
from qtrace.data.batches import as_arguments, evaluating, translate_errors
from qtrace.graph.deferred_runs import begin_run
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.stepping import SegmentEngine, finish_whole
from qtrace.graph.types import TracedModule


def outputs_of(model: TracedModule, batches: Iterable[Any], engine: SegmentEngine | None = None) -> Outputs:
    """Returns the outputs of a graph for each batch, in eval mode and in its present phases.

    Args:
        model: the graph; a flat one if there is an engine.
        batches: inputs as for ``qtrace.calibrate``.
        engine: computes the whole graph where it can, with the parameters and phases of this moment.

    Raises:
        CalibrationError: when a batch does not fit the graph.
    """
    batches = list(batches)
    with evaluating(model):
        if engine is not None:
            arguments = [as_arguments(batch, model, index) for index, batch in enumerate(batches)]
            if (outputs := finish_whole(model, arguments, engine)) is not None:
                return outputs
        return [read_outputs(Interpreter(model, waits=True), batch, i) for i, batch in enumerate(batches)]


def begin_outputs(
    model: TracedModule, batches: Iterable[Any], engine: SegmentEngine
) -> Callable[[], Outputs | None] | None:
    """Begins what `outputs_of` does with an engine: the graph may change before the outputs are computed.

    Args:
        model: a flat graph.
        batches: inputs as for ``qtrace.calibrate``.
        engine: computes the whole graph.

    Returns:
        A function that gives the outputs, to be called once, on any thread; or None. Either is None where the
        engine cannot compute all of the graph, or not all that is left at once.

    Raises:
        CalibrationError: when a batch does not fit the graph.
    """
    with evaluating(model):
        arguments = [as_arguments(batch, model, index) for index, batch in enumerate(batches)]
        return begin_run(model, arguments, engine)


def rows_of(
    model: TracedModule, batches: Iterable[Any], places: Sequence[Sequence[np.ndarray]] | None = None
) -> tuple[Outputs, list[SelectionTape]]:
    """Returns what `outputs_of` does, and the selections of each batch.

    Args:
        model: the graph.
        batches: inputs as for ``qtrace.calibrate``.
        places: for each batch the places to select; None for those by the graph's own values.

    Raises:
        CalibrationError: when a batch does not fit the graph.
    """
    outputs, tapes = [], []
    with evaluating(model):
        for index, batch in enumerate(batches):
            run = TapedRun(model, None if places is None else places[index])
            outputs.append(read_outputs(run, batch, index))
            tapes.append(run.tape)
    return outputs, tapes


def read_outputs(run: Interpreter, batch: Any, number: int) -> list[np.ndarray]:
    """Runs a graph, which is in eval mode, on one batch; returns its outputs.

    Args:
        run: what runs the graph.
        batch: inputs as for ``qtrace.calibrate``.
        number: the number of the batch, for messages.

    Raises:
        CalibrationError: when the batch does not fit the graph.
    """
    args, kwargs = as_arguments(batch, run.traced, number)
    with translate_errors(run.traced, (args, kwargs), number):
        return [tensor.numpy() for tensor in run.run_flat(*args, **kwargs)]
