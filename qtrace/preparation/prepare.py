"""Prepares a traced module: decides what the config quantizes, and inserts the fake quants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtrace.config import QConfig, Region
from qtrace.config.checking import check_whole
from qtrace.config.recipe import as_qconfig
from qtrace.errors import GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.garbage import paused_collector
from qtrace.graph.lint import check
from qtrace.graph.tracing.refusals import moved_outputs, native_quantization
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float_stage import change_float
from qtrace.preparation.passes.annotate import annotate
from qtrace.preparation.passes.biases import broadcast_biases
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.insert import insert
from qtrace.preparation.record import Record, is_quantized, write_record
from qtrace.process.thread import on_engine_thread

__all__ = ["plan", "prepare"]


@on_engine_thread
def prepare(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
) -> TracedModule:
    """Returns a copy of ``traced`` with a fake quant at every site that the config asks for.

    The copy is flat and independent; parameters keep their names. Its phase is ``float``: it still
    computes what ``traced`` computes, until ``calibrate`` has seen data.

    Args:
        traced: a traced module, as ``qtrace.trace`` or MegEngine's ``trace_module`` gives it.
        qconfig: a ``QConfig``, a mapping with its fields, a recipe's name or the path of a recipe file;
            None for the default, int8 for onnxruntime.
        inputs: names or glob patterns of the nodes or modules with which the quantized region begins, which
            are part of it; None for those of the config's ``region``, else the graph's inputs.
        outputs: names or glob patterns of the nodes or modules with which the quantized region ends; None
            as for ``inputs``. Ops outside of the region stay float.

    Returns:
        A prepared ``TracedModule``.

    Raises:
        ConfigError: for a config that is wrong or does not fit the graph.
        GraphError: when ``traced`` is not a traced module, or is prepared already.
    """
    with paused_collector():
        model, annotation, record = _decide(traced, qconfig, inputs, outputs)
        insert(model, annotation)
        check(model)
        write_record(model, record)
    return model


@on_engine_thread
def plan(
    traced: TracedModule,
    qconfig: QConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
) -> Annotation:
    """Returns the annotation that ``prepare`` would execute and ``explain`` prints; inserts nothing."""
    return _decide(traced, qconfig, inputs, outputs)[1]


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
) -> tuple[TracedModule, Annotation, Record]:
    """Runs the passes before `insert`; returns the changed copy, the annotation and the record."""
    if not isinstance(traced, TracedModule):
        raise GraphError(
            f"prepare takes a TracedModule, not {type(traced).__name__}: call qtrace.trace on it first."
        )
    if is_quantized(traced):
        raise GraphError("the module is prepared or converted already: prepare the float one.")
    problem = moved_outputs(traced) or native_quantization(traced)
    if problem:
        raise GraphError(f"prepare cannot take the model: {problem}")
    config = _with_region(as_qconfig(QConfig() if qconfig is None else qconfig), inputs, outputs)
    check_whole(config)
    model = flatten(traced)
    expanded = expand(model)
    changed = [*expanded.changed, *broadcast_biases(model, before_norms=False).changed]
    reports = change_float(model, config)
    changed += broadcast_biases(model).changed
    log = (*changed, *(f"left: {reason}" for reason in expanded.left))
    annotation = annotate(model, config)
    return model, annotation, Record("prepared", annotation, config.to_dict(), log, reports)
