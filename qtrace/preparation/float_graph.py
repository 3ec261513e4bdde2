"""The first step of ``prepare``: the float graph whose ops and weights the later steps decide on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qtrace.config import QConfig
from qtrace.errors import GraphError, TraceError
from qtrace.graph.flatten import flatten
from qtrace.graph.native import drop_ranges, lower, write_ranges
from qtrace.graph.renewal import renew_all
from qtrace.graph.types import TracedModule
from qtrace.preparation.float_stage import change_float, copy_views, reads_samples
from qtrace.preparation.passes import native
from qtrace.preparation.passes.biases import align_biases
from qtrace.preparation.passes.compose import compose_pieces
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.neutral import drop_neutral
from qtrace.preparation.samples import cut_images, first_calls, holds_infinite_data, read_calls

__all__ = ["FloatGraph", "make_float_graph"]

# Images on which ranges are measured: their mean decides, not one of them.
_MEASURED_SAMPLES = 4
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
    count = _READ_SAMPLES if reads_samples(config) else _MEASURED_SAMPLES
    calls = None if samples is None else read_calls(samples, model, count) or None
    reports = change_float(model, config, calls or ())
    changed += align_biases(model).changed
    left = tuple(str(reason) for reason in (*expanded.left, *composed.left))
    measured = None if calls is None else cut_images(first_calls(calls, _MEASURED_SAMPLES, model), model)
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
