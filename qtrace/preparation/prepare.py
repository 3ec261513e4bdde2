"""Prepares a traced module: decides what the config quantizes, and inserts the fake quants."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.config import QConfig, Region
from qtrace.config.checking import check_whole
from qtrace.config.recipe import config_or_default
from qtrace.data.batches import as_arguments, check_batches, count_samples, first_samples, refuse_nan
from qtrace.errors import GraphError, TraceError
from qtrace.graph.flatten import flatten
from qtrace.graph.garbage import paused_collector
from qtrace.graph.lint import check
from qtrace.graph.native import drop_ranges, lower, write_ranges
from qtrace.graph.renewal import renew_all
from qtrace.graph.tracing.refusals import debugging_marks
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float_stage import change_float, reads_samples
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes import native
from qtrace.preparation.passes.annotate import annotate
from qtrace.preparation.passes.biases import broadcast_biases
from qtrace.preparation.passes.compose import compose_pieces
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.insert import insert
from qtrace.preparation.passes.place import place, write_activations
from qtrace.preparation.phases import switch_phase
from qtrace.preparation.record import Record, is_quantized, write_record
from qtrace.process.thread import on_engine_thread

__all__ = ["plan", "prepare"]

_LOG = logging.getLogger("qtrace")

# Images on which the noise of each rounding is measured: their mean decides, not one of them.
_MEASURED_SAMPLES = 4
# The samples that algorithms of the float stage read.
_READ_SAMPLES = 32
_SHOWN = 10


@on_engine_thread
def prepare(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
    samples: Iterable[Any] | None = None,
) -> TracedModule:
    """Returns a copy of ``traced`` with a fake quant at every site that the config asks for.

    The copy is flat and independent; parameters keep their names. Its phase is ``float``: it still
    computes what ``traced`` computes, until ``calibrate`` has seen data. Composites that are written in
    pieces, such as ``x * F.sigmoid(x)``, are one op of the copy, which rounds float32 in its own order.

    A model of MegEngine's ``quantize_qat`` or ``quantize`` brings scales: sites take them over instead of
    being calibrated, and algorithms that would change the trained weights do not run. If every site has its
    scale, the phase is ``quantize``; else the logger ``qtrace`` names the other sites.

    Args:
        traced: a traced module, as ``qtrace.trace`` or MegEngine's ``trace_module`` gives it.
        qconfig: a ``QConfig``, a mapping with its fields, a recipe's name or the path of a recipe file;
            None, or a config that says nothing, for the default: the recipe ``int8``, for onnxruntime.
        inputs: names or glob patterns of the nodes or modules with which the quantized region begins, which
            are part of it; None for those of the config's ``region``, else the graph's inputs.
        outputs: names or glob patterns of the nodes or modules with which the quantized region ends; None
            as for ``inputs``. Ops outside of the region stay float.
        samples: batches as `calibrate` takes them, for a ``balanced`` placement: on the first four images
            the noise of each rounding is measured at the outputs; None for generated images.

    Returns:
        A prepared ``TracedModule``.

    Raises:
        CalibrationError: when ``samples`` are no batches that fit the model.
        ConfigError: for a config that is wrong or does not fit the graph.
        GraphError: when ``traced`` is not a traced module, or is prepared already, or an op of it cannot
            run on the shapes of its inputs after a change of the module.
    """
    with paused_collector():
        model, record, given = _decide(traced, qconfig, inputs, outputs, samples)
        insert(model, record.annotation)
        check(model, types=False)  # the editor renewed them
        write_record(model, record)
        if given is not None:
            _take_over(model, given)
    return model


@on_engine_thread
def plan(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
    samples: Iterable[Any] | None = None,
) -> Annotation:
    """Returns the annotation that ``prepare`` would execute and ``explain`` prints; inserts nothing."""
    return _decide(traced, qconfig, inputs, outputs, samples)[1].annotation


def _with_region(
    config: QConfig, inputs: str | Sequence[str] | None, outputs: str | Sequence[str] | None
) -> QConfig:
    """Returns ``config`` with the region of the arguments; None keeps that end of the config's region."""
    if inputs is None and outputs is None:
        return config
    old = config.region or Region()
    arguments = {"inputs": inputs, "outputs": outputs}
    ends = {key: value or getattr(old, key) for key, value in arguments.items()}
    region = Region.model_validate({key: value for key, value in ends.items() if value is not None})
    return config.with_region(
        region, {f"region.{key}": f"argument {key}" for key in arguments if arguments[key]}
    )


