"""Selecting: keeps in float what ranks rows, and what is computed with the rows that a selection has picked.

A top-k, an arg-max or a suppression decides by differences of scores that 8 bits lose. So what lies between
the last layers and a selection stays in float, with the results of these layers. So do the ops after it,
such as a decoder whose queries are the picked rows: a wrong row is all wrong, and few rows cost little time.
So do the scores of a gate: a comparison with a threshold or with the maximum around, a rounding to whole
numbers. A gate picks no rows, but a score on the wrong side of it is all wrong, too.
All is found by structure. Rules with ``quantize: true``, and ``placement: everything``, win over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qtrace.comparing.selections import find_selecting, read_places, selects_untold
from qtrace.config import QConfig
from qtrace.graph.interpreter import evaluate_fixed
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, tensor_inputs
from qtrace.ops import Role, kind_of
from qtrace.preparation.passes._sites import Chains, find_chains
from qtrace.preparation.passes._view import MixedRanges, Selecting, View, read_view

__all__ = ["leave_selecting"]

# Ops that pick rows by positions that they read; NMS and masks pick themselves.
_PICKS = frozenset(("getitem", "gather", "indexing_one_hot", "embedding", "cond_take"))
_COMPARISONS = frozenset(("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"))
# Ops that decide by the size of a float; a cast does so if it gives no floats.
_GATES = _COMPARISONS | {"floor", "ceil", "round", "sign", "floor_div", "mod", "astype"}
# Ops that read other values at positions which the rows give: what they give are no rows of a selection.
_REGIONS = frozenset(("roi_align", "roi_pooling", "remap", "grid_sample", "deformable_conv2d"))


def leave_selecting(traced: TracedModule, qconfig: QConfig, mixed: MixedRanges) -> MixedRanges:
    """Adds the ops and results that stay in float: the ends of score paths, and what is after selections.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config.
        mixed: what stays in float for other reasons.
    """
    if not _selecting(traced) and not any(kind_of(expr) in _GATES for expr in exprs(traced)):
        return mixed
    view = read_view(traced, qconfig, mixed=mixed)
    walk = _Walk(view, find_chains(view))
    for expr in filter(lambda expr: _is_gate(view, expr), view.order):
        walk.leave_scores(expr, f"{expr.outputs[0].name} decides by it, and rounding would decide otherwise")
    for expr in _selecting(view.traced):
        name = expr.outputs[-1].name
        if any(view.is_data(node) or node not in view.static for node in tensor_inputs(expr)):
            walk.leave_scores(expr, f"{name} selects by it, and rounding would exchange rows")
    for expr, selection in _picked(view):
        walk.leave(expr, f"it computes with the rows that {selection} selects")
    return replace(mixed, selecting=Selecting(walk.floats, walk.results))


def _is_gate(view: View, expr: Expr) -> bool:
    """Returns whether ``expr`` decides by the size of computed floats, unless a function in pieces does so.

    A function in pieces joins them at 0, such as ``where(x > 0, x, 0.1 * x)``, ``x * (x > 0)`` or ``sign(x) *
    sqrt(abs(x))``. There a small error stays small.
    """
    kind = kind_of(expr)
    floats = [node for node in tensor_inputs(expr) if view.is_data(node) and is_float_tensor(node)]
    if expr not in view.calls or kind not in _GATES or not floats:
        return False
    if kind == "astype":
        return not is_float_tensor(expr.outputs[0])
    at_zero = kind == "sign" or (kind in _COMPARISONS and _compares_with_zero(view, expr))
    return not (at_zero and _meets_its_value(view, expr, floats[0]))


def _compares_with_zero(view: View, expr: Expr) -> bool:
    numbers = [v for v in (*expr.args, *expr.kwargs.values()) if isinstance(v, (int, float))]
    constants = [n for n in tensor_inputs(expr) if n in view.fixed]
    values = evaluate_fixed(view.traced, constants).values() if constants else ()
    return any(number == 0 for number in numbers) or any(not value.numpy().any() for value in values)


def _meets_its_value(view: View, expr: Expr, value: Node) -> bool:
    """Returns whether all that is computed with the decision of ``expr`` is a function of ``value``, too."""
    own, signs = {value}, {expr.outputs[0]}
    for later in view.order[view.order.index(value.expr) + 1 :] if value.expr in view.order else view.order:
        read = {node for node in tensor_inputs(later) if node not in view.static}
        if read and read <= signs:
            signs.update(later.outputs)
        elif read and read <= own | signs and all(n.shape == value.shape for n in later.outputs):
            own.update(n for n in later.outputs if n not in signs)
    users = [user for node in signs for user in node.users]
    ends = [node for node in signs if not node.users or node in view.outputs]
    return not ends and all(set(user.outputs) <= own | signs for user in users)


def _selecting(traced: TracedModule) -> tuple[Expr, ...]:
    """Returns the exprs that select, those included whose places no run tells."""
    return (*find_selecting(traced), *(expr for expr in opaque_calls(traced) if selects_untold(expr)))


def _picked(view: View) -> Iterator[tuple[Expr, str]]:
    """Yields the exprs that compute with picked rows, each with the name of the selection."""
    places: dict[Node, str] = {}  # positions and masks
    rows: dict[Node, str] = {}
    selecting = set(_selecting(view.traced))
    for expr in view.order:
        call = view.calls.get(expr)
        by_place = next((places[n] for n in expr.inputs if n in places), "")
        behind = next((rows[n] for n in expr.inputs if n in rows), "")
        if expr in selecting:
            ranks = read_places(expr) is not None
            places[expr.outputs[-1]] = expr.outputs[-1].name
            if not ranks:
                rows.update((n, expr.outputs[-1].name) for n in expr.outputs if is_float_tensor(n))
        elif behind and (call is None or call.kind not in _REGIONS):
            rows.update(dict.fromkeys(expr.outputs, behind))
            yield expr, behind
        elif by_place:
            picks = call is not None and call.kind in _PICKS
            floats = [n for n in expr.outputs if is_float_tensor(n)]
            rows.update(dict.fromkeys(floats if picks else (), by_place))
            places.update((n, by_place) for n in expr.outputs if n not in floats)


class _Walk:
    """Walks back from the scores to the last layers.

    Attributes:
        floats: expr that stays in float -> why.
        results: result that stays in float -> why.
    """

    def __init__(self, view: View, chains: Chains) -> None:
        self.view, self.chains = view, chains
        self.floats: dict[Expr, str] = {}
        self.results: dict[Node, str] = {}

    def leave(self, expr: Expr, reason: str) -> None:
        """Leaves ``expr`` in float, unless the config wants it on integers."""
        choice = self.view.choices.get(expr)
        if choice is not None and not choice.quantize and choice.placement != "everything":
            chain = self.chains.get(expr)
            self.floats.update(dict.fromkeys((expr,) if chain is None else chain.exprs, reason))

    def leave_scores(self, selection: Expr, reason: str) -> None:
        """Leaves the results of the last layers before ``selection`` in float, and what is between."""
        stack, visited = list(tensor_inputs(selection)), set[Node]()
        while stack:
            node = stack.pop()
            if node in visited or node in self.view.static:
                continue
            visited.add(node)
            call = self.view.calls.get(node.expr)
            chain = self.chains.get(node.expr)
            head = None if chain is None else self.view.calls[chain.head]
            if head is not None and head.role is Role.COMPUTE:
                self._leave_layer(node, reason)
            elif call is None or call.role is not Role.COMPUTE:
                self.leave(node.expr, reason)
                stack += [n for n in tensor_inputs(node.expr) if isinstance(n, TensorNode)]

    def _leave_layer(self, node: Node, reason: str) -> None:
        """Leaves the result of a layer in float, and the layer where its kernel gives only integers."""
        chain = self.chains[node.expr]
        choice = self.view.choices[chain.head]
        if choice.quantize or choice.placement == "everything":
            return
        if self.view.backend.integer_layers:
            self.floats.update(dict.fromkeys(chain.exprs, reason))
        else:
            self.results[chain.output] = reason
