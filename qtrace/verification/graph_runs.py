"""Runs a graph in several ways at once: what they compute alike, from the same values, is computed once.

verify needs three runs of a graph for each batch: by itself, op by op on the runtime's integers, and in
float. Up to the first rounding all three have the same values, and up to the first integer that differs the
first two have. The lanes take each expr together, so that a kernel runs again in a lane only where one of its
inputs is another tensor there. Parameters, and what is computed only from them, such as rounded weights, are
computed once for all batches. MegEngine's kernels compute every value of the first lane and of float: the
op-by-op lane takes the runtime's integers, and numpy rounds what it compares with them.

Who reads a value waits for all that MegEngine was given. So the lane in float follows some exprs later, and
the first lane leads by some: their kernels run while integers are compared.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megengine.module import Module

from qtrace.comparing.selections import read_ranking, selects
from qtrace.graph.interpreter import fixed_nodes, interpret, last_uses, round_late
from qtrace.graph.kernels import PART_BYTES, count_bytes, large_reads
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TracedModule
from qtrace.graph.walk import called_graph, modules_of, owner
from qtrace.preparation.model import fake_quants, followers, is_quantized
from qtrace.process import LargeFrees
from qtrace.verification.selections import FirstOfEquals

_Values = dict[Node, Any]


class FloatLane(FirstOfEquals):
    """Runs a graph without its roundings, next to a lane that rounds."""


class TakingLane(FirstOfEquals, abc.ABC):
    """Runs a graph, and takes some results from elsewhere where it has other inputs than the first lane."""

    @abc.abstractmethod
    def takes(self, expr: Expr) -> bool:
        """Returns whether `take` gives the one result of an expr, whose last input is a Tensor."""

    @abc.abstractmethod
    def take(self, expr: Expr, inputs: Sequence[Any]) -> Any:
        """Returns the result of an expr.

        Args:
            expr: the expr.
            inputs: the values of ``expr.inputs``.
        """


@dataclass(frozen=True)
class _Plan:
    """What all runs of one graph share.

    Attributes:
        steps: the exprs that each run computes.
        frees: the nodes to free after each expr; under None, the inputs that nothing reads.
        fixed: the values of all other exprs.
        in_float: the nodes with other values without roundings.
    """

    steps: Sequence[Expr]
    frees: dict[Expr | None, list[Node]]
    fixed: _Values
    in_float: _Values


class Lanes:
    """Runs a traced module, which is not changed meanwhile, in lanes.

    Args:
        traced: the traced module, in eval mode whenever it runs.
        watched: names of nodes that hooks see in every run, though they may depend only on parameters: what
            a file computes of a rounded parameter is compared, too.

    Attributes:
        selecting: the exprs that rank scores or select rows.
    """

    def __init__(self, traced: TracedModule, watched: Collection[str] = ()) -> None:
        self.traced, self._watched = traced, frozenset(watched)
        self._plans: dict[int, _Plan] = {}
        self._phased: dict[Expr, list[Module]] = {}
        self._nested: set[Expr] = set()
        self._ranking: set[Expr] = set()
        self._large: dict[Expr, int] = {}
        self._memory = LargeFrees(PART_BYTES // 4)
        self.selecting: set[Expr] = set()

    def run(
        self, lanes: Sequence[FirstOfEquals], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[list[Any]]:
        """Runs the graph on the arguments of one call; hooks see what is watched or depends on these.

        Args:
            lanes: the lanes; of several, the first one replaces no value in its hook.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            For each lane the values of the graph's outputs.

        Raises:
            GraphError: when the arguments do not have the structure that was traced.
        """
        arg_def, inputs = lanes[0].bind(args, kwargs)
        graph = self.traced.argdef_graph_map[arg_def]
        plan = self._plan(graph)
        values = [plan.in_float.copy() if isinstance(lane, FloatLane) else {} for lane in lanes]
        values[0] = plan.fixed.copy()
        for node in graph._inputs:
            value = inputs.pop(0)
            for lane, held in zip(lanes, values, strict=True):
                _keep(lane, held, values[0], (node,), (value,))
        _free(plan.frees[None], values)
        follower = _Follower(self, lanes, values, plan)
        leading = [i for i in range(len(lanes)) if i not in follower.places]
        pace = _Pace(follower, _Leader(self, lanes[0], values[0], plan.steps))
        for expr in plan.steps:
            computed = self._step(expr, [lanes[i] for i in leading], [values[i] for i in leading], pace)
            follower.add(expr, computed)
            if expr in self._large:
                self._memory.note(self._large[expr])
        follower.catch_up()
        return [[_read(held, values[0], node) for node in graph._outputs] for held in values]

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins to compute what no batch changes, for the graph of some arguments.

        Raises:
            GraphError: when the arguments do not have the structure that was traced.
        """
        self._plan(self.traced.argdef_graph_map[FirstOfEquals(self.traced).bind(args, kwargs)[0]])

    def _step(
        self,
        expr: Expr,
        lanes: Sequence[FirstOfEquals],
        values: Sequence[_Values],
        pace: _Pace | None = None,
    ) -> Sequence[Any] | None:
        """Computes one expr in lanes, and returns what the first one shares with others.

        Args:
            expr: the expr.
            lanes: the lanes.
            values: the values of each lane.
            pace: what MegEngine computes while integers are compared; None for nothing.
        """
        first = values[0]
        inputs = [first[node] for node in expr.inputs]
        computed: Sequence[Any] | None = None
        if expr not in self._nested and not _takes(lanes[0], expr):
            computed = interpret(expr, inputs) if pace is None else pace.leader.compute(expr, inputs)
        results: list[Sequence[Any]] = []
        taken: dict[int, Sequence[Any]] = {}
        for place, (lane, held) in enumerate(zip(lanes, values, strict=True)):
            if _takes(lane, expr) and (place == 0 or any(node in held for node in expr.inputs)):
                taken[place] = [_read(held, first, node) for node in expr.inputs]
                results.append(())
            else:
                results.append(self.compute(expr, lane, held, first, computed))
        if pace is not None and (taken or self.is_watched(expr)):
            for value in (*(own[-1] for own in taken.values()), *itertools.chain(*results)):
                value.numpy()  # before more is given to MegEngine
            pace.follower.catch_up()
            pace.leader.lead(expr, results[0])
        for place, own in taken.items():
            results[place] = (lanes[place].take(expr, own),)  # type: ignore[attr-defined]
        for lane, held, own in zip(lanes, values, results, strict=True):
            _keep(lane, held, first, expr.outputs, own)
        return computed

    def compute(
        self, expr: Expr, lane: FirstOfEquals, held: _Values, first: _Values, computed: Sequence[Any] | None
    ) -> Sequence[Any]:
        """Returns the results of an expr in one lane.

        Args:
            expr: the expr.
            lane: the lane.
            held: the values of the lane that differ from the first lane's; all of the first lane.
            first: the values of the first lane.
            computed: the results from these values; None if each lane computes the expr by itself.
        """
        differs = held is not first and any(node in held for node in expr.inputs)
        own = [_read(held, first, node) for node in expr.inputs]
        if expr in self._nested:
            outputs = lane.run_expr(expr, own)
        else:
            outputs = computed
            phased = self._phased.get(expr, ()) if isinstance(lane, FloatLane) else ()
            if lane.tape.replays_whole(expr):
                outputs = None
            elif differs or phased or computed is None:
                with _float_phase(phased):
                    outputs = interpret(expr, own)
            if expr in self.selecting or expr in self._ranking:
                outputs = lane.follow(expr, own, outputs)
        return () if outputs is None else outputs

    def may_lead(self, expr: Expr) -> bool:
        """Returns whether an expr may be computed before its turn: it selects nothing, and is small."""
        apart = expr in self._nested or expr in self._ranking or expr in self.selecting
        return not apart and expr not in self._large

    def _plan(self, graph: Any) -> _Plan:
        """Returns the plan of a graph of the module."""
        if id(graph) not in self._plans:
            self._read(graph)
            self._plans[id(graph)] = self._make(graph)
        return self._plans[id(graph)]

    def _read(self, graph: Any) -> None:
        """Sorts the exprs of a graph out."""
        phased = set[int]()
        if is_quantized(self.traced):
            phased = {id(module) for module in (*fake_quants(self.traced), *followers(self.traced))}
        self._large.update(large_reads(graph))
        for expr in graph._exprs:
            module = owner(expr)
            inside = [] if module is None or not phased else modules_of(module)
            if module is not None and (own := [m for m in inside if id(m) in phased]):
                self._phased[expr] = own
            if called_graph(expr) is not None:
                self._nested.add(expr)
            if read_ranking(expr) is not None:
                self._ranking.add(expr)
            if selects(expr):
                self.selecting.add(expr)

    def is_watched(self, expr: Expr) -> bool:
        """Returns whether hooks see the results of an expr in every run."""
        return any(node.name in self._watched for node in expr.outputs)

    def _make(self, graph: Any) -> _Plan:
        """Computes what depends only on parameters, with roundings and without."""
        kept_out = self._nested | self._ranking | self.selecting
        known = (
            set[Node]()
            if len(self.traced.argdef_graph_map) > 1
            else fixed_nodes(self.traced, lambda expr: expr in kept_out or self.is_watched(expr))
        )
        exprs = [e for e in graph._exprs if e.outputs and all(node in known for node in e.outputs)]
        if sum(_bytes(e) for e in exprs) > PART_BYTES:
            exprs = [e for e in exprs if isinstance(e, (GetAttr, Constant))]
        first: _Values = dict.fromkeys(graph._inputs[:1], self.traced)
        in_float: _Values = {}
        lanes = (FirstOfEquals(self.traced), FloatLane(self.traced))
        for expr in exprs:
            self._step(expr, lanes, (first, in_float))
        fixed = set(exprs)
        steps = round_late([expr for expr in graph._exprs if expr not in fixed], self._large)
        frees = last_uses(graph, steps)
        read = {node for expr in steps for node in expr.inputs} | set(graph._outputs)
        return _Plan(
            steps, frees, *({n: v for n, v in part.items() if n in read} for part in (first, in_float))
        )


