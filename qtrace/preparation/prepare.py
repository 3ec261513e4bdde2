"""Prepares a traced module in three steps, and inserts the fake quants that they decide on.

`make_float_graph` copies it with weights and composites as ops of their own; `decide` says what is quantized;
`native.bring_scales` takes over the scales that the model brings. Each takes data and returns data.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.comparing.sums import FEWEST_SAMPLES
from qtrace.config import QConfig, Region, backends
from qtrace.config.checking import check_whole
from qtrace.config.recipe import config_or_default
from qtrace.data.batches import check_batches
from qtrace.display import progress_bar
from qtrace.errors import GraphError, TraceError, shorten_list
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import check
from qtrace.graph.native import drop_ranges, lower, write_ranges
from qtrace.graph.renewal import renew_all
from qtrace.graph.tracing.hazards import debugging_marks
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import check_traced, describe_path
from qtrace.plugins.options import check_arguments
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.faithfulness import (
    Faithfulness,
    UnpreparedGraph,
    cut_images,
    first_calls,
    holds_infinite_data,
    read_batches,
    read_calls,
)
from qtrace.preparation.model import QuantizedModel, Record, is_quantized, write_record
from qtrace.preparation.passes import native
from qtrace.preparation.passes.annotate import annotate
from qtrace.preparation.passes.base import change_float, copy_views, reads_samples
from qtrace.preparation.passes.compose import compose_pieces, drop_neutral
from qtrace.preparation.passes.expand import align_biases, expand
from qtrace.preparation.passes.insert import insert
from qtrace.preparation.passes.mixed_ranges import find_mixed_ranges, leave_selecting
from qtrace.preparation.passes.place import place, write_activations
from qtrace.preparation.phases import switch_phase
from qtrace.preparation.placement.reference import MeasuredRun
from qtrace.process import on_engine_thread, paused_collector, returns_memory

_LOG = logging.getLogger("qtrace")
_UNASKED = {"dtype", "kernel", "role", "selection"}
"""The causes of an op in float that no rule and no region of the config asks for."""


@check_arguments
@on_engine_thread
def prepare(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
    samples: Iterable[Any] | None = None,
    progress: bool = True,
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
        qconfig: a ``QConfig``, a mapping with its fields, a recipe's name or the path of a recipe file. None,
            or a config that says nothing, is the recipe ``int8``, for onnxruntime. A ``QConfig`` or a mapping
            that says anything is the whole config: without ``placement``, every op that the target can is
            rounded, and without ``ptq``, weights are rounded to nearest.
        inputs: names or glob patterns of the nodes or modules with which the quantized region begins, which
            are part of it; None for the config's ``region``, else the graph's inputs.
        outputs: names or glob patterns of the nodes or modules with which the quantized region ends; None
            as for ``inputs``. Ops outside of the region stay float.
        samples: batches as `calibrate` takes them. On the first four images the ranges of the parts of joins,
            slices and outputs are measured; on the first one the copy is compared with ``traced``. None for
            generated images. No iterator, which `calibrate` would go on reading after them.
        progress: whether to show a progress bar on stderr while the graph runs on ``samples``; none appears
            within the first second.

    Returns:
        A prepared ``TracedModule``.

    Raises:
        CalibrationError: when ``samples`` are no batches that fit the model, or an iterator.
        ConfigError: for a config that is wrong or does not fit the graph.
        GraphError: when ``traced`` is not a traced module, or is prepared already. Also when an op of it
            cannot run on the shapes of its inputs after a change of the module. Also when the copy computes
            something else on ``samples``.
    """
    config = read_request(traced, qconfig, inputs, outputs, samples)
    prepared = prepare_config(traced, config, samples, qconfig, progress)
    if samples is not None:
        Faithfulness(UnpreparedGraph(traced), traced, read_batches(samples)).check(prepared)
    return prepared


@returns_memory
def prepare_config(
    traced: TracedModule,
    config: QConfig,
    samples: Iterable[Any] | None,
    request: object = None,
    progress: bool = False,
) -> TracedModule:
    """Prepares a module by a whole config.

    Args:
        traced: a traced module.
        config: the whole config.
        samples: as for `prepare`.
        request: the config as the user gave it, for notes.
        progress: as for `prepare`.
    """
    with paused_collector():
        graph = make_float_graph(traced, config, samples)
        decision = decide(graph, progress)
        scales = native.bring_scales(graph.model, decision.annotation, graph.located)
        insert(graph.model, scales.annotation)
        check(graph.model, types=False)  # the editor renewed them
        record = _record(graph, decision, scales)
        write_record(graph.model, record)
        _note_placement(request, record)
        _warn_of_fallback(record.annotation)
        _take_over(graph.model, scales)
    return graph.model


