"""Place: keeps ops in float where the runtime gains nothing from integers, or too little for the noise.

It reads the graph as `annotate` would quantize it, labels each op "integer" or "float" by the measured times
of the runtime and the noise of every rounding at the graph's outputs, and changes the choices of the config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qtrace.benchmarking.costs import CostTable
from qtrace.config import QConfig, backends
from qtrace.config.backends.base import Backend
from qtrace.errors import ConfigError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import Expr, TracedModule
from qtrace.ops import OpCall
from qtrace.preparation.annotation import PlacementNote
from qtrace.preparation.passes._chains import Chains, find_chains
from qtrace.preparation.passes._choices import Choice
from qtrace.preparation.passes._pieces import PIECES, PiecesWriter
from qtrace.preparation.passes._problem import build_problem, has_pieces
from qtrace.preparation.passes._view import View, read_view
from qtrace.preparation.passes.base import PassResult
from qtrace.preparation.placement.frontier import Point, choose_balanced, choose_fastest, find_frontier
from qtrace.preparation.placement.noise import Noise, measure_noise
from qtrace.preparation.placement.problem import Neighbourhoods, Problem, evaluate, find_float_results

__all__ = ["Placing", "place", "write_activations"]

# Random vectors for each sample: more samples tell more than more vectors for each.
_PROBES = 1
_NO_NOISE = 1e-9  # of the outputs' power, 90 dB below: what is left when differences of sums are 0
_SMALLEST_CHANGE = 0.05  # dB, in an explanation


@dataclass(frozen=True)
class Placing:
    """The outcome of `place`.

    Attributes:
        choices: expr -> the choice for it.
        reasons: expr that stays float -> why.
        pieces: activation functions that become ops with integer kernels of their own.
        note: the prediction, for the annotation; None without one.
        forms: kind of function -> the name of its pieces, where that is not the kind.
    """

    choices: Mapping[Expr, Choice]
    reasons: Mapping[Expr, str]
    pieces: tuple[OpCall, ...]
    note: PlacementNote | None
    forms: Mapping[str, str] = field(default_factory=dict)

    def view(self, traced: TracedModule, qconfig: QConfig) -> View:
        """Returns the graph under the config and the placement."""
        return read_view(traced, qconfig, self.choices, self.reasons)


def place(
    traced: TracedModule, qconfig: QConfig, samples: Sequence[tuple[Any, ...]] | None
) -> Placing | None:
    """Chooses the ops that stay float; None if the config asks for no choice or no times are known.

    Functions that the backend always has in pieces are part of the result without a choice, too. If no op
    gains by integers, all that can are quantized: the file is smaller at least, and the note says that it is
    slower.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config.
        samples: arguments on which the noise of each rounding is measured; None for generated ones.
    """
    placements = {qconfig.effective_placement, *(rule.placement or "everything" for rule in qconfig.rules)}
    backend = backends.get(qconfig.backend)
    table_name = qconfig.cost_table or backend.cost_table
    if placements == {"everything"} or not table_name:
        return _place_pieces(traced, qconfig, backend.pieces) if backend.pieces else None
    table = _read_table(qconfig, backend)
    view = read_view(traced, qconfig)
    chains = find_chains(view)
    noise = None
    problem = build_problem(view, chains, table)
    if "balanced" in placements:
        schemes = backend.activation, backend.weight
        names = _find_candidates(problem)
        noise = measure_noise(traced, view.calls, *schemes, samples, probes=_PROBES, names=names)
        problem = problem.with_noise(noise.values, noise.weights)
        point, mode = choose_balanced(problem, find_frontier(problem)), "balanced"
    else:
        point, mode = choose_fastest(problem), "fastest"
    if not any(point.labels.values()):
        point, mode = _everything(problem), "everything"
    explainer = _Explainer(problem, point, mode)
    note = _write_note(explainer, Path(table_name).name, noise)
    if mode == "everything":
        return Placing(view.choices, {}, (), note)
    return _execute(view, chains, explainer, note)


def _read_table(qconfig: QConfig, backend: Backend) -> CostTable:
    """Reads the table of the config, else the packaged one of the backend.

    Raises:
        ConfigError: when the file cannot be read, holds the times of another runtime, or the backend has no
            choice.
    """
    if qconfig.cost_table is None:
        return CostTable.load(backend.cost_table)
    place = f"{qconfig.place('cost_table')}: "
    if backend.pieces:
        raise ConfigError(f"{place}backend {backend.name} fixes the form of each op: leave cost_table out.")
    try:
        table = CostTable.read(Path(qconfig.cost_table))
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from error
    runtime = table.machine.runtime
    if backend.cost_table and runtime != backend.cost_table:
        raise ConfigError(
            f"{place}cost_table {qconfig.cost_table} has times of {runtime}, but backend {backend.name} runs "
            f"in {backend.cost_table}: measure with `qtrace bench --kernels --runtime {backend.cost_table}`."
        )
    return table


def _place_pieces(traced: TracedModule, qconfig: QConfig, forms: Mapping[str, str]) -> Placing | None:
    """Writes the functions in pieces that the backend has no kernels for; None where there are none."""
    view = read_view(traced, qconfig)
    integer = [view.calls[expr] for expr in view.order if view.on_integers(expr)]
    pieces = tuple(call for call in integer if call.kind in forms)
    return Placing(view.choices, {}, pieces, None, forms) if pieces else None


def _find_candidates(problem: Problem) -> set[str]:
    """Returns the names of the ops and values that may be rounded."""
    units = {unit.name for unit in problem.units if unit.integer_seconds is not None}
    near = (t.name for t in problem.tensors if t.producer in units or not units.isdisjoint(t.readers))
    return {*units, *near}


def _everything(problem: Problem) -> Point:
    """Returns the labelling of a network that gains nothing by integers, which are wanted all the same."""
    labels = {unit.name: unit.integer_seconds is not None for unit in problem.units}
    return Point(labels, evaluate(problem, labels))


def _execute(view: View, chains: Chains, explainer: _Explainer, note: PlacementNote) -> Placing:
    """Turns labels into choices."""
    labels = explainer.point.labels
    float_results = find_float_results(explainer.problem, labels)
    choices = dict(view.choices)
    reasons: dict[Expr, str] = {}
    pieces = []
    for chain in (chain for expr, chain in chains.items() if chain.head is expr):
        name, call = chain.head.outputs[0].name, view.calls[chain.head]
        if not labels[name]:
            reasons.update(dict.fromkeys(chain.exprs, explainer.reason(name)))
        elif name in float_results:
            choices.update({e: replace(choices[e], quantize_output=False) for e in chain.exprs})
        elif has_pieces(view, call):
            pieces.append(call)
    return Placing(choices, reasons, tuple(pieces), note)


def write_activations(traced: TracedModule, placing: Placing) -> tuple[Placing, PassResult]:
    """Writes the activation functions of ``placing`` that run on integers as ops with integer kernels.

    Args:
        traced: the graph that was placed; it is edited in place.
        placing: the placement.

    Returns:
        The placement with choices for the new ops, and a line for each function.
    """
    choices = dict(placing.choices)
    with GraphEditor(traced) as editor:
        for call in placing.pieces:
            writer = PiecesWriter(editor, call.expr)
            pieces = PIECES[placing.forms.get(call.kind, call.kind)]
            editor.replace_expr(call.expr, pieces.write(writer, *call.inputs))
            choices.update(dict.fromkeys(writer.exprs, choices[call.expr]))
    changed = tuple(f"{call.out.name}: {call.kind} in pieces with integer kernels" for call in placing.pieces)
    return replace(placing, choices=choices), PassResult(changed)


class _Explainer:
    """Says what an op would cost with the other label, all else as it is."""

    def __init__(self, problem: Problem, point: Point, mode: str) -> None:
        self.problem, self.point, self.mode = problem, point, mode
        self.units = {unit.name: unit for unit in problem.units}
        self.neighbourhoods = Neighbourhoods(problem)

    def reason(self, name: str) -> str:
        """Explains why ``name`` has its label: what the other label would change."""
        unit, label = self.units[name], self.point.labels[name]
        if unit.integer_seconds is None:
            return "the runtime has no integer kernel for it"
        change = self.neighbourhoods.flip(self.point.labels, name)
        seconds, sound = change.seconds, _describe_noise(self.point.energy.noise, change.noise)
        time = f"take {_milliseconds(seconds)} longer" if seconds >= 0 else f"save {_milliseconds(-seconds)}"
        return f"placement {self.mode}: {'in float' if label else 'on integers'} it would {time}{sound}"


def _write_note(explainer: _Explainer, table: str, noise: Noise | None) -> PlacementNote:
    """Writes down the prediction of the chosen point, in milliseconds."""
    problem, point = explainer.problem, explainer.point
    in_float = evaluate(problem, dict.fromkeys(point.labels, False))
    return PlacementNote(
        mode=explainer.mode,
        table=table,
        milliseconds=point.energy.seconds * 1e3,
        float_milliseconds=in_float.seconds * 1e3,
        sqnr=None if noise is None or point.energy.noise <= 0 else -10 * math.log10(point.energy.noise),
        synthetic=noise is not None and noise.synthetic,
        times={
            unit.name: (unit.float_seconds * 1e3, unit.integer_seconds and unit.integer_seconds * 1e3)
            for unit in problem.units
        },
        reasons={unit.name: explainer.reason(unit.name) for unit in problem.units if point.labels[unit.name]},
    )


def _describe_noise(total: float, change: float) -> str:
    """Says how ``change`` alters the noise at the outputs, as a clause; "" if it hardly does.

    Args:
        total: the noise as it is, relative to the outputs.
        change: what is added to it; below 0 what is removed.
    """
    if total + change < _NO_NOISE:
        return " and remove all noise" if total >= _NO_NOISE else ""
    if total < _NO_NOISE:
        return f" and add the only noise ({-10 * math.log10(total + change):.1f} dB SQNR)"
    decibels = 10 * math.log10((total + change) / total)
    if abs(decibels) < _SMALLEST_CHANGE:
        return ""
    return f" and {'add' if change > 0 else 'remove'} {abs(decibels):.1f} dB of noise"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
