"""Keeps a joined tensor in float if one scale would destroy its smaller part.

A concatenation of boxes, up to 600, and scores, up to 1, has one scale in every target: no score survives 256
levels of 2.4 each. The ranges come from a run of the float graph on a few samples. A value is a candidate if
one of its parts keeps fewer than 5 bits of its grid. Its parts are the inputs of the op that joins them, or
the slices that are taken of it. They may also be the groups of columns of an output, or of a result that
reaches an output through no other layer. Then only the value is rounded in another run. It stays in float if
a group of columns of an output loses by that, and so do the ops that would round it again. What costs the
outputs nothing, such as the unlike feature maps that a network joins, is rounded.

Where a join that leaves the graph stays in float, so does the arithmetic after the last layers that ends in
it, on targets whose layers give integers. It decodes boxes, and a grid for corners in pixels is coarser than
the offsets that the layers give.

A top-k, an arg-max or a suppression decides by differences of scores that 8 bits lose. So what lies between
the last layers and a selection stays in float, with the results of these layers. So do the ops after it,
such as a decoder whose queries are the picked rows: a wrong row is all wrong, and few rows cost little time.
So do the scores of a gate: a comparison with a threshold or with the maximum around, a rounding to whole
numbers. A gate picks no rows, but a score on the wrong side of it is all wrong, too.
All is found by structure. Rules with ``quantize: true``, and ``placement: everything``, win over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qtrace.comparing.selections import find_selecting, read_places, selects_untold
from qtrace.config import QConfig
from qtrace.errors import QtraceError
from qtrace.graph.interpreter import evaluate_fixed
from qtrace.graph.nonfinite import search_nonfinite
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, tensor_inputs
from qtrace.ops import Role, kind_of
from qtrace.preparation.passes._infinity import infinity_of
from qtrace.preparation.passes._sites import Chains, find_chains, output_choice
from qtrace.preparation.passes._view import MixedRanges, Selecting, View, read_view
from qtrace.preparation.placement.reference import MeasuredRun
from qtrace.preparation.placement.trials import Trials
from qtrace.scheme import QScheme

_LEAST_LEVELS = 32  # of a grid, 5 bits: a part with fewer is nearly lost
# The ratio of ranges at which 8 bits keep these: more alike parts lose their levels to a narrow scheme.
_LIKE = (np.iinfo(np.uint8).max + 1) / _LEAST_LEVELS
_HARMLESS = (
    30.0  # dB that the worst group of an output keeps: rounding a value that costs no more is harmless
)
_WITHIN_ONE = frozenset(("sigmoid", "hsigmoid", "hard_sigmoid", "softmax", "tanh", "sin", "cos", "erf"))
_SLICES = ("getitem", "split", "gather")
_ARITHMETIC = (Role.ELEMENTWISE, Role.ACTIVATION)


def find_mixed_ranges(traced: TracedModule, qconfig: QConfig, run: MeasuredRun) -> MixedRanges:
    """Finds the ops and results that stay in float because one grid would spoil a part of a value.

    The graph runs only if the config and the backend would round a value with parts. Ops with a rule
    ``quantize: true`` are rounded whatever it costs.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config.
        run: the graph on a few images, for the ranges. With generated ones, a join that leaves the graph
            stays in float, too, if some of its parts are bounded by a function such as sigmoid and others are
            not.

    Raises:
        CalibrationError: when the graph does not run on samples.
    """
    mixed = MixedRanges(large_inputs=_large_inputs(run))
    view = read_view(traced, qconfig, mixed=mixed)
    if view.infinite and (nan := _find_nan(run)):
        mixed = MixedRanges(large_inputs={**nan, **mixed.large_inputs})
        view = read_view(traced, qconfig, mixed=mixed)
    finder = _Finder(view, find_chains(view))
    values, outputs, lasts = finder.find_values(), finder.find_outputs(), finder.find_last_values()
    if not values and not any(finder.gives_columns(node, run) for node in (*outputs.values(), *lasts)):
        return mixed
    nodes = {node for value, slices in values.items() for node in (value, *finder.parts(value, slices))}
    trials, ranges = _try(run, nodes.union(outputs.values(), lasts), lasts)
    decision = _Decision(finder, trials, ranges, generated=run.synthetic)
    for value, slices in values.items():
        decision.decide(value, slices)
    for output, value in outputs.items():
        decision.decide_output(output, value)
    decision.decide_last_values(lasts)
    if view.backend.integer_layers:
        decision.leave_decoders()
    return replace(mixed, floats=decision.floats, results=decision.results)


def _try(
    run: MeasuredRun, nodes: Iterable[Node], columns: Sequence[Node]
) -> tuple[Trials | None, Mapping[Node, tuple[float, float]]]:
    """Returns the trials and the ranges of ``nodes``; none if generated inputs do not fit the network."""
    try:
        run.exact(columns)
        trials = Trials(run)
        return trials, trials.ranges(nodes)
    except QtraceError:
        if not run.synthetic:
            raise
        return None, {}


def _large_inputs(run: MeasuredRun) -> dict[str, np.ndarray]:
    """Returns the inputs of which a number in the samples may stand for infinity."""
    batches = [] if run.synthetic else run.batches
    large: dict[str, np.ndarray] = {}
    for index, node in enumerate(run.model.graph.inputs):
        if is_float_tensor(node):
            values = [inputs[index].numpy().reshape(-1) for inputs in batches]
            if any(infinity_of(value) for value in values):
                large[node.name] = np.concatenate(values)
    return large


def _find_nan(run: MeasuredRun) -> dict[str, np.ndarray]:
    """Returns the nodes that hold NaN in the samples."""
    searches = (search_nonfinite(run.model, args, kwargs) for args, kwargs in run.samples or ())
    return {node.name: np.full(1, np.nan) for search in searches for node in search.nan}


class _Finder:
    """Finds the values that have parts."""

    def __init__(self, view: View, chains: Chains) -> None:
        self.view, self.chains = view, chains
        self._by_output = {chain.output: chain for chain in chains.values()}

    def find_values(self) -> dict[TensorNode, tuple[Expr, ...]]:
        """Returns the values that are joined and rounded, and those of which several slices are taken.

        Returns:
            value -> its slices; () for the result of a join.
        """
        view = self.view
        joined: dict[TensorNode, tuple[Expr, ...]] = {}
        slices: dict[TensorNode, list[Expr]] = {}
        for expr in view.order:
            call = view.calls.get(expr)
            if call is None:
                continue
            if call.role is Role.CONCAT and not view.choices[expr].quantize and view.is_data(call.out):
                if view.on_integers(expr) or self.is_rounded_behind(call.out):
                    joined[call.out] = ()
            elif call.kind in _SLICES and view.carries(expr):
                slices.setdefault(self.source(call.inputs[0]), []).append(expr)
        sliced = {
            value: tuple(exprs)
            for value, exprs in slices.items()
            if value not in joined and value in self._by_output and sum(len(e.outputs) for e in exprs) > 1
        }
        return joined | sliced

    def find_outputs(self) -> dict[TensorNode, TensorNode]:
        """Returns each output that is rounded -> the result of an op that it is, moved or not."""
        rounded = {}
        for node in self.view.outputs:
            source = self.source(node) if isinstance(node, TensorNode) else None
            chain = None if source is None else self._by_output.get(source)
            if chain is None or self.view.backend.rounds_for_readers:
                continue
            choice = output_choice(self.view, chain)
            if choice.quantize_output and choice.output is None and not choice.quantize:
                rounded[node] = source
        return rounded

    def find_last_values(self) -> list[TensorNode]:
        """Returns the rounded values that reach an output through no other layer, in execution order.

        They are the results of ops on integers, and those of ops in float that ops on integers read.
        """
        lasts: set[Node] = set()
        visited: set[Node] = set()
        stack: list[Node] = list(self.view.outputs)
        while stack:
            node = stack.pop()
            if node in visited or not self.view.is_data(node):
                continue
            visited.add(node)
            if isinstance(node, TensorNode) and self._is_rounded(node):
                lasts.add(node)
            call = self.view.calls.get(node.expr)
            if call is not None and call.role is not Role.COMPUTE:
                stack.extend(call.inputs)
        return [node for expr in self.view.order for node in expr.outputs if node in lasts]

    def _is_rounded(self, node: TensorNode) -> bool:
        """Returns whether ``node`` is a result that is rounded, by no rule of its own, or by its readers."""
        chain, call = self._by_output.get(node), self.view.calls.get(node.expr)
        if chain is None:
            moved = call is not None and self.view.carries(node.expr) and call.kind not in _SLICES
            return node.expr not in self.chains and not moved and self.is_rounded_behind(node)
        if self.view.backend.rounds_for_readers and not self.is_rounded_behind(node):
            return False
        choice = output_choice(self.view, chain)
        return choice.quantize_output and choice.output is None and not choice.quantize

    def gives_columns(self, node: TensorNode, run: MeasuredRun) -> bool:
        """Returns whether the columns of ``node`` can have known ranges; a layer's have with enough rows."""
        chain = self._by_output.get(node)
        layer = chain is not None and self.view.calls[chain.head].role is Role.COMPUTE
        return not layer or run.columns_are_known(node)

    def is_rounded_behind(self, node: TensorNode) -> bool:
        """Returns whether an op on integers reads ``node``, moved or not."""
        return any(
            self.view.on_integers(user)
            or (self.view.carries(user) and any(map(self.is_rounded_behind, user.outputs)))
            for user in node.users
        )

    def source(self, node: TensorNode) -> TensorNode:
        """Returns the value that ``node`` is, through moves that keep all of it."""
        call = self.view.calls.get(node.expr)
        while call is not None and self.view.carries(node.expr) and call.kind not in _SLICES:
            node = call.inputs[0]
            call = self.view.calls.get(node.expr)
        return node

    def parts(self, value: TensorNode, slices: Iterable[Expr]) -> list[TensorNode]:
        """Returns the results of ``slices``, or without slices the inputs of the op that joins ``value``."""
        sliced = [node for expr in slices for node in expr.outputs]
        return sliced or list(dict.fromkeys(self.view.calls[value.expr].inputs))

    def scheme(self, value: TensorNode) -> QScheme:
        """Returns the scheme by which ``value`` is rounded; the backend's for no op's result."""
        chain = self._by_output.get(value)
        if chain is None:
            return self.view.backend.activation
        choice = output_choice(self.view, chain)
        return choice.output or choice.activation.scheme

    def only_leaves(self, node: TensorNode) -> bool:
        """Returns whether nothing but moves to the graph's outputs reads ``node``."""
        users = [user for user in node.users if any(map(self.view.is_data, user.outputs))]
        moved = all(self.view.carries(user) and all(map(self.only_leaves, user.outputs)) for user in users)
        return moved and (bool(users) or node in self.view.outputs)

    def within_one(self, part: TensorNode) -> bool:
        """Returns whether the function that computes ``part``, before it is moved, has values in -1 to 1."""
        call = self.view.calls.get(self.source(part).expr)
        return call is not None and call.kind in _WITHIN_ONE


