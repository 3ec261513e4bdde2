"""compare: where the quantized graph's error comes from, site by site.

Each batch runs three times. In float, every site's value f is kept. Then every site by itself: all that
it reads is in float, and what it gives, o, has the error that arises there. Then quantized: what a site
gives, q, has the whole error ``q - f = (o - f) + (q - o)``, its own and the inherited part. Where the graph
selects (top-k, arg-max, NMS), all three runs select what the quantized graph does, so that equal rows meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from qtrace.comparing.selections import SelectedShares, TapedRun
from qtrace.comparing.sums import ErrorSums, decibels
from qtrace.data.batches import as_arguments, check_batches, evaluating, translate_errors
from qtrace.errors import CalibrationError
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import TracedModule
from qtrace.inspection.comparison.report import Comparison, GroupCost, SiteComparison
from qtrace.inspection.comparison.tallies import (
    AloneRun,
    FloatRun,
    OutputTallies,
    QuantizedRun,
    SiteTally,
    clipped,
    range_of,
)
from qtrace.inspection.twin import check_nodes, describe_changed_weights, float_twin
from qtrace.numerics import dequantize, quantize
from qtrace.observers.statistics import best_range, error, tables
from qtrace.plugins.options import check_arguments
from qtrace.preparation.model import QuantizedModel, QuantizedSite, is_quantized
from qtrace.preparation.phases import in_phase
from qtrace.process import on_engine_thread
from qtrace.scheme import QParams
from qtrace.verification.selections import find_selections

__all__ = ["Comparison", "compare"]


@check_arguments
@on_engine_thread
def compare(
    quantized: TracedModule,
    batches: Iterable[Any],
    *,
    float_model: TracedModule | None = None,
    max_batches: int | None = None,
) -> Comparison:
    """Compares a quantized graph with the float network, on data.

    Args:
        quantized: a calibrated module, prepared or converted; it is not changed.
        batches: inputs as for ``qtrace.calibrate``, best ones that were not used there.
        float_model: the network as traced, or prepared from it; None for the graph itself in float. That is
            another network if training, or an algorithm of ``ptq`` in ``calibrate``, has changed weights.
        max_batches: the largest number of batches; None for all.

    Returns:
        A comparison with ``table()``, ``to_dict()`` and ``html()``.

    Raises:
        GraphError: when the module is not prepared or converted, or ``float_model`` is another network.
        CalibrationError: when it is not calibrated, there are no batches, or one does not fit the model.
    """
    model = QuantizedModel(quantized)
    check_batches(batches)
    twin = None if float_model is None else float_twin(model, float_model)
    measured = _Measured(model, twin)
    network = None if float_model is None or is_quantized(float_model) else float_model
    with evaluating(quantized), nullcontext() if network is None else evaluating(network):
        for index, batch in enumerate(itertools.islice(batches, max_batches)):
            args, kwargs = as_arguments(batch, quantized, index)
            with translate_errors(quantized, (args, kwargs), index):
                measured.add(args, kwargs, network)
    if measured.batches == 0:
        raise CalibrationError("there are no batches to compare on: give at least one.")
    note = (
        ""
        if twin is not None
        else describe_changed_weights(model, "give that, too (float_model=, or --float).")
    )
    return measured.result(model.record.qconfig.get("name") or "", note)


class _Measured:
    """Collects the errors of all batches."""

    def __init__(self, quantized: QuantizedModel, twin: TracedModule | None) -> None:
        self.quantized, self.model, self.twin = quantized, quantized.module, twin
        compared = [s for s in quantized.rounded.values() if s.sort != "bias"]
        self.moving = {s.name: s for s in compared if not s.static}
        self.fixed = {s.name: s for s in compared if s.static}
        if twin is not None:
            check_nodes(twin, (site.node.name for site in self.moving.values()))
        self.tallies = {name: SiteTally(name, site.qparams) for name, site in self.moving.items()}
        self.parameters: dict[str, np.ndarray] = {}
        self.rounded: dict[str, np.ndarray] = {}
        self.selected = SelectedShares.of(self.model)
        self.outputs = OutputTallies(quantized, self.selected)
        self.batches = self.samples = 0

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], network: TracedModule | None) -> None:
        """Runs one batch.

        Args:
            args, kwargs: the arguments of a call.
            network: whose outputs are the reference; the twin's may differ, where ``equalize`` has made a
                ReLU of a ReLU6. None for the outputs of the twin, or of the graph itself in float.
        """
        places = self._select(args, kwargs)
        in_float = FloatRun(self.twin or self.model, {**self.moving, **self.fixed}, places)
        with nullcontext() if self.twin else in_phase(self.model, "float"):
            reference = in_float.compute(args, kwargs)
        for name in self.fixed:
            if name in in_float.values:
                self.parameters[name] = in_float.values.pop(name)
        with in_phase(self.model, "quantize"):
            alone = AloneRun(self.model, self.moving, in_float.values, places)
            alone.compute(args, kwargs)
            rounded = self.fixed if self.twin else {}
            sites = {**self.moving, **rounded}
            run = QuantizedRun(self.model, sites, in_float.values, alone.own, self.tallies, places)
            test = run.compute(args, kwargs)
        self.rounded = run.parameters
        self.batches += 1
        self.samples += len(reference[0]) if reference and reference[0].ndim else 1
        shares = in_float.tape.shares
        if network is not None:
            replay = TapedRun(network, places)
            reference = [tensor.numpy() for tensor in replay.run_flat(*args, **kwargs)]
            shares = replay.tape.shares
        self.selected.add(shares)
        self.outputs.add(*(self.selected.blank(side, shares) for side in (reference, test)))

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray] | None:
        """Returns what the quantized graph selects; None if nothing after a selection leaves it."""
        if not self.selected:
            return None
        with in_phase(self.model, "quantize"):
            run = TapedRun(self.model)
            run.run(*args, **kwargs)
        return run.tape.places

    def result(self, name: str, note: str) -> Comparison:
        """Returns the comparison of all batches so far.

        Args:
            name: the name of the recipe.
            note: a remark on what "float" stands for.
        """
        kinds = {gives: note.kind for note in self.quantized.annotation.notes for gives in note.gives}
        sites = []
        for site in self.quantized.sites:
            if site.name in self.tallies:
                sites.append(_activation(site, self.tallies[site.name], kinds.get(site.node.name, "")))
            elif site.name in self.parameters:
                sites.append(_parameter(site, self.parameters[site.name], self.rounded.get(site.name)))
        histograms = {name: tally.histogram() for name, tally in self.tallies.items()}
        groups = tuple(self._groups())
        return Comparison(
            self.quantized.annotation.backend,
            name,
            self.batches,
            self.samples,
            self.outputs.result(),
            tuple(sites),
            groups,
            histograms,
            note,
            next(iter(find_selections(self.model).values()), ""),
        )

    def _groups(self) -> Iterable[GroupCost]:
        members: dict[str, list[str]] = {}
        for name, site in self.moving.items():
            members.setdefault(site.group, []).append(name)
        for group, names in members.items():
            if len(names) > 1:
                yield GroupCost(group, tuple(names), tuple(_cost(self.tallies[n]) for n in names))


def _activation(site: QuantizedSite, tally: SiteTally, kind: str) -> SiteComparison:
    compared = tally.total.values > 0 or not tally.unequal
    return SiteComparison(
        site.name,
        site.sort,
        kind,
        site.group,
        tally.qparams.scheme.describe(),
        tally.values,
        tally.total.sqnr_db if compared else math.nan,
        tally.own.sqnr_db if tally.own.values else math.nan,
        decibels(tally.total.signal, tally.inherited.noise) if compared else math.nan,
        tally.total.cosine if compared else math.nan,
        tally.clipped / tally.values if tally.values else 0.0,
        tally.used,
        tally.unequal,
    )


def _parameter(site: QuantizedSite, value: np.ndarray, rounded: np.ndarray | None) -> SiteComparison:
    """The error of a parameter; ``rounded`` is what the graph has, None for ``value`` rounded to nearest."""
    fq, qparams = site.fake_quant, site.qparams
    flat = qparams
    if qparams.scheme.per_channel:
        flat = QParams(qparams.scheme.of_rows, qparams.scale, qparams.zero_point)
    rows = _rows(fq, qparams, value)
    integers = quantize(rows, flat)
    outside = clipped(rows, integers, flat)
    if rounded is not None and rounded.shape == value.shape:
        integers = quantize(_rows(fq, qparams, rounded), flat)
    difference = ErrorSums()
    difference.add(rows, dequantize(integers, flat))
    scheme = qparams.scheme
    width = integers.astype(np.int64).max(axis=-1) - integers.astype(np.int64).min(axis=-1)
    return SiteComparison(
        site.name,
        site.sort,
        "",
        site.group,
        scheme.describe(),
        value.size,
        difference.sqnr_db,
        difference.sqnr_db,
        float("inf"),
        difference.cosine,
        outside / value.size,
        float(np.mean(width)) / (scheme.qmax - scheme.qmin),
    )


def _rows(fq: FakeQuant, qparams: QParams, value: np.ndarray) -> np.ndarray:
    """A parameter as (channels, rest), or as one row where all channels have the same scale."""
    if not qparams.scheme.per_channel:
        return value.reshape(1, -1)
    rows = fq.channels_first(value)
    rows = np.moveaxis(rows, (qparams.scheme.axis or 0) if rows is value else 0, 0)
    return rows.reshape(len(rows), -1)


def _cost(tally: SiteTally) -> float:
    """Returns by how many dB the rounding error would be lower with parameters of the site's own."""
    state = {k: np.asarray(v) for k, v in tally.distribution.state_dict().items() if k != "batches"}
    scheme = tally.distribution.scheme
    table = tables(state)
    shared = (np.array([[end]]) for end in range_of(tally.qparams))
    own = (end[:, None] for end in best_range(state, scheme, 64))
    now, then = (float(error(table, lo, hi, scheme)[0, 0]) for lo, hi in (shared, own))
    return max(decibels(now, then), 0.0) if now > 0 else 0.0
