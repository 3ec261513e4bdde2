"""The placement decided by measurement: labellings are exported, timed in turns, and their noise measured.

A cost table predicts the time of a labelling, and single roundings its noise; both are off now and then. A
few labellings between the fastest and float are therefore calibrated by plain ranges on a few samples and run
in the runtime. The predicted choice stays unless another one is better beyond what the measurement may be off
by. The algorithms of the config then run on the chosen labelling alone.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qtrace.benchmarking.fitting import ProcessorFit, fit_processor
from qtrace.benchmarking.runners import find_package
from qtrace.config import QConfig, backends
from qtrace.errors import QtraceError
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.saturation import SAFE_BITS
from qtrace.preparation.placement.frontier import price
from qtrace.preparation.prepare import FloatSource, SearchOutcome, prepare_placed, read_request
from qtrace.process.thread import on_engine_thread
from qtrace.quantizing.bench import Bench
from qtrace.quantizing.delivering import rounds_for_speed_by_default
from qtrace.quantizing.labellings import (
    choose_labelling,
    find_labellings,
    with_everything,
)
from qtrace.quantizing.placing import Placer, Searched, TimingPlan, integers_of, runtime_of
from qtrace.quantizing.reporting import Reporter
from qtrace.quantizing.weight_bits import with_fewer_bits

__all__ = ["fit_costs", "prepare_measured"]

# The backends whose runtimes the labellings are measured in, and those among them whose whole networks may be
# faster rounded everywhere than by the times of single kernels.
_MEASURED = ("onnxruntime", "openvino", "tflite", "ncnn")
_MEASURED_WHOLE = ("openvino", "tflite", "ncnn")


@on_engine_thread
def prepare_measured(
    traced: TracedModule,
    config: QConfig,
    samples: Iterable[Any],
    held_back: Callable[[], Sequence[Any]],
    measurement: TimingPlan | None,
    reporter: Reporter,
) -> TracedModule:
    """Prepares a network by the labelling that is best by measured time and noise.

    Args:
        traced: the float network.
        config: the config.
        samples: batches, as for `prepare`.
        held_back: reads the batches on which the noise is measured.
        measurement: how to measure; None for the predicted choice.
        reporter: takes the notes.

    Raises:
        MissingPackageError: when the host of the measurement lacks the runtime.
    """
    asked = read_request(traced, config, samples=samples)
    config, everything = _search_configs(asked, measurement)
    if measurement is not None:
        measurement.times.bind(traced, asked)
        try:
            remote = measurement.host is not None and measurement.host.runner
            if not measurement.times.fixed and not remote:  # kernels are timed on this machine
                measurement.times.fit = fit_costs(config)
        except (QtraceError, ImportError) as error:  # the runtime is not here
            reporter.note(f"placement: by predicted times, as none can be measured here: {error}")
            measurement = None
    if measurement is None:
        return prepare_placed(traced, asked, samples, asked, progress=reporter.progress)[0]
    start = time.process_time()
    source = FloatSource(traced, config, samples)
    placer = Placer(traced, samples, source, measurement, reporter, everything)
    first = placer.search(config, quiet=config is not asked)
    if first.outcome is None:
        return first.prepared if config is asked else placer.round_everything()
    times = measurement.times
    searches = {first.outcome.weight_bits: first}
    if _may_have_fewer_bits(measurement, config) and (fewer := with_fewer_bits(config)) is not None:
        searches[SAFE_BITS] = placer.search(fewer)
    if not times.fixed and (labellings := _labellings(config, searches, everything, config is not asked)):
        seconds = time.process_time() - start
        bench = Bench(placer, searches, held_back, seconds)
        times.labellings, times.left_out = bench.measure(labellings)
    chosen = choose_labelling(times.labellings, measurement.may_be_float) if times.labellings else 0
    if config is not asked and not times.labellings:
        return placer.round_everything()
    if not times.fixed:
        taken = times.labellings[chosen] if times.labellings else None
        predicted = _predicted(config, searches)
        times.integers = integers_of(predicted) if taken is None else taken.integers
        times.weight_bits = predicted.weight_bits if taken is None else taken.weight_bits
    if times.integers is None:  # the given times are those of files alone
        return first.prepared
    return placer.take(times, chosen, searches, first)


def _search_configs(asked: QConfig, measurement: TimingPlan | None) -> tuple[QConfig, QConfig | None]:
    """Returns the config to search under, and the one that rounds everything if that is in question.

    A packaged recipe that rounds everything for speed is searched as if it were balanced, and its own
    placement stays unless another one is measured to be better.
    """
    mixed = any(rule.placement for rule in asked.rules)
    if measurement is None or mixed or asked.backend not in _MEASURED_WHOLE:
        return asked, None
    if measurement.may_be_float and rounds_for_speed_by_default(asked):
        elsewhere = measurement.host is not None or measurement.times.fixed
        package = find_package(runtime_of(asked.backend))
        if elsewhere or importlib.util.find_spec(package) is not None:
            return asked.model_copy(update={"placement": "balanced"}), asked
    elif asked.effective_placement == "balanced":
        return asked, asked.model_copy(update={"placement": "everything"})
    return asked, None


def _may_have_fewer_bits(measurement: TimingPlan, config: QConfig) -> bool:
    """Whether weights of fewer bits are in question: for a file, where they take kernels of their own."""
    times = measurement.times
    if times.fixed:
        return SAFE_BITS in (times.weight_bits, *(labelling.weight_bits for labelling in times.labellings))
    gains = times.fit is not None and times.fit.gains_by_fewer_bits
    return measurement.in_float and gains and config.effective_placement in ("balanced", "fastest")


def _predicted(config: QConfig, searches: Mapping[int, Searched]) -> SearchOutcome:
    """Returns what is taken without a measurement: by the bits of the config, or by the least time alone."""
    outcomes = [search.outcome for search in searches.values() if search.outcome is not None]
    if config.effective_placement == "fastest":
        return min(outcomes, key=lambda outcome: outcome.point.energy.seconds)
    return outcomes[0]


def _labellings(
    config: QConfig, searches: Mapping[int, Searched], everything: QConfig | None, by_default: bool
) -> dict[str, SearchOutcome]:
    """Returns the labellings that can be measured, those of the bits with the better prediction first.

    Args:
        config: the config of the search.
        searches: bits of weights -> the search with them.
        everything: the config that rounds everything, if that is in question.
        by_default: whether rounding everything stays unless another labelling is better.
    """
    found = [search.outcome for search in searches.values() if search.outcome is not None]
    outcomes = [o for o in found if _is_measurable(config, o) or (by_default and config.backend in _MEASURED)]
    if not outcomes:
        return {}
    outcomes.sort(key=lambda o: price(o.point.energy.seconds, o.point.energy.noise))
    labellings = find_labellings(*outcomes)
    if everything is None or not labellings:
        return labellings
    return with_everything(labellings, outcomes[0], by_default)


def fit_costs(config: QConfig) -> ProcessorFit | None:
    """Returns the fit of the packaged table to this processor, if the config places by it; else None.

    Raises:
        ExportError: when the runtime is not installed.
    """
    packaged = backends.get(config.backend).cost_table == "onnxruntime" and config.cost_table is None
    if not packaged or config.effective_placement == "everything":
        return None
    return fit_processor()


def _is_measurable(config: QConfig, outcome: SearchOutcome) -> bool:
    """Whether the runtime of the config runs here, and there is a choice to be made by time and noise."""
    return config.backend in _MEASURED and outcome.mode == "balanced" and len(outcome.frontier) > 1