@on_engine_thread
def plan(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
    samples: Iterable[Any] | None = None,
) -> Annotation:
    """Returns the annotation that ``prepare`` would execute; inserts nothing."""
    return plan_graph(traced, read_request(traced, qconfig, inputs, outputs, samples), samples)[1]


def plan_graph(
    traced: TracedModule, config: QConfig, samples: Iterable[Any] | None = None
) -> tuple[TracedModule, Annotation]:
    """Returns the float graph that ``prepare`` would quantize, and the annotation that it would execute."""
    graph = make_float_graph(traced, config, samples)
    annotation = native.bring_scales(graph.model, decide(graph).annotation, graph.located).annotation
    return graph.model, annotation


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


def read_request(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
    samples: Iterable[Any] | None = None,
) -> QConfig:
    """Returns the whole config; raises for what ``prepare`` cannot take, whose arguments these are."""
    if problem := describe_path(traced):
        raise GraphError(f"prepare takes a traced module, and {problem}.")
    check_traced(traced, "prepare takes")
    if is_quantized(traced):
        raise GraphError("the module is prepared or converted already: prepare the float one.")
    if problem := debugging_marks(traced):
        raise GraphError(f"prepare cannot take the model: {problem}")
    if samples is not None:
        check_batches(samples, "samples", reader="prepare")
    config = _with_region(config_or_default(qconfig), inputs, outputs)
    check_whole(config)
    return config


def _record(graph: FloatGraph, decision: Decision, scales: native.NativeParameters) -> Record:
    """Writes down what the three steps have done."""
    left = (f"left: {reason}" for reason in graph.left)
    return Record(
        "prepared",
        scales.annotation,
        graph.config.to_dict(),
        (*graph.changed, *left, *decision.changed),
        graph.reports,
        native=scales.scales,
        native_notes=(*graph.dropped, *scales.notes),
    )


def _note_placement(request: object, record: Record) -> None:
    """Says what a user may not expect: a graph in float throughout, or a config that places everything."""
    placement = record.annotation.placement
    backend = backends.get(record.annotation.backend)
    silent = isinstance(request, (QConfig, Mapping)) and "placement" not in record.qconfig
    unread = record.qconfig.get("method", "static") != "static"
    has_static = any(rule.get("method") == "static" for rule in record.qconfig.get("rules", ()))
    if isinstance(request, Mapping) and unread and {"activation", "method"} <= {*request} and not has_static:
        _LOG.warning(
            f"activation does nothing with method: {record.qconfig['method']}, which rounds no activation "
            "by a scheme of the config: leave it out."
        )
    if placement is None and silent and backend.cost_table and not unread:
        _LOG.info(
            f"the config leaves placement out, so every op that {backend.name} can is rounded. With "
            "placement: balanced, as in recipe int8, ops stay in float if integers would not be faster."
        )
    weights = [site for site in record.annotation.sites if site.sort == "weight"]
    if placement is not None and placement.mode == "float" and weights:
        _LOG.info(
            "placement does nothing here: the method of the config keeps every op in float, and stores only "
            f"{len(weights)} weights as integers."
        )
    elif placement is not None and placement.mode == "float":
        _LOG.warning(
            f"the placement leaves the whole graph in float: {placement.conclusion}. `placement: everything` "
            "rounds it all the same; `qtrace explain` says why each op stays float."
        )


def _warn_of_fallback(annotation: Annotation) -> None:
    """Names the ops in float that nobody asked for, on a target whose device computes floats elsewhere."""
    backend = backends.get(annotation.backend)
    ops = [note for note in annotation.notes if note.state == "float" and _UNASKED & {*note.causes}]
    if not backend.floats_run_on or not ops:
        return
    kinds = Counter(note.kind or note.op for note in ops).most_common()
    names = shorten_list(f"{number} {kind}" for kind, number in kinds)
    _LOG.warning(
        f"{len(ops)} of {len(annotation.notes)} ops stay in float on {backend.name} ({names}): they run on "
        f"{backend.floats_run_on}, and their tensors are copied there and back. `qtrace explain` names each; "
        "`region` in the recipe ends the quantized part before them."
    )


def _take_over(model: TracedModule, scales: native.NativeParameters) -> None:
    """Sets the scales that the model brings; names the sites that it brings none for."""
    view = QuantizedModel(model, "prepared")
    native.set_ranges(view, scales)
    if scales.missing:
        _LOG.warning(
            f"{len(scales.missing)} of {len(view.fake_quants)} groups of sites lack a scale in the model's "
            f"own quantization: {shorten_list(scales.missing)}. qtrace.calibrate sets these from data and "
            "keeps the others."
        )
    elif scales.qparams:
        switch_phase("quantize", view)


