"""Absorbs constant factors and sums into the weights and biases of the layers around them.

A product, quotient, sum or difference with stored numbers, one for a tensor or one for each channel, is a
map ``x * gain + shift``, and so is a BatchNorm in evaluation. It passes through moves, poolings, concats and,
if it is a positive factor, through ReLUs.

Towards the inputs, ``conv(x) * g + s = conv(x. W * g) + (b * g + s)`` for each output channel. Towards the
outputs, ``conv(x * g + s) = conv(x; w * g) + (b + w . s)`` for each input channel, where no padding is read
that has no ``s``. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.types import Expr, GetAttr, ModuleNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.passes.absorption.crossings import BlockedError
from qtrace.preparation.passes.absorption.layers import Change, LayerChanges
from qtrace.preparation.passes.absorption.plans import AbsorptionPlan, Planner
from qtrace.preparation.passes.base import Left, PassResult
from qtrace.preparation.passes.fuse_bn import drop_dead_norms

__all__ = ["absorb"]

Statistics = Mapping[str, tuple[np.ndarray, np.ndarray]]


def absorb(
    traced: TracedModule,
    statistics: Statistics | None = None,
    *,
    copies: bool = True,
    norms: bool = True,
) -> PassResult:
    """Absorbs every constant op into the layers before it, or else into the layers after it.

    Args:
        traced: a flat, expanded traced module, as `qtrace.preparation.normalize.normalize` gives it; graph
            and parameters are edited in place.
        statistics: name of a layer's result -> mean and standard deviation of its channels, where a folded
            BatchNorm says them.
        copies: whether a call of a layer whose weight other calls read too, as in the head of a detector, may
            get a weight of its own.
        norms: whether to absorb BatchNorms, too.

    Returns:
        The ops that were absorbed and where, with the new means and deviations; those left, with the reason.
    """
    calls = [call for e in exprs(traced) if (call := ops.read(e)) is not None]
    stored = _stored_attributes(traced)
    result = _Absorption(traced, dict(statistics or {}), copies, norms).run()
    used = {e.name for e in exprs(traced) if isinstance(e, GetAttr)}
    for path in sorted(stored - used - drop_dead_norms(traced, calls)):
        delete_attribute(traced, path)
    return result


class _Absorption:
    """One run over a graph: towards the inputs in reverse order, then towards the outputs in order.

    The last constant op of a chain takes those on its way with it, so that each chain is walked once.
    """

    def __init__(
        self,
        traced: TracedModule,
        statistics: dict[str, tuple[np.ndarray, np.ndarray]],
        copies: bool,
        norms: bool,
    ) -> None:
        self.traced, self.statistics, self.copies = traced, statistics, copies
        self.planner = Planner(traced, norms)
        self.changed: list[str] = []
        self.moved: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.reasons: dict[Expr, list[str]] = {}

    def run(self) -> PassResult:
        order = [e for e in exprs(self.traced) if self.planner.read(e) is not None]
        if not order:
            return PassResult((), ())
        with GraphEditor(self.traced) as editor:
            parameters = LayerChanges(self.traced, editor, self.copies)
            for expr in reversed(order):
                self._absorb(editor, parameters, expr, backward=True)
            for expr in order:
                self._absorb(editor, parameters, expr, backward=False)
        left = [
            Left(
                e.outputs[0].name,
                f"towards the inputs, {self.reasons[e][0]}; towards the outputs, {self.reasons[e][1]}",
            )
            for e in order
            if e not in self.planner.gone
        ]
        return PassResult(tuple(self.changed), tuple(left), self.moved)

    def _absorb(self, editor: GraphEditor, parameters: LayerChanges, expr: Expr, backward: bool) -> None:
        if expr in self.planner.gone:
            return
        op = self.planner.read(expr)
        assert op is not None
        try:
            plan = self.planner.backward(op) if backward else self.planner.forward(op)
            parameters.check(plan.changes)
        except BlockedError as error:
            self.reasons.setdefault(expr, []).append(str(error))
            return
        layers = dict.fromkeys(str(change.expr.outputs[0].name) for change in plan.changes)
        names = [str(e.outputs[0].name) for e in (reversed(plan.removed) if backward else plan.removed)]
        parameters.write(plan.changes)
        self._move_statistics(plan.changes)
        self._remove(editor, plan)
        verb = "absorbed" if backward else "absorbed beforehand"
        self.changed.append(f"{', '.join(layers)}: {verb} {', '.join(names)}")

    def _move_statistics(self, changes: list[Change]) -> None:
        for change in changes:
            name = str(change.expr.outputs[0].name)
            if change.result and name in self.statistics:
                mean, deviation = self.statistics[name]
                moved = mean * change.gain + change.shift, deviation * np.abs(change.gain)
                self.statistics[name] = self.moved[name] = moved

    def _remove(self, editor: GraphEditor, plan: AbsorptionPlan) -> None:
        for expr in plan.removed:
            op = self.planner.read(expr)
            assert op is not None
            editor.replace_uses(op.call.out, op.x)
            editor.remove(expr)
            self.planner.gone.add(expr)


def _stored_attributes(traced: TracedModule) -> set[str]:
    """Returns the paths of the tensors that the graph reads."""
    nodes = ((e.name, e.outputs[0]) for e in exprs(traced) if isinstance(e, GetAttr))
    return {str(name) for name, node in nodes if not isinstance(node, ModuleNode)}
