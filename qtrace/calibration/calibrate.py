"""calibrate: observes data in every site and sets the quantization parameters from its statistics."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.calibration.algorithms import calibrated_algorithms, restoring, run_calibrated
from qtrace.calibration.base import check_sites, range_group
from qtrace.calibration.choice import Chosen, choose_segments
from qtrace.calibration.collecting import CollectOptions, Statistics, collect, observe_parameters
from qtrace.calibration.distributed import Collective, common_statistics, current
from qtrace.config.checking import algorithms as algorithms_of
from qtrace.data.batches import ENOUGH_SAMPLES, check_batches, evaluating, number_batches
from qtrace.errors import CalibrationError, QtraceError
from qtrace.fakequant.following.bias import BIAS_LIMIT
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import evaluate_fixed
from qtrace.graph.stepping import SegmentEngine
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import get_module
from qtrace.learning import choose_learning
from qtrace.numerics import SMALLEST_SCALE
from qtrace.plugins.options import check_arguments
from qtrace.preparation.annotation import Preference
from qtrace.preparation.faithfulness import cut_images, read_calls, split_calls
from qtrace.preparation.float16 import float_values, uses_float16
from qtrace.preparation.model import QuantizedModel, read_record, write_record
from qtrace.preparation.passes.convert import centre_ranges, limit_ranges
from qtrace.preparation.phases import switch_phase
from qtrace.process import on_engine_thread, return_free_memory, returns_memory
from qtrace.ptq.base import Batches
from qtrace.runtimes.host import RuntimeHost
from qtrace.scheme import QParams
from qtrace.storage.checkpoints import Checkpoint

_LOG = logging.getLogger("qtrace")


@check_arguments
@on_engine_thread
@returns_memory
def calibrate(
    prepared: TracedModule,
    batches: Iterable[Any],
    max_batches: int | None = None,
    progress: bool = True,
    *,
    engine: str = "auto",
    statistics: Statistics | None = None,
    state: str | Path | None = None,
    threads: int | None = None,
    learning_engine: str = "auto",
    runtime_host: RuntimeHost | None = None,
    held_back: Iterable[Any] | None = None,
    prefer: Preference | None = None,
) -> TracedModule:
    """Runs ``batches`` through the graph, observes every site and sets its quantization parameters.

    An earlier calibration is replaced; scales that the model brings from MegEngine's own quantization are
    kept. Algorithms of the config's ``ptq`` that need data (`bias_correction` ...) run at the end and read
    the batches again; ``explain`` shows their reports. If the config places ops by time and noise, groups of
    sites that are not worth their noise are switched off at last, and ``explain`` shows the choice. The
    batches run in eval mode, and training flags are restored. The module ends in the phase ``quantize``; on
    an error or an interruption it is left as it was.

    Args:
        prepared: a module made by ``qtrace.prepare``; it is calibrated in place.
        batches: Tensors or arrays, or tuples (positional) or dicts (keyword) of them; no iterator if an
            algorithm reads the data again.
        max_batches: the most batches to run; None for all.
        progress: whether to show a progress bar with the remaining time on stderr.
        engine: computes the activations, also for ``gptq`` and ``bias_correction``: ``megengine``,
            ``onnxruntime``, or ``auto`` for the fastest that applies (docs/guides/calibration.md). The logger
            ``qtrace`` gets the choice (INFO).
        statistics: statistics of the batches that were collected elsewhere, so that the batches need not run;
            ``max_batches`` is then ignored, and ``engine`` runs only the algorithms.
        state: a folder, created if missing, in which algorithms that learn (``adaround``, ``reconstruct``)
            save each block. An interrupted calibration goes on after these blocks, to the same result. Files
            of another model, other data or options are ignored.
        threads: number of threads of onnxruntime, and of ``gptq``; None for all cores.
        learning_engine: computes the steps of ``adaround`` and ``reconstruct``: ``megengine``, ``torch`` (the
            extra ``torch``), or ``auto`` for torch where it is installed and agrees with MegEngine.
        runtime_host: the interpreter or machine whose onnxruntime computes the activations that are observed;
            None for this process, in which algorithms compute in any case.
        held_back: other batches, on the first samples of which the noise of the graph is measured; None for
            the first samples of ``batches``.
        prefer: ``speed`` keeps all that gains time on integers, ``balanced`` what is worth its noise, and
            ``accuracy`` nothing; None for what ``placement`` of the config says.

    Returns:
        ``prepared``.

    Raises:
        CalibrationError: when the graph lacks sites, there is no batch, a batch does not fit the model or the
            engine, or a value is NaN or infinite; it names site and batch.
        ConfigError: for an unknown engine.
        ExportError: when the host cannot be reached, or does not survive the graph.
    """
    model = QuantizedModel(prepared, "prepared")
    _check_arguments(batches, max_batches=max_batches, threads=threads)
    check_sites(model)
    algorithms, checkpoint = calibrated_algorithms(model, batches), _checkpoint(state)
    if held_back is None and iter(batches) is batches:
        first = list(itertools.islice(batches, ENOUGH_SAMPLES))
        held_back, batches = first, itertools.chain(first, batches)
    reference = flatten(prepared)
    learning = choose_learning(prepared, learning_engine) if algorithms else None
    chosen: str | Chosen = engine
    if statistics is None:
        options = CollectOptions(engine, _count(batches, max_batches), threads, progress, runtime_host, True)
        pairs = itertools.islice(number_batches(batches), max_batches)
        statistics, chosen = _collect(model, pairs, options, current())
    statistics = _with_parameters(model, statistics)
    with _undone_on_failure(model), evaluating(prepared):
        _apply(model, statistics)
        count = len(statistics.batches)  # of all ranks
        count = min(_count(batches, max_batches) or count, count)

        def fit(own: QuantizedModel) -> None:
            data = Batches(batches, own.module, count)
            segments = _segments(own, chosen, data, threads)
            return_free_memory()
            run_calibrated(own, algorithms, data, progress, checkpoint, segments, learning, threads)
            _fit_biases(own.view(own.module))  # learned scales may have become smaller

        if algorithms:
            fit(model)
            return_free_memory()
        if model.annotation.placement is not None:
            from qtrace.preparation.passes.choosing import choose_row  # here: a third of `prepare`

            def refit(graph: TracedModule) -> None:
                own = _unfitted(graph, reference, statistics)
                if algorithms:
                    fit(own)

            calls = _choice_calls(batches if held_back is None else held_back, model)
            runner = choose_segments(model, chosen, len(calls), threads, calls[0]) if calls else None
            choose_row(prepared, reference, calls, prefer, refit, runner)
    if uses_float16(model):
        _record_ranges(prepared, statistics)
    return prepared


def _unfitted(graph: TracedModule, reference: TracedModule, statistics: Statistics) -> QuantizedModel:
    """Returns a graph as it was before any algorithm: with the weights of the network, and plain ranges."""
    model = QuantizedModel(graph)
    for name, tensor in model.float_tensors():
        tensor._reset(get_module(reference, name))
    late = {name for name, algorithm in algorithms_of(model.config) if algorithm.stage == "calibrated"}
    reports = tuple(report for report in model.ptq if report["algorithm"] not in late)
    write_record(graph, dataclasses.replace(model.record, ptq=reports))
    model = QuantizedModel(graph)
    _apply(model, statistics)
    return model


def _choice_calls(batches: Iterable[Any], model: QuantizedModel) -> list[Any]:
    """Returns the arguments of calls with single samples if the graph takes them, on all ranks the same."""
    calls = read_calls(batches, model.module, ENOUGH_SAMPLES)
    calls = cut_images(split_calls(calls, model.module), model.module)
    ranks = current()
    if ranks is None:
        return calls
    arrays: list[Any] = pickle.loads(ranks.gather(pickle.dumps(calls))[0])
    return arrays


def _record_ranges(prepared: TracedModule, statistics: Statistics) -> None:
    """Keeps the ranges of what stays float, which decide what an export computes in float16."""
    record = read_record(prepared, "prepared")
    names = float_values(QuantizedModel(prepared, record=record))
    observers = {name: statistics.observers.get(range_group(name)) for name in names}
    ranges = {
        name: float(max(np.abs(end).max() for end in observer.range()))
        for name, observer in observers.items()
        if observer is not None and not observer.empty
    }
    write_record(prepared, dataclasses.replace(record, float_ranges=ranges))


def _with_parameters(model: QuantizedModel, statistics: Statistics) -> Statistics:
    """Returns the statistics with the values of the parameters; refuses statistics of no batch."""
    if not statistics.batches:
        raise CalibrationError("calibration data holds no batches: give at least one.")
    return observe_parameters(model, statistics)


def _segments(
    model: QuantizedModel, chosen: str | Chosen, data: Batches, threads: int | None
) -> SegmentEngine | None:
    """Chooses the engine of the algorithms."""
    first = next(iter(data)) if chosen == "auto" else None
    return choose_segments(model, chosen, len(data), threads, first)


def _collect(
    prepared: QuantizedModel,
    batches: Iterable[tuple[int, Any]],
    options: CollectOptions,
    ranks: Collective | None,
) -> tuple[Statistics, str | Chosen]:
    """Collects the statistics of the batches of all ranks; returns the engine of this rank, too."""
    if ranks is not None:
        batches = ((ranks.rank + ranks.size * number, batch) for number, batch in batches)
    outcome: Statistics | QtraceError
    chosen = options.engine
    try:
        collected = collect(prepared, batches, options)
        outcome, chosen = collected.statistics, collected.chosen
        if outcome.batches:
            _LOG.info(f"engine {collected.chosen.name}: {collected.chosen.reason}")
    except QtraceError as error:
        if ranks is None:
            raise
        outcome = error
    if ranks is None:
        assert isinstance(outcome, Statistics)
        return outcome, chosen
    return common_statistics(prepared, outcome, ranks), chosen


@contextmanager
def _undone_on_failure(prepared: QuantizedModel) -> Iterator[None]:
    """Restores tensors, observers and phases when the block fails."""
    fake_quants = prepared.fake_quants.values()
    observers = [(fq, fq.observer) for fq in fake_quants]
    phases = [(module, module.phase) for module in (*fake_quants, *prepared.followers)]
    try:
        with restoring(prepared.module):
            yield
    except BaseException:
        for fq, observer in observers:
            fq.observer = observer
        for module, phase in phases:
            module.phase = phase
        raise


def _checkpoint(state: str | Path | None) -> Checkpoint | None:
    if state is None:
        return None
    folder = Path(state)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(f"state {folder} cannot be a folder: {error.strerror}.") from error
    return Checkpoint(folder)


def _apply(prepared: QuantizedModel, statistics: Statistics) -> None:
    """Sets the parameters of all groups from their statistics; those that the model brings are kept."""
    sites = {name: fq for name, fq in prepared.fake_quants.items() if name in statistics.observers}
    observers = {name: statistics.observers[name] for name in sites}
    observed = (name for name, observer in observers.items() if not observer.empty)
    parameters = {name: observers[name].qparams() for name in observed if name not in prepared.record.native}
    for name, fq in sites.items():
        fq.observer = observers[name]
        if name in parameters:
            fq.set_qparams(parameters[name])
    limit_ranges(prepared)
    centre_ranges(prepared)
    _fit_biases(prepared)
    switch_phase("quantize", prepared)


def _count(batches: Iterable[Any], limit: int | None) -> int | None:
    total = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    return total if limit is None else limit if total is None else min(limit, total)


def _check_arguments(batches: Any, **counts: Any) -> None:
    for name, count in counts.items():
        whole = isinstance(count, int) and not isinstance(count, bool) and count > 0
        if count is not None and not whole:
            raise CalibrationError(f"{name} is {count!r}: give a whole number above 0, or None.")
    check_batches(batches)


def _fit_biases(prepared: QuantizedModel) -> None:
    """Widens weight scales that are so small that their layer's bias would not fit into int32."""
    fake_quants = prepared.fake_quants
    # The range of a bias that depends on the batch is not known.
    biases = [site for site in prepared.sites if site.sort == "bias" and site.static]
    values = evaluate_fixed(prepared.module, (site.node for site in biases))
    for site in biases:
        activation, weight = (fake_quants[g] for g in (site.decision.activation, site.decision.weight))
        bias = values[site.node].numpy().astype(np.float64).reshape(-1)
        if not (activation.calibrated and weight.calibrated):
            continue
        minima = np.abs(bias) / (float(activation.qparams().scale) * site.decision.factor * BIAS_LIMIT)
        qparams = weight.qparams()
        minimum = minima if qparams.scale.ndim else minima.max()
        if np.any(minimum > qparams.scale):
            if qparams.scheme.power_of_two:
                minimum = np.ldexp(1.0, np.ceil(np.log2(np.maximum(minimum, SMALLEST_SCALE))).astype(int))
            scale = np.maximum(qparams.scale, minimum).astype(np.float32)
            weight.set_qparams(QParams(qparams.scheme, scale, qparams.zero_point))