class _Decision:
    """Marks the ops and results that stay in float.

    Args:
        finder: finds values and their parts.
        trials: what rounding costs; None if the graph did not run.
        ranges: the ranges of the values; none if the graph did not run.
        generated: whether the ranges come from generated inputs.

    Attributes:
        floats: expr that stays in float -> why.
        results: result that stays in float -> why.
    """

    def __init__(
        self,
        finder: _Finder,
        trials: Trials | None,
        ranges: Mapping[Node, tuple[float, float]],
        generated: bool,
    ) -> None:
        self.finder, self.view, self.trials, self.generated = finder, finder.view, trials, generated
        self.ranges = ranges
        self.floats: dict[Expr, str] = {}
        self.results: dict[Node, str] = {}
        self._spoiled: dict[Node, bool] = {}

    def decide(self, value: TensorNode, slices: Sequence[Expr]) -> None:
        """Decides for a value that is joined, or of which ``slices`` are taken."""
        parts = self.finder.parts(value, slices)
        reason = self._differ(value, parts)
        leaves = not slices and self.finder.only_leaves(value)
        if not reason and leaves and self.generated:
            reason = self._differ_in_bounds(parts)
        if not reason or value.expr in self.floats or not (leaves or self._is_spoiled(value)):
            return
        if not slices:
            self._leave_join(value, reason)
            return
        self._leave_result(value, reason)
        for expr in slices:
            self._leave_moves(expr, value, reason)

    def decide_output(self, output: TensorNode, value: TensorNode) -> None:
        """Decides for ``output``, which is ``value``, moved or not: its columns may have unlike ranges."""
        if self.trials is None or value.expr in self.floats or value in self.results:
            return
        groups = [group for group in self.trials.groups if group.end is output]
        if len(groups) < 2 or not self._is_spoiled(value):
            return
        trial = self.trials.round({value: self.finder.scheme(value)})
        reason = f"{trial.describe()} on one grid with the other columns"
        if self.view.calls[value.expr].role is Role.CONCAT:
            self._leave_join(value, reason)
        else:
            self._leave_result(value, reason)

    def leave_decoders(self) -> None:
        """Leaves the arithmetic in float whose values end in joins in float that leave the graph, alone.

        Nothing there reads integers. Each grid on the way would cost boxes up to half a step of it.
        """
        ending: dict[Expr, str] = {}  # expr -> the join in which its values end
        for expr in reversed(self.view.order):
            call, chain = self.view.calls.get(expr), self.finder.chains.get(expr)
            if call is None:
                continue
            join = self._reading_join(expr, ending)
            if call.role is Role.CONCAT:
                if expr in self.floats and (join or self.finder.only_leaves(call.out)):
                    ending[expr] = call.out.name
            elif join and self.view.carries(expr):
                ending[expr] = join
            elif join and chain is not None and chain.tail is expr and self._decodes(chain.exprs):
                ending.update(dict.fromkeys(chain.exprs, join))
                reason = f"its values end in {join}, which stays in float"
                self.floats.update(dict.fromkeys(chain.exprs, reason))

    def _reading_join(self, expr: Expr, ending: Mapping[Expr, str]) -> str:
        """Returns the join in which the values of ``expr`` end; "" if anything else reads them."""
        readers = [user for out in expr.outputs for user in out.users]
        readers = [user for user in readers if any(map(self.view.is_data, user.outputs))]
        if not readers or any(out in self.view.outputs for out in expr.outputs):
            return ""
        return ending[readers[0]] if all(user in ending for user in readers) else ""

    def _decodes(self, exprs: Iterable[Expr]) -> bool:
        """Returns whether ``exprs`` are arithmetic without a layer, and no rule asks for integers."""
        return all(
            self.view.calls[expr].role in _ARITHMETIC and not self.view.choices[expr].quantize
            for expr in exprs
        )

    def decide_last_values(self, values: Sequence[TensorNode]) -> None:
        """Decides for results that reach an output through no other layer, by groups of their columns."""
        candidates = [value for value in values if not self._is_left(value)]
        if self.trials is None or not candidates:
            return
        for value, groups in self.trials.column_ranges(candidates).items():
            reason = self._columns_differ(value, groups)
            if not reason or self._is_left(value) or not self._is_spoiled(value):
                continue
            if value.expr in self.finder.chains:
                self._leave_result(value, reason)
            self._leave_readers(value, f"it reads {value.name}, where {reason}")

    def _is_left(self, value: TensorNode) -> bool:
        """Returns whether the result of an op on integers stays in float already; not so for others."""
        return value in self.results or (value.expr in self.finder.chains and value.expr in self.floats)

    def _columns_differ(self, value: TensorNode, groups: Mapping[str, tuple[float, float]]) -> str:
        """Says which of the column groups of ``value`` keeps too few levels of one grid; "" if none."""
        spans = {name: span for name, ends in groups.items() if (span := _span(*ends)) > 0}
        if len(spans) < 2 or value not in self.ranges:
            return ""
        small = min(spans, key=spans.__getitem__)
        grid = 2 ** self.finder.scheme(value).bits
        levels = spans[small] / _span(*self.ranges[value]) * grid
        if levels >= _LEAST_LEVELS or max(spans.values()) < _LIKE * spans[small]:
            return ""
        low, high = groups[small]
        return (
            f"{small} from {low:.3g} to {high:.3g} would keep {_describe_levels(levels, grid)} on one grid "
            "with the other columns"
        )

    def _differ(self, value: TensorNode, parts: Sequence[TensorNode]) -> str:
        """Says how the ranges of ``parts`` differ; "" if each keeps enough levels of one grid."""
        ranges = self.ranges
        spans = {node: _span(*ranges[node]) for node in parts if node in ranges}
        spans = {node: span for node, span in spans.items() if span > 0}
        if len(spans) < 2 or value not in ranges:
            return ""
        small, large = min(spans, key=spans.__getitem__), max(spans, key=spans.__getitem__)
        grid = 2 ** self.finder.scheme(value).bits
        levels = spans[small] / _span(*ranges[value]) * grid
        if levels >= _LEAST_LEVELS or spans[large] < _LIKE * spans[small]:
            return ""
        (a, b), (c, d) = ranges[small], ranges[large]
        return (
            f"{small.name} from {a:.3g} to {b:.3g} would keep {_describe_levels(levels, grid)} on one grid "
            f"with {large.name} from {c:.3g} to {d:.3g}"
        )

    def _differ_in_bounds(self, parts: Sequence[TensorNode]) -> str:
        """Says which of ``parts`` is bounded by its function and which is not; "" if all or none are."""
        data = [node for node in parts if self.view.is_data(node)]
        bounded = [node for node in data if self.finder.within_one(node)]
        free = [node for node in data if node not in bounded]
        if not bounded or not free:
            return ""
        return f"{bounded[0].name} lies within -1 and 1, and {free[0].name} has no such bound"

    def _is_spoiled(self, value: TensorNode) -> bool:
        """Returns whether rounding only ``value`` costs a group of columns of an output too much."""
        if value not in self._spoiled:
            trial = None if self.trials is None else self.trials.round({value: self.finder.scheme(value)})
            self._spoiled[value] = trial is not None and not trial.keeps(_HARMLESS)
        return self._spoiled[value]

    def _leave_result(self, value: TensorNode, reason: str) -> None:
        """Leaves the result of an op in float, and the op where its kernel gives only integers."""
        chain = self.finder.chains[value.expr]
        if self.view.backend.integer_layers and self.view.calls[chain.head].role is Role.COMPUTE:
            self.floats.update(dict.fromkeys(chain.exprs, reason))
        else:
            self.results[value] = reason

    def _leave_join(self, value: TensorNode, reason: str) -> None:
        if self.view.on_integers(value.expr):
            self.floats[value.expr] = reason
        self._leave_readers(value, f"it reads {value.name}, where {reason}")

    def _leave_readers(self, value: TensorNode, reason: str) -> None:
        """Leaves what would round ``value`` again in float, up to the next layers or slices."""
        for user in value.users:
            call, chain = self.view.calls.get(user), self.finder.chains.get(user)
            moves = self.view.carries(user)
            if call is None or user in self.floats or not (moves or chain is not None):
                continue
            exprs = (user,) if chain is None else chain.exprs
            self.floats.update(dict.fromkeys(exprs, reason))
            if call.kind in _SLICES or call.role in (Role.COMPUTE, Role.NORM):
                continue
            for node in exprs[-1].outputs:
                if moves or self._is_spoiled(node):
                    self._leave_readers(node, reason)

    def _leave_moves(self, expr: Expr, value: TensorNode, reason: str) -> None:
        """Leaves ``expr`` in float, and the moves between it and ``value``."""
        while expr is not value.expr:
            self.floats[expr] = reason
            expr = self.view.calls[expr].inputs[0].expr


def _describe_levels(levels: float, grid: int) -> str:
    """Says how many levels of a grid are kept, and how many bits that is."""
    count = max(round(levels), 1)
    bits = round(math.log2(count))
    return f"{count} of {grid} levels ({bits} bit{'' if bits == 1 else 's'})"


def _span(low: float, high: float) -> float:
    """Returns the width of a range that is widened to contain 0."""
    return max(high, 0.0) - min(low, 0.0)


# Selecting: keeps in float what ranks rows, and what is computed with the rows that a selection has
# picked.

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
