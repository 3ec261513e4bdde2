"""Choosing: which groups of a calibrated graph are switched off, by its noise and a table of costs.

The graph was calibrated with everything on integers that gains time. Its noise is measured by runs, and a
backward pass says which roundings it comes from. The labelling with the best price of time and noise is run,
too. What is switched off is in float as in the network: with its own weights, and without sites.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import megengine.functional as F
from megengine.module import Module

from qtrace.comparing.sums import finite_or_none
from qtrace.config import backends
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.gradients import conv2d
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import evaluate_fixed
from qtrace.graph.stepping import SegmentEngine, exchange_function
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.preparation.annotation import Annotation, PlacementRow, Preference
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel, remove_record, write_record
from qtrace.preparation.passes._choices import choose
from qtrace.preparation.passes._problem import build_problem
from qtrace.preparation.passes._sites import Chains, find_chains
from qtrace.preparation.passes._view import MixedRanges, Selecting, View, read_view
from qtrace.preparation.passes.annotate import annotate_view
from qtrace.preparation.passes.compose import compose_pieces
from qtrace.preparation.passes.insert import CONTAINER, insert
from qtrace.preparation.passes.place import execute, read_table, tied, write_note
from qtrace.preparation.phases import switch_phase
from qtrace.preparation.placement.labelling import (
    WORTHLESS_DB,
    Point,
    choose_balanced,
    evaluate,
    in_float,
    price,
)
from qtrace.preparation.placement.reference import Arguments, MeasuredRun
from qtrace.preparation.placement.trials import RoundingTrial, Trials, estimate_noise

__all__ = ["PREFERENCES", "choose_row", "copy_with_weights"]

PREFERENCES: Mapping[str, str] = {"speed": "fastest", "balanced": "balanced", "accuracy": "float"}
"""Preference -> the row that is taken."""
_MOST_RUNS = 3  # of labellings: an estimate is off by less, once it is scaled to what the last run has shown


@dataclass(frozen=True)
class _Candidate:
    """A labelling as a graph.

    Attributes:
        point: the labelling, with its predicted time.
        graph: the calibrated graph with what is in float switched off.
        trial: its noise.
    """

    point: Point
    graph: TracedModule
    trial: RoundingTrial


def choose_row(
    prepared: TracedModule,
    reference: TracedModule,
    calls: Sequence[Arguments],
    prefer: Preference | None = None,
    refit: Callable[[TracedModule], object] = lambda graph: None,
    engine: SegmentEngine | None = None,
) -> None:
    """Switches off what is not worth its noise in a calibrated graph, in place.

    Algorithms fit a layer to what the layers before it lose on integers. Where some of these are switched
    off, the others are fitted anew: for half of a text recogniser that was worth 1.8 dB. Nothing is chosen,
    and no row is measured, if the config decides all, asks for size, or has BatchNorms that train on.

    Args:
        prepared: the calibrated graph.
        reference: a copy of it from before any algorithm has changed its weights.
        calls: the arguments of calls with few samples each.
        prefer: a key of `PREFERENCES`; None for what the placement of the config says.
        refit: runs the algorithms of the recipe in a graph that is switched off in part.
        engine: computes the graphs whose noise is measured; None for MegEngine.
    """
    model = QuantizedModel(prepared, "prepared")
    note = model.annotation.placement
    if note is None or note.mode == "float" or model.annotation.folds:
        return
    if note.mode == "small" and prefer is None:
        return
    row = PREFERENCES[prefer] if prefer else note.mode
    chooser = _Chooser(model, reference, calls, engine)
    if all(unit.fixed is not None for unit in chooser.problem.units):
        return
    fastest = chooser.whole()
    balanced = chooser.balance(fastest)
    candidates = {"fastest": fastest, "balanced": balanced, "float": chooser.nothing}
    chosen = candidates[row]
    if chosen is not fastest and any(chosen.point.labels.values()):
        fitted = flatten(chosen.graph)
        refit(fitted)
        others = [fastest] if row == "balanced" else []
        candidates[row] = chosen = chooser.best([*others, chooser.measure(chosen.point, fitted), chosen])
    rows = tuple(chooser.row(name, candidate) for name, candidate in candidates.items())
    if chosen is not fastest:
        prepared.__dict__.clear()
        prepared.__dict__.update(chosen.graph.__dict__)
        prepared._update_ref()
    record = QuantizedModel(prepared).record
    assert record.annotation.placement is not None
    note = replace(record.annotation.placement, rows=rows, chosen=row)
    write_record(prepared, replace(record, annotation=replace(record.annotation, placement=note)))


def copy_with_weights(prepared: TracedModule, reference: TracedModule) -> TracedModule:
    """Returns a copy of a graph with the parameters of another one, whose sites may be more.

    Args:
        prepared: a prepared graph.
        reference: a prepared graph of the same network.
    """
    model = flatten(prepared)
    for name, tensor in QuantizedModel(model).float_tensors():
        tensor._reset(get_module(reference, name))
    return model


class _Chooser:
    """Makes and measures the rows.

    Args:
        model: the calibrated graph.
        reference: a copy of it with the weights of the network.
        calls: the arguments of calls.
        engine: computes the graphs; None for MegEngine.
    """

    def __init__(
        self,
        model: QuantizedModel,
        reference: TracedModule,
        calls: Sequence[Arguments],
        engine: SegmentEngine | None = None,
    ) -> None:
        self.model, self.config = model, model.config
        if (note := model.annotation.placement) and note.mode == "fastest":  # rows are as for balanced
            self.config = self.config.model_copy(update={"placement": "balanced"})
        self.base = _strip(flatten(reference))
        self.notes = {note.name: note for note in model.annotation.notes}
        self.table, self.table_name = read_table(self.config, backends.get(self.config.backend))
        self.view, self.chains = self._read(self.base)
        problem = build_problem(self.view, self.chains, self.table)
        integer = {note.name for note in model.annotation.notes if note.state == "int"}
        labels = {unit.name: unit.fixed is not False and unit.name in integer for unit in problem.units}
        self.problem = problem.within(labels)
        self.point = Point(labels, evaluate(self.problem, labels))
        self.run = MeasuredRun(self.base, calls, ranges=False, engine=engine)
        self.noise: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self.trials = Trials(self.run)

    def whole(self) -> _Candidate:
        """Returns the graph as it was calibrated."""
        return self.measure(self.point, self.model.module)

    @cached_property
    def nothing(self) -> _Candidate:
        """Returns the graph in float, but for what the config has on integers."""
        point = in_float(self.problem)
        graph = self._switch(point)
        on_integers = any(point.labels.values())
        return self.measure(point, graph) if on_integers else _Candidate(point, graph, RoundingTrial())

    def balance(self, fastest: _Candidate) -> _Candidate:
        """Returns the labelling with the best price of time and noise; float if none is worth its noise.

        Args:
            fastest: the graph as it was calibrated.
        """
        self.noise = self._estimate()
        candidates = [fastest]
        for _ in range(_MOST_RUNS):
            last = candidates[-1]
            estimated = evaluate(self.problem.with_noise(*self.noise), last.point.labels).noise
            if not estimated:
                break
            self._scale_noise(last.trial.noise / estimated)
            problem = self.problem.with_noise(*self.noise)
            point = choose_balanced(problem, 10 ** (-WORTHLESS_DB / 10))
            if point is None or any(point.labels == c.point.labels for c in candidates):
                break
            candidates.append(self.measure(point, self._switch(point)))
        return self.best([*candidates, self.nothing])

    def best(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """Returns the candidate with the best price among those that are worth something; else the last."""
        good = [c for c in candidates[:-1] if c.trial.keeps(WORTHLESS_DB)]
        return min([*good, candidates[-1]], key=lambda c: price(c.point.energy.seconds, c.trial.noise))

    def row(self, name: str, candidate: _Candidate) -> PlacementRow:
        """Returns the figures of a row."""
        seconds, trial = candidate.point.energy.seconds, candidate.trial
        speed = in_float(self.problem).energy.seconds / max(seconds, 1e-12)
        size = read_figures(candidate.graph).bytes
        group, sqnr = trial.shown
        return PlacementRow(name, speed, finite_or_none(sqnr), group, size)

    def _estimate(self) -> tuple[dict[str, float], dict[str, float]]:
        """Estimates the noise of each rounding of the calibrated graph."""
        nodes = {node.name: node for expr in self.view.order for node in expr.outputs}
        nodes |= {node.name: node for node in self.base.graph.inputs}
        layers = {expr.outputs[0].name: expr for expr in self.view.calls}
        sites = self.model.sites
        values = {nodes[s.node.name]: s.qparams for s in sites if s.sort == "activation" and not s.static}
        kept = [site for site in sites if site.sort == "weight" and site.value is not None]
        rounded = evaluate_fixed(self.model.module, [site.value for site in kept])
        weights = {
            layers[reader.outputs[0].name]: (nodes[site.node.name], rounded[site.value])
            for site in kept
            for reader in site.consumers
            if reader.outputs[0].name in layers
        }
        return estimate_noise(self.run, values, weights)

    def _scale_noise(self, factor: float) -> None:
        values, weights = ({name: factor * power for name, power in noise.items()} for noise in self.noise)
        self.noise = values, weights

    def measure(self, point: Point, graph: TracedModule) -> _Candidate:
        """Runs a labelling."""
        view = QuantizedModel(graph)
        rounded = {site.node.name: site.value for site in view.sites if site.decision.consumers is None}
        ends = {end: rounded.get(end.name) or view.nodes[end.name] for end in self.run.ends}
        return _Candidate(point, graph, self.trials.measure(graph, ends))

    def _read(self, flat: TracedModule) -> tuple[View, Chains]:
        """Reads a float graph as `prepare` has read it before the placement, whose notes tell it."""
        backend = backends.get(self.config.backend)
        plain = read_view(flat, self.config, {})
        ranks = {name: note.ranks for name, note in self.notes.items()}
        choices = choose(flat, dict(plain.calls), self.config, backend, ranks)
        kept: dict[str, dict[Expr, str]] = {"range": {}, "selection": {}, "infinity": {}}
        for expr in plain.order:
            note = self.notes.get(expr.outputs[0].name) if expr.outputs else None
            for cause in note.causes if note is not None else ():
                if cause in kept and note is not None:
                    kept[cause][expr] = note.reason
        results: dict[Node, str] = {}
        mixed = MixedRanges(kept["range"], results, selecting=Selecting(kept["selection"]))
        infinite = plain.infinite | set(kept["infinity"])
        view = tied(
            replace(plain, choices=choices, mixed=mixed, infinite=infinite), self.model.annotation.placement
        )
        chains = find_chains(view)
        for chain in chains.values():
            note = self.notes.get(chain.output.name)
            if note is not None and note.state in ("int", "fused") and not note.output:
                results[chain.output] = note.reason.removeprefix("its result stays float: ")
        return view, chains

    def _switch(self, point: Point) -> TracedModule:
        """Returns the calibrated graph with what a point has in float switched off."""
        placement = self.model.annotation.placement
        assert placement is not None
        model = flatten(self.base)
        rounded = {
            node.name
            for expr, chain in self.chains.items()
            if point.labels.get(chain.head.outputs[0].name)
            for node in (*self.view.calls[expr].inputs, *expr.outputs)
        }
        compose_pieces(model, self.config, rounded or {""})
        view, chains = self._read(model)
        problem = build_problem(view, chains, self.table).with_noise(*self.noise)
        labels = {unit.name: point.labels.get(unit.name, False) for unit in problem.units}
        own = Point(labels, evaluate(problem, labels))
        mode = "balanced" if any(labels.values()) else "float"
        note = replace(write_note(problem, own, mode, self.table_name), centred=placement.centred)
        placing = execute(view, chains, problem, own, note)
        view = replace(view, choices=placing.choices, placed=placing.reasons)
        self._insert(model, annotate_view(view, self.config, note))
        return model

    def _insert(self, model: TracedModule, annotation: Annotation) -> None:
        """Inserts the sites that stay, with their ranges and the weights that belong to them."""
        before = self.model
        known = {name: module for name, module in _children(before.module) if isinstance(module, Module)}
        nodes = {node.name: node for expr in exprs(model) for node in expr.outputs}
        for site in annotation.sites:
            if site.sort != "activation":
                for path in _parameters(nodes[site.node]):
                    get_module(model, path)._reset(get_module(before.module, path))
        groups = {site.node.name: site.group for site in before.sites if site.sort == "activation"}
        groups = {**before.annotation.carried, **groups}
        same = {site.name: known[site.name] for site in annotation.sites if site.name in known}
        insert(model, annotation, {name: copy.deepcopy(module) for name, module in same.items()})
        for site in annotation.sites:
            if site.group == site.name and site.name not in same and site.sort == "activation":
                module, qparams = getattr(getattr(model, CONTAINER), site.name), None
                if site.node in groups:
                    qparams = known[groups[site.node]].qparams()
                module.set_qparams(qparams)
        record = replace(before.record, annotation=annotation)
        write_record(model, record)
        switch_phase("quantize", QuantizedModel(model, record=record))


def _strip(model: TracedModule) -> TracedModule:
    """Removes the roundings of a prepared graph: it becomes the flat float graph that was annotated."""
    with GraphEditor(model, renews_record=True) as editor:
        for expr in reversed(exprs(model)):
            if isinstance(owner(expr), (FakeQuant, BiasQuant, DynamicQuant)):
                editor.replace_uses(expr.outputs[0], expr.args[1])
    remove_record(model)
    exchange_function(model, conv2d, F.conv2d)
    return model


def _children(model: TracedModule) -> Iterable[tuple[str, Any]]:
    return getattr(model, CONTAINER).__dict__.items()


def _parameters(node: Node) -> set[str]:
    """Returns the paths of the parameters that a node is computed from."""
    if isinstance(node.expr, GetAttr):
        return {node.expr.name}
    return {
        path for before in node.expr.inputs if isinstance(before, TensorNode) for path in _parameters(before)
    }