# The first step of ``prepare``: the float graph whose ops and weights the later steps decide on.

# The samples that algorithms of the float stage read.
_READ_SAMPLES = 32


@dataclass(frozen=True)
class FloatGraph:
    """A flat float graph in which weights, biases and composites are ops of their own.

    Attributes:
        model: the graph; the later steps change it in place.
        config: the config that they follow.
        samples: the arguments of a few calls on which to measure; None for generated images.
        changed: a line for each change of a pass.
        left: a line for each candidate that a pass left unchanged.
        reports: the reports of the float algorithms, as plain data.
        located: the scales that the model brings from MegEngine's own quantization; None if it brings none.
        dropped: a line for each algorithm that does not run because of these scales.
    """

    model: TracedModule
    config: QConfig
    samples: list[Any] | None
    changed: tuple[str, ...]
    left: tuple[str, ...]
    reports: tuple[dict[str, Any], ...]
    located: native.Located | None
    dropped: tuple[str, ...]


def make_float_graph(
    traced: TracedModule, config: QConfig, samples: Iterable[Any] | None = None
) -> FloatGraph:
    """Copies a traced module flat, expands layers, composes what is in pieces, and runs the float algorithms.

    Args:
        traced: a traced module in float; it is not changed.
        config: the config.
        samples: the user's batches; None if there are none.

    Raises:
        CalibrationError: when ``samples`` do not fit the model.
        GraphError: when an op cannot run on the shapes of its inputs.
    """
    model = _flat(traced)
    renew_all(model)
    located = native.locate(model)
    dropped: tuple[str, ...] = ()
    if located is not None:
        drop_ranges(model)
        config, dropped = native.without_refitting(config, located)
    expanded = expand(model)
    neutral = drop_neutral(model).changed if located is None else ()
    if neutral:
        copy_views(model)
    composed = compose_pieces(model, config, located.activations if located is not None else ())
    changed = [*expanded.changed, *neutral, *composed.changed]
    changed += align_biases(model, before_norms=False).changed
    count = _READ_SAMPLES if reads_samples(config) else FEWEST_SAMPLES
    calls = None if samples is None else read_calls(samples, model, count) or None
    reports = change_float(model, config, calls or ())
    changed += align_biases(model).changed
    left = tuple(str(reason) for reason in (*expanded.left, *composed.left))
    measured = None if calls is None else cut_images(first_calls(calls, FEWEST_SAMPLES, model), model)
    if measured is not None and any(map(holds_infinite_data, measured)):
        measured = None  # they measure nothing: `calibrate` refuses them and says where
    return FloatGraph(model, config, measured, tuple(changed), left, reports, located, dropped)


def _flat(traced: TracedModule) -> TracedModule:
    """Returns a flat copy of ``traced``, with float layers in place of MegEngine's own quantized ones."""
    try:
        lowered, ranges = lower(traced)
    except TraceError as error:
        raise GraphError(f"prepare cannot take the model: {error}") from error.__cause__
    model = flatten(lowered)
    if ranges is not None:
        write_ranges(model, ranges)
    return model


# The second step of ``prepare``: what is quantized, and why.

_SHOWN_AFTER = 1.0  # second: most graphs are decided on before


@dataclass(frozen=True)
class Decision:
    """The annotation of a float graph.

    Attributes:
        annotation: for every expr the rule that quantizes it, or the reason why it stays in float.
        changed: a line for each op that was written in pieces again, as the placement found it faster.
    """

    annotation: Annotation
    changed: tuple[str, ...]


def decide(graph: FloatGraph, progress: bool = False) -> Decision:
    """Decides for every expr: unlike ranges first, then selections, the placement, and the rules.

    Args:
        graph: the float graph; ops that the placement wants in pieces are written so in it.
        progress: whether to show a progress bar of the runs of the graph on stderr.

    Raises:
        ConfigError: for a config that does not fit the graph.
    """
    model, config = graph.model, graph.config
    with progress_bar(
        desc="prepare", unit="forward passes", disable=not progress, delay=_SHOWN_AFTER, leave=False
    ) as bar:
        run = MeasuredRun(model, graph.samples, advance=bar.update)
        mixed = leave_selecting(model, config, find_mixed_ranges(model, config, run))
    placing = place(model, config, mixed)
    changed: tuple[str, ...] = ()
    if placing is not None:
        placing, pieces = write_activations(model, placing)
        changed = tuple(pieces.changed)
    return Decision(annotate(model, config, placing, mixed), changed)
