"""Sensitivity and mixed precision: which layers cost accuracy, and the fewest to raise.

`analyze`, which ``qtrace.sensitivity(...)`` calls, measures every layer by itself. `mixed_precision` finds
the layers to raise, proves the result on a graph that is really prepared and calibrated so, and gives it as a
recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from qtrace.display import progress_bar
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import describe_changed_weights, float_twin
from qtrace.plugins import make_callable
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import QuantizedModel, is_quantized
from qtrace.sensitivity.metrics import DetectionLoss, Level, Metric, choose
from qtrace.sensitivity.mixed import Budget, Goal, MixedPrecision, mixed_precision
from qtrace.sensitivity.ranking import Ranking, count_runs, rank
from qtrace.sensitivity.simulation import Simulation

__all__ = [
    "Budget",
    "DetectionLoss",
    "Goal",
    "Level",
    "MixedPrecision",
    "Ranking",
    "analyze",
    "mixed_precision",
]


@check_arguments
def analyze(
    prepared: TracedModule,
    batches: Iterable[Any],
    *,
    metric: str | Metric = "sqnr",
    own: Callable[[TracedModule], float] | None = None,
    groups: bool = False,
    float_model: TracedModule | None = None,
    engine: str = "auto",
    progress: bool = True,
) -> Ranking:
    """Measures what each layer costs by itself.

    Args:
        prepared: a calibrated module; it is left as it is.
        batches: inputs as for ``qtrace.calibrate``, best ones that were not used there.
        metric: ``sqnr`` (dB), ``agreement`` (percent), or a function of the outputs of the float and the
            quantized graph, such as a `DetectionLoss`; more is better.
        own: a function that gets the graph, runs it on its own data, and returns a number: more is better.
        groups: whether to measure each group of sites by itself, too.
        float_model: the network as traced, or prepared from it; None for the graph itself in float, which is
            another network where an algorithm of ``ptq`` has changed weights in ``calibrate``.
        engine: what runs the graph, as for ``qtrace.calibrate``; ``own`` always runs it in MegEngine.
        progress: whether to show a progress bar on stderr.

    Raises:
        CalibrationError: when the module is not calibrated, or there are no batches.
        ConfigError: for an unknown engine or metric, a metric that returns no finite number, or a
            `DetectionLoss` with outputs that the graph does not have.
    """
    name, compares, asks = choose(metric, own)
    model = QuantizedModel(prepared, "prepared")
    twin = None if float_model is None else float_twin(model, float_model)
    note = "" if twin is not None else describe_changed_weights(model, "give that, too (float_model=).")
    network = None if float_model is None or is_quantized(float_model) else float_model
    with progress_bar(desc="sensitivity", unit="measurement", disable=not progress) as bar:
        simulation = Simulation(model, batches, compares, asks, twin, network, engine=engine, ran=bar.update)
        bar.total = count_runs(simulation, groups)
        return replace(rank(simulation, name, groups), note=note)


make_callable(__name__, analyze)