def _decide(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None,
    inputs: str | Sequence[str] | None,
    outputs: str | Sequence[str] | None,
    samples: Iterable[Any] | None,
) -> tuple[TracedModule, Record, native.Given | None]:
    """Runs the passes before `insert`; returns the changed copy, the record and the scales that it brings."""
    if not isinstance(traced, TracedModule):
        raise GraphError(
            f"prepare takes a TracedModule, not {type(traced).__name__}: call qtrace.trace on it first."
        )
    if is_quantized(traced):
        raise GraphError("the module is prepared or converted already: prepare the float one.")
    if problem := debugging_marks(traced):
        raise GraphError(f"prepare cannot take the model: {problem}")
    if samples is not None:
        check_batches(samples, "samples")
    config = _with_region(config_or_default(qconfig), inputs, outputs)
    check_whole(config)
    model = _flat(traced)
    renew_all(model)
    located = native.locate(model)
    unused: tuple[str, ...] = ()
    if located is not None:
        drop_ranges(model)
        config, unused = native.without_refitting(config, located)
    expanded = expand(model)
    composed = compose_pieces(model, config, located.activations if located is not None else ())
    changed = [*expanded.changed, *composed.changed]
    changed += broadcast_biases(model, before_norms=False).changed
    count = _READ_SAMPLES if reads_samples(config) else _MEASURED_SAMPLES
    calls = None if samples is None else _arguments(samples, model, count) or None
    reports = change_float(model, config, calls or ())
    changed += broadcast_biases(model).changed
    log = (*changed, *(f"left: {reason}" for reason in (*expanded.left, *composed.left)))
    placing = place(model, config, None if calls is None else _first(calls, _MEASURED_SAMPLES))
    if placing is not None:
        placing, pieces = write_activations(model, placing)
        log = (*log, *pieces.changed)
    annotation = annotate(model, config, placing)
    record = Record("prepared", annotation, config.to_dict(), log, reports)
    if located is None:
        return model, record, None
    located = native.without_changed_layers(located, model)
    given = native.give_ranges(model, annotation, located)
    notes = (*unused, *located.notes, *given.notes)
    record = replace(record, annotation=given.annotation, native=given.scales, native_notes=notes)
    return model, record, given


def _flat(traced: TracedModule) -> TracedModule:
    """Returns a flat copy of ``traced``, with float layers for those of MegEngine's own quantization."""
    try:
        lowered, ranges = lower(traced)
    except TraceError as error:
        raise GraphError(f"prepare cannot take the model: {error}") from error.__cause__
    model = flatten(lowered)
    if ranges is not None:
        write_ranges(model, ranges)
    return model


def _take_over(model: TracedModule, given: native.Given) -> None:
    """Sets the scales that the model brings; names the sites that it brings none for."""
    view = QuantizedModel(model, "prepared")
    native.set_ranges(view, given)
    if given.missing:
        names = f"{', '.join(given.missing[:_SHOWN])}{' and others' if len(given.missing) > _SHOWN else ''}"
        _LOG.warning(
            f"{len(given.missing)} of {len(view.fake_quants)} groups of sites have no scale of the model's "
            f"own quantization: {names}. qtrace.calibrate sets these from data and keeps the others."
        )
    elif given.qparams:
        switch_phase("quantize", view)


def _arguments(samples: Iterable[Any], model: TracedModule, count: int) -> list[Any]:
    """Returns the arguments of calls for the first ``count`` images of ``samples``."""

    def read() -> Iterator[Any]:
        for index, batch in enumerate(samples):
            arguments = as_arguments(batch, model, index)
            refuse_nan(arguments, index)
            yield arguments

    return _first(read(), count)


def _first(calls: Iterable[Any], count: int) -> list[Any]:
    """Returns ``calls`` up to the first ``count`` images."""
    first: list[Any] = []
    for arguments in calls:
        first.append(first_samples(arguments, count) or arguments)
        count -= count_samples(first[-1])
        if count <= 0:
            break
    return first