class _Follower:
    """Runs the lanes in float some exprs after the others, and frees what all lanes are done with.

    Args:
        owner: the lanes of the graph.
        lanes: all lanes.
        values: the values of each.
        plan: what all runs share.

    Attributes:
        places: the places of the lanes that follow.
    """

    def __init__(
        self, owner: Lanes, lanes: Sequence[FirstOfEquals], values: Sequence[_Values], plan: _Plan
    ) -> None:
        self._owner, self._values, self._plan = owner, values, plan
        self.places = [i for i, lane in enumerate(lanes) if i and isinstance(lane, FloatLane)]
        self._lanes = [(lanes[i], values[i]) for i in self.places]
        self._waiting: list[tuple[Expr, Sequence[Any] | None]] = []
        self._bytes = 0

    def add(self, expr: Expr, computed: Sequence[Any] | None) -> None:
        """Takes an expr that the other lanes have computed, and what the first of them shares."""
        self._waiting.append((expr, computed))
        self._bytes += _bytes(expr)
        if self._bytes > PART_BYTES or not self._lanes:
            self.catch_up()

    def catch_up(self) -> None:
        """Computes what the other lanes have computed."""
        first = self._values[0]
        for expr, computed in self._waiting:
            for lane, held in self._lanes:
                results = self._owner.compute(expr, lane, held, first, computed)
                _keep(lane, held, first, expr.outputs, results)
            _free(self._plan.frees[expr], self._values)
        self._waiting.clear()
        self._bytes = 0


