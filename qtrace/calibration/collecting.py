"""The loop over the batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from qtrace.calibration.base import Watched, watched
from qtrace.calibration.choice import Chosen, choose
from qtrace.calibration.nonfinite import refuse_nonfinite_output
from qtrace.calibration.observing import Observing
from qtrace.calibration.statistics import Statistics, fresh, no_statistics
from qtrace.data.batches import as_arguments, evaluating
from qtrace.errors import CalibrationError
from qtrace.graph.source_lines import name_with_line
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.observers.base import Observer
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase

__all__ = ["Collected", "Options", "collect", "observe_parameters"]

Numbered = Iterable[tuple[int, Any]]


@dataclass(frozen=True)
class Options:
    """How to collect.

    Attributes:
        engine: one of `qtrace.calibration.choice.ENGINES`, or what was chosen before.
        batches: how many batches there will be; None when that is not known.
        threads: how many threads compute; None for all cores.
        progress: whether to show a progress bar on stderr.
    """

    engine: str | Chosen = "auto"
    batches: int | None = None
    threads: int | None = None
    progress: bool = False


@dataclass(frozen=True)
class Collected:
    """What was collected, and by what.

    Attributes:
        statistics: of the activations.
        chosen: the engine, and why.
    """

    statistics: Statistics
    chosen: Chosen


def collect(
    prepared: TracedModule | QuantizedModel,
    batches: Numbered,
    options: Options | None = None,
    after: Callable[[Collected], None] = lambda collected: None,
    start: Statistics | None = None,
) -> Collected:
    """Runs batches through a prepared graph in float and observes its activations.

    The module is left as it was. Its parameters are not observed: see `observe_parameters`.

    Args:
        prepared: a module made by ``qtrace.prepare``, or its view.
        batches: pairs of a batch's number and the batch, as `qtrace.calibrate` takes it.
        options: how to collect.
        after: called after each batch with all that was collected so far.
        start: statistics to add to; None for none.

    Raises:
        CalibrationError: when a batch does not fit the model, a value is not finite, or this is not the main
            thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise CalibrationError(
            "calibrate was called on a thread of its own, where MegEngine fails: call it on the main thread."
        )
    options = options or Options()
    model = QuantizedModel.of(prepared, "prepared")
    module, seen = model.module, watched(model)
    start = start or no_statistics(model)
    with in_phase(module, "float"), evaluating(module):
        engine = choose(model, seen, options.engine, options.batches, options.threads)
        sites = {name: fq.site for name, fq in model.fake_quants.items()}
        silent = not options.progress
        bar = tqdm(
            batches,
            total=options.batches,
            initial=len(start.batches),
            desc="calibrate",
            unit="batch",
            disable=silent,
        )
        observing = Observing(start, seen, sites, _places(module, seen))
        with bar:
            for index, batch in bar:
                arguments = as_arguments(batch, module, index)
                observing.begin(index, batch)
                engine.run(arguments, index, observing.observe)
                for name in observing.nonfinite:
                    refuse_nonfinite_output(module, arguments, index, model.nodes[name])
                observing.commit()
                after(Collected(observing.statistics, engine.chosen))
        return Collected(observing.statistics, engine.chosen)


def _places(prepared: TracedModule, seen: Watched) -> dict[str, str]:
    """Watched node -> what computes it, and the line of it."""
    nodes = ((node, e) for e in exprs(prepared) for node in e.outputs)
    return {node.name: name_with_line(e, op_label(e)) for node, e in nodes if node.name in seen.nodes}


def observe_parameters(prepared: QuantizedModel, statistics: Statistics) -> Statistics:
    """The statistics and what is the same in every batch: the values of parameters.

    Raises:
        CalibrationError: when a parameter is not finite, naming it.
    """
    sites = {name: fq.site for name, fq in prepared.fake_quants.items()}
    observed: dict[str, list[Observer]] = {}
    for group, value in watched(prepared).parameters:
        observer = fresh(statistics.observers[group])
        observer.observe(value, site=sites[group])
        observed.setdefault(group, []).append(observer)
    return statistics.plus(observed)
