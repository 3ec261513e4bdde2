"""Place: keeps ops in float where the runtime gains no time by integers, by a table of costs.

It reads the graph as `annotate` would quantize it, labels each op "integer" or "float" by the measured times
of the runtime, and changes the choices of the config. Noise does not count here: `choosing.py` weighs it on
the calibrated graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from qtrace import costs as cost_tables
from qtrace import ops
from qtrace.config import QConfig, backends
from qtrace.config.backends.base import Backend
from qtrace.costs import CostTable
from qtrace.errors import ConfigError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import Expr, TracedModule
from qtrace.graph.walk import exprs
from qtrace.ops import OpCall
from qtrace.preparation.annotation import PlacementNote
from qtrace.preparation.passes._choices import Choice
from qtrace.preparation.passes._problem import build_problem, has_pieces
from qtrace.preparation.passes._sites import Chains, find_chains
from qtrace.preparation.passes._view import MixedRanges, View, read_view
from qtrace.preparation.passes.base import PassResult
from qtrace.preparation.passes.compose import PIECES, PiecesWriter
from qtrace.preparation.placement.labelling import (
    Neighbourhoods,
    Point,
    Problem,
    choose_fastest,
    evaluate,
    find_float_results,
)

_NO_NOISE = 1e-9  # of the outputs' power, 90 dB below: what is left when differences of sums are 0


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

    def view(self, traced: TracedModule, qconfig: QConfig, mixed: MixedRanges | None = None) -> View:
        """Returns the graph under the config and the placement, with what `find_mixed_ranges` keeps float."""
        return tied(read_view(traced, qconfig, self.choices, self.reasons, mixed), self.note)


def tied(view: View, note: PlacementNote | None) -> View:
    """Returns the view in which the parts of a concat share a range, if ranges are symmetric for speed."""
    if note is not None and note.centred:
        return replace(view, backend=replace(view.backend, ties_concat=True))
    return view


def place(traced: TracedModule, qconfig: QConfig, mixed: MixedRanges | None = None) -> Placing | None:
    """Chooses the ops that stay float; None if the config asks for no choice or no times are known.

    Functions that the backend always has in pieces are part of the result without a choice, too. If integers
    gain too little time, the whole graph stays in float, unless the config asks for size or says how many
    bits weights have.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config.
        mixed: the ops and results that one grid would spoil, which stay float; None for none.
    """
    placements = {qconfig.effective_placement, *(rule.placement or "everything" for rule in qconfig.rules)}
    backend = backends.get(qconfig.backend)
    table_name = qconfig.cost_table or backend.cost_table
    if placements == {"everything"} or not table_name:
        return _place_pieces(traced, qconfig, backend.pieces, mixed) if backend.pieces else None
    table, name = read_table(qconfig, backend)
    view = read_view(traced, qconfig, mixed=mixed)
    chains = find_chains(view)
    problem = build_problem(view, chains, table)
    mode = next(mode for mode in ("small", "balanced", "fastest") if mode in placements)
    point = choose_fastest(problem)
    if not any(point.labels.values()) and qconfig.weight is not None and qconfig.weight.bits is not None:
        mode = "small"  # who says the bits of weights asks for integers
    if mode == "small":
        point = _choose_all(problem)
    note = write_note(problem, point, mode if any(point.labels.values()) else "float", name)
    note = replace(note, centred=mode == "fastest" and bool(backend.slower_with_zero_point))
    return execute(view, chains, problem, point, note)


def _choose_all(problem: Problem) -> Point:
    """Returns the labelling that stores most weights as integers: with every op that has such a kernel."""
    labels = {unit.name: unit.fixed is not False for unit in problem.units}
    return Point(labels, evaluate(problem, labels))


def read_table(qconfig: QConfig, backend: Backend) -> tuple[CostTable, str]:
    """Returns the table of the config, else the packaged one of the backend, and its name.

    Of several packaged ones it is the one of the processor most like this one, by its instruction sets.

    Raises:
        ConfigError: when the file cannot be read, holds the times of another runtime, or the backend lacks
            choice.
    """
    if qconfig.cost_table is None:
        name = CostTable.nearest(backend.cost_table, cost_tables.processor_flags())
        return CostTable.packaged(backend.cost_table)[name], name
    place = f"{qconfig.place('cost_table')}: "
    if backend.pieces and not backend.cost_table:
        raise ConfigError(f"{place}backend {backend.name} fixes the form of each op: leave cost_table out.")
    try:
        table = CostTable.read(Path(qconfig.cost_table))
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from error
    runtime = table.machine.runtime
    if backend.cost_table and runtime != backend.cost_table:
        raise ConfigError(
            f"{place}cost_table {qconfig.cost_table} has times of {runtime}, but backend {backend.name} runs "
            f"in {backend.cost_table}: measure one with `python -m benchmarks.kernels`."
        )
    return table, Path(qconfig.cost_table).name


def _place_pieces(
    traced: TracedModule, qconfig: QConfig, forms: Mapping[str, str], mixed: MixedRanges | None
) -> Placing | None:
    """Writes the functions in pieces that the backend lacks kernels for; None where there are none."""
    view = read_view(traced, qconfig, mixed=mixed)
    integer = [view.calls[expr] for expr in view.order if view.on_integers(expr)]
    pieces = tuple(call for call in integer if call.kind in forms)
    return Placing(view.choices, {}, pieces, None, forms) if pieces else None


def execute(view: View, chains: Chains, problem: Problem, point: Point, note: PlacementNote) -> Placing:
    """Turns the labels of a point into choices, with the reason for each op that stays float."""
    labels = point.labels
    explainer = _Explainer(problem, point, note.mode)
    float_results = find_float_results(problem, labels)
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


def write_same_activations(traced: TracedModule, pattern: TracedModule) -> tuple[str, ...]:
    """Writes the activation functions in pieces that ``pattern`` has in pieces, whatever placed them there.

    Args:
        traced: a flat or prepared graph of the same network, of which only float values are wanted; it is
            edited in place. Its new nodes get the names that they have in ``pattern``.
        pattern: a flat graph that was placed.

    Returns:
        The names of the results of the functions that were written in pieces.
    """
    kinds = {call.out.name: call.kind for expr in exprs(pattern) if (call := ops.read(expr)) is not None}
    calls = [call for expr in exprs(traced) if (call := ops.read(expr)) is not None]
    whole = [c for c in calls if c.kind in PIECES and kinds.get(c.out.name, c.kind) != c.kind]
    with GraphEditor(traced, renews_record=True) as editor:
        for call in whole:
            writer = PiecesWriter(editor, call.expr)
            editor.replace_expr(call.expr, PIECES[call.kind].write(writer, *call.inputs))
    return tuple(call.out.name for call in whole)


class _Explainer:
    """Says what an op would cost with the other label, all else as it is."""

    def __init__(self, problem: Problem, point: Point, mode: str) -> None:
        self.point, self.mode = point, mode
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


def write_note(problem: Problem, point: Point, mode: str, table: str) -> PlacementNote:
    """Writes down the prediction of a point, in milliseconds.

    Args:
        problem: the units and tensors.
        point: the labelling.
        mode: the placement that was asked for; "float" where it leaves everything in float.
        table: the name of the table.
    """
    explainer = _Explainer(problem, point, mode)
    return PlacementNote(
        mode=mode,
        table=table,
        milliseconds=point.energy.seconds * 1e3,
        float_milliseconds=evaluate(problem, dict.fromkeys(point.labels, False)).seconds * 1e3,
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
    decibels = f"{abs(10 * math.log10((total + change) / total)):.1f}"
    if decibels == "0.0":
        return ""
    return f" and {'add' if change > 0 else 'remove'} {decibels} dB of noise"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