class _Leader:
    """Computes in the first lane what comes after a value that is read, up to the next one.

    Args:
        owner: the lanes of the graph.
        lane: the first lane. It leads if its attribute ``keeps_values`` is true: its hook replaces nothing.
        first: its values.
        steps: the exprs that the run computes.
    """

    def __init__(self, owner: Lanes, lane: FirstOfEquals, first: _Values, steps: Sequence[Expr]) -> None:
        self._owner, self._first, self._steps = owner, first, steps
        self._leads = bool(getattr(lane, "keeps_values", False))
        self._places = {expr: place for place, expr in enumerate(steps)} if self._leads else {}
        self._results: dict[Expr, Sequence[Any] | None] = {}
        self._values: _Values = {}
        self._read: Sequence[Node] = ()  # the nodes after which it has led

    def compute(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the results of an expr, which may be there already."""
        if expr not in self._results:
            return interpret(expr, inputs)
        for node in expr.outputs:
            self._values.pop(node, None)
        return self._results.pop(expr)

    def lead(self, expr: Expr, results: Sequence[Any]) -> None:
        """Computes the exprs after one.

        Args:
            expr: the last expr that the first lane has computed.
            results: its results.
        """
        if not self._leads:
            return
        for node in self._read:
            self._values.pop(node, None)
        self._read = expr.outputs
        self._values.update(zip(expr.outputs, results, strict=True))
        start, size = self._places[expr] + 1, 0
        for behind in self._steps[start:]:
            size += _bytes(behind)
            if behind in self._results:
                continue
            if size > PART_BYTES or not self._owner.may_lead(behind):
                return
            outputs = interpret(behind, [_read(self._values, self._first, node) for node in behind.inputs])
            self._results[behind] = outputs
            self._values.update(zip(behind.outputs, outputs or (), strict=True))
            if self._owner.is_watched(behind):
                return


@dataclass(frozen=True)
class _Pace:
    """What MegEngine is given between a value that is read and the comparison of its integers."""

    follower: _Follower
    leader: _Leader


def _takes(lane: FirstOfEquals, expr: Expr) -> bool:
    return isinstance(lane, TakingLane) and lane.takes(expr)


def _keep(
    lane: FirstOfEquals, held: _Values, first: _Values, nodes: Sequence[Node], results: Sequence[Any]
) -> None:
    """Shows new values to the hook of a lane; keeps the first lane's, and what differs from them."""
    for node, result in zip(nodes, results, strict=True):
        value = lane.on_node(node, result)
        if held is first or value is not first[node]:
            held[node] = value


def _read(held: _Values, first: _Values, node: Node) -> Any:
    return held[node] if node in held else first[node]


def _free(nodes: Sequence[Node], values: Sequence[_Values]) -> None:
    for node in nodes:
        for held in values:
            held.pop(node, None)


def _bytes(expr: Expr) -> int:
    """Returns the size of what an expr computes; parameters are there already."""
    return 0 if isinstance(expr, (GetAttr, Constant)) else sum(map(count_bytes, expr.outputs))


@contextmanager
def _float_phase(modules: Sequence[Any]) -> Iterator[None]:
    old = [module.phase for module in modules]
    try:
        for module in modules:
            module.phase = "float"
        yield
    finally:
        for module, phase in zip(modules, old, strict=True):
            module.phase = phase
