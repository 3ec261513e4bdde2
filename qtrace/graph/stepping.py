"""Runs a graph layer by layer, also out of its order."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from megengine import Tensor
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, Expr
from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.errors import GraphError
from qtrace.graph.interpreter import Interpreter, fixed_nodes, interpret, last_uses, name_failures
from qtrace.graph.kernels import PART_BYTES, count_bytes, large_reads, read_array
from qtrace.process import LargeFrees


def write_order(traced: TracedModule, order: Sequence[Expr], removed: set[Expr]) -> None:
    """Makes ``order`` without ``removed`` the exprs of a flat graph, and drops dead ones.

    An expr that reads what a later one computes moves after that.

    Raises:
        GraphError: when an expr needs its own result, or a removed one's output is used.
    """
    graph = traced.graph
    kept = [expr for expr in order if expr not in removed]
    late = _late_read(kept)
    ordered = kept if late is None else order_together(kept, ())
    if ordered is None:
        raise GraphError(f"{late}: it would need its own result.")
    graph._exprs = ordered
    for expr in order:
        if expr in removed:
            _unlink(graph, expr, removed)
    finish(traced)


def _late_read(order: Sequence[Expr]) -> str | None:
    """Returns which expr reads a node that is produced later; None if there is none."""
    unproduced = {n for e in order for n in e.outputs}
    for expr in order:
        node = next((n for n in expr.inputs if n in unproduced), None)
        if node is not None:
            return f"{expr} reads {node._name}, which is produced later"
        unproduced.difference_update(expr.outputs)
    return None


def _unlink(graph: Any, expr: Expr, removed: set[Expr]) -> None:
    outputs = set(graph._outputs)
    for node in expr.outputs:
        readers = [u for u in node.users if u not in removed]
        if readers or node in outputs:
            raise GraphError(
                f"{node._name} cannot be removed: it is still used by {readers or 'the outputs'}."
            )
        graph._namespace.unassociate_name_with_obj(node)
    for node in expr.inputs:
        node.users = [u for u in node.users if u is not expr]


def finish(traced: TracedModule) -> None:
    """Drops dead exprs and renews users, back references and ids, in time linear in the exprs.

    From then on, errors of a direct call name the op that fails.
    """
    name_failures(traced)
    graph = traced.graph
    live = set(graph._outputs)
    live_exprs: list[Expr] = []
    for expr in reversed(graph._exprs):
        if expr._disable_remove or not expr.outputs or any(n in live for n in expr.outputs):
            live_exprs.append(expr)
            live.update(n for n in expr.inputs)
        else:
            for node in expr.outputs:
                graph._namespace.used_names[node._name] = None
    live_exprs.reverse()
    graph._exprs = live_exprs
    users: dict[Node, list[Expr]] = {}
    for expr in live_exprs:
        for node in expr.inputs:
            users.setdefault(node, []).append(expr)
    for node in (*graph._inputs, *(n for e in live_exprs for n in e.outputs)):
        node.users = users.get(node, [])
    traced._update_ref()
    graph._reset_ids()


def exchange_function(traced: TracedModule, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replaces the function ``old`` by ``new``, which takes the same arguments, in every call."""
    for expr in traced.graph._exprs:
        if isinstance(expr, CallFunction) and expr.func is old:
            expr.func = new


def order_together(exprs: Sequence[Expr], groups: Sequence[Sequence[Expr]]) -> list[Expr] | None:
    """Orders exprs so that they compute the same and the members of each group follow each other.

    The order changes only as far as necessary. An in-place method may move past readers of its input, since
    `qtrace.graph.interpreter.interpret` gives its result a value of its own. Nothing moves past an expr
    without outputs.

    Args:
        exprs: all exprs of a flat graph. One that reads what a later one computes moves after that.
        groups: exprs of the graph, none in two groups.

    Returns:
        The order; None if there is none, since a member of a group needs the result of another member,
        directly or through a second group, or an expr needs its own result.
    """
    place = {expr: i for i, expr in enumerate(exprs)}
    unit = list(range(len(exprs)))  # the place of the first member stands for a group
    members = {i: [i] for i in unit}
    for group in groups:
        first, *others = sorted(place[expr] for expr in group)
        for other in others:
            unit[other] = first
            members[first] += members.pop(other)
    return _sort_units(exprs, unit, members)


def _sort_units(exprs: Sequence[Expr], unit: list[int], members: dict[int, list[int]]) -> list[Expr] | None:
    """Sorts the units topologically, the smallest number first among those that are ready."""
    needs = _needs(exprs, unit)
    readers: dict[int, list[int]] = {}
    for number, needed in needs.items():
        for source in needed:
            readers.setdefault(source, []).append(number)
    waiting = {number: len(needed) for number, needed in needs.items()}
    ready = [number for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[Expr] = []
    while ready:
        number = heapq.heappop(ready)
        order += [exprs[i] for i in members[number]]
        for reader in readers.get(number, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order if len(order) == len(exprs) else None


def _needs(exprs: Sequence[Expr], unit: list[int]) -> dict[int, set[int]]:
    """Maps each unit to the units that it needs; a unit needs itself if a member needs another member."""
    needs: dict[int, set[int]] = {number: set() for number in unit}
    producers = {node: i for i, expr in enumerate(exprs) for node in expr.outputs}
    barrier: list[int] = []  # the last expr without outputs
    after_barrier: list[int] = []  # the exprs after it
    for i, expr in enumerate(exprs):
        needed = {producers[node] for node in expr.inputs if node in producers}
        needed.update(barrier if expr.outputs else (*barrier, *after_barrier))
        needs[unit[i]].update(unit[j] for j in needed)
        after_barrier.append(i)
        if not expr.outputs:
            barrier, after_barrier = [i], []
    return needs


Use = Callable[[int, list[np.ndarray]], Any]
"""Maps the index of a batch and values of it to what is kept of them."""


def keep(batch: int, values: list[np.ndarray]) -> list[np.ndarray]:
    """Keeps all values of a batch."""
    return values


@dataclass(frozen=True)
class GraphSegment:
    """Neighbouring exprs of a graph, with the values that they read.

    Attributes:
        traced: a flat traced module.
        exprs: exprs of its graph, in the order of computation.
        fixed: node that the exprs read -> its value, if it depends only on parameters.
        batches: for each batch, node that the exprs read from outside -> its value.
        outputs: nodes that the exprs compute, and whose values are asked for.
    """

    traced: TracedModule
    exprs: Sequence[Expr]
    fixed: Mapping[Node, np.ndarray]
    batches: Sequence[Mapping[TensorNode, np.ndarray]]
    outputs: Sequence[TensorNode]


SegmentRun = Callable[[Use], list[Any] | None]
"""Computes a segment once, on any thread, and returns what a ``Use`` keeps of each batch.

The ``Use`` is called in the order of the batches, on that thread. None where the engine cannot compute it."""


class SegmentEngine(Protocol):
    """Computes neighbouring exprs of a graph at once, faster than MegEngine one by one."""

    def begin(self, segment: GraphSegment) -> SegmentRun | None:
        """Begins to compute a segment, with the parameters and phases of this moment, which may then change.

        Returns:
            What computes the segment; None if this engine cannot.
        """


class RefusedRunError(Exception):
    """The engine leaves the graph to MegEngine."""


class WholeEngine:
    """An engine that computes a graph as a whole or not at all.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: SegmentEngine) -> None:
        self._engine = engine

    def begin(self, segment: GraphSegment) -> Callable[[Use], list[Any]]:
        """Does what the engine does; see `SegmentEngine`.

        Raises:
            RefusedRunError: when the engine cannot compute the segment; the run raises it, too.
        """
        run = self._engine.begin(segment)
        if run is None:
            raise RefusedRunError

        def compute(use: Use) -> list[Any]:
            results = run(use)
            if results is None:
                raise RefusedRunError
            return results

        return compute


def as_array(value: Any) -> np.ndarray:
    """Returns a Tensor's value, or an array as it is."""
    return value if isinstance(value, np.ndarray) else np.asarray(read_array(value))


class Stepper:
    """The values that are alive before one expr of the graph, for every batch.

    An algorithm that changes the parameters of one layer after the other computes each expr once a batch,
    not the whole graph once a layer. Values that depend only on parameters are computed when read.

    Args:
        traced: a flat traced module.
        batches: pairs of positional and keyword arguments; all batches are in memory at once.
        together: groups of exprs whose members are computed directly after each other. The graph's order
            changes as far as necessary.
        engine: computes what lies between two exprs at once, where it can; values are then arrays. None for
            MegEngine, expr by expr, with Tensors as values.

    Attributes:
        count: the number of batches.

    Raises:
        GraphError: when the exprs of a group cannot stand together.
    """

    def __init__(
        self,
        traced: TracedModule,
        batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
        together: Sequence[Sequence[Expr]] = (),
        engine: SegmentEngine | None = None,
    ) -> None:
        self.traced, self.graph, self._engine = traced, traced.graph, engine
        steps = order_together(self.graph._exprs, together)
        if steps is None:
            raise GraphError("exprs that are to be computed side by side need the results of one another.")
        self._steps = steps
        self._order = {e: i for i, e in enumerate(steps)}
        fixed = fixed_nodes(traced)
        self._fixed = {e for e in self.graph._exprs if all(n in fixed for n in e.inputs)}
        self._modules = {n for n in self.graph._inputs if isinstance(n, ModuleNode)}
        self._known: dict[Node, Any] = {}
        self._ahead: dict[tuple[Any, Any], Any] = {}
        self._frees, self._large = last_uses(self.graph, steps), large_reads(self.graph)
        self._memory = LargeFrees(PART_BYTES // 4)
        self._at = 0
        self._values: list[dict[Node, Any]] = []
        binder = Interpreter(traced)
        for args, kwargs in batches:
            inputs = binder.bind(args, kwargs)[1]
            self._values.append(dict(zip(self.graph._inputs, inputs, strict=True)))
        self.count = len(self._values)

    def advance(self, expr: Expr, known: Sequence[Mapping[Node, Any]] = ()) -> None:
        """Computes everything before ``expr``.

        Args:
            expr: an expr of the graph.
            known: for each batch, values that another stepper has computed; an engine does not compute them
                again.

        Raises:
            GraphError: when ``expr`` was passed already, or is not in the graph.
        """
        goal = self._order.get(expr, -1)
        if goal < self._at:
            raise GraphError(f"{expr} was passed already: a stepper only goes forward.")
        self._advance_to(goal, known)

    def watch(self, last: Expr, nodes: Sequence[TensorNode], use: Use) -> list[Any]:
        """Computes everything up to ``last``, itself included, and shows values to ``use``, batch by batch.

        The values are not kept, unless exprs after ``last`` read them.

        Args:
            last: an expr of the graph.
            nodes: outputs of exprs that are computed.
            use: maps the index of a batch and the values of ``nodes`` to what is kept of them.

        Returns:
            The results of ``use``, in the order of the batches.
        """
        stop = self._order[last] + 1
        steps = [step for step in self._steps[self._at : stop] if step not in self._fixed]
        freed = {node for step in steps for node in self._frees[step]}
        read_later = [node for step in steps for node in step.outputs if node not in freed]
        shown = len(nodes)

        def split(batch: int, values: list[np.ndarray]) -> tuple[Any, list[np.ndarray]]:
            return use(batch, values[:shown]), values[shown:]

        wanted = [*nodes, *read_later]
        computed = self._compute_at_once(
            _needed_steps(steps, wanted, set()), wanted, range(self.count), split
        )
        results = [
            self._watch_one(batch, steps, nodes, use)
            for batch in range(self.count if computed is None else 0)
        ]
        for values, (result, alive) in zip(self._values, computed or (), strict=False):
            results.append(result)
            for step in steps:
                self._free(step, values)
            values.update(zip(read_later, alive, strict=True))
        self._pass_to(stop)
        return results

    def _watch_one(self, batch: int, steps: Sequence[Expr], nodes: Sequence[Node], use: Use) -> Any:
        """Computes steps for one batch by MegEngine."""
        values, shown = self._values[batch], dict[Node, np.ndarray]()
        for step in steps:
            values.update(zip(step.outputs, self._run(step, values), strict=True))
            shown.update((node, as_array(values[node])) for node in step.outputs if node in nodes)
            self._free(step, values)
        return use(batch, [shown[node] for node in nodes])

    def finish(self, batch: int = 0) -> list[Any]:
        """Computes the whole graph and returns the values of its outputs for a batch."""
        self._advance_to(len(self._steps), ())
        return [self._get(node, self._values[batch]) for node in self.graph._outputs]

    def position(self, expr: Expr) -> int:
        """Returns the place of ``expr`` in the order of computation."""
        return self._order[expr]

    def alive(self, batch: int) -> Mapping[Node, Any]:
        """Returns the values that are alive for a batch."""
        return self._values[batch]

    def _advance_to(self, goal: int, known: Sequence[Mapping[Node, Any]]) -> None:
        for stop in self._stops(goal) if not known else (goal,):
            steps = [step for step in self._steps[self._at : stop] if step not in self._fixed]
            if not self._advance_at_once(steps, known):
                for step in steps:
                    self._advance_one(step)
            self._pass_to(stop)

    def _pass_to(self, stop: int) -> None:
        """Takes the steps before ``stop``, and drops the values that they were the last to read."""
        if stop > self._at:
            self._ahead.clear()
        for step in self._steps[self._at : stop]:
            for node in self._frees[step]:
                self._known.pop(node, None)
        self._at = stop

    def _stops(self, goal: int) -> Iterator[int]:
        """Yields places up to ``goal`` between which few parameters are read: an engine copies them all."""
        count = 0
        for place in range(self._at, goal):
            step = self._steps[place]
            if step in self._fixed:
                continue
            own = sum(count_bytes(node) for node in step.inputs if node.expr in self._fixed)
            if count and count + own > PART_BYTES and not self._ahead:
                yield place
                count = 0
            count += own
        yield goal

    def _advance_one(self, step: Expr) -> None:
        for batch, values in enumerate(self._values):
            results = self._ahead.pop((step, batch), None) or self._run(step, values)
            values.update((n, v) for n, v in zip(step.outputs, results, strict=True))
            self._free(step, values)

    def _advance_at_once(self, steps: list[Expr], known: Sequence[Mapping[Node, Any]]) -> bool:
        """Computes steps by the engine; returns False if MegEngine must compute them."""
        if self._engine is None:
            return False
        while steps and all((steps[0], batch) in self._ahead for batch in range(self.count)):
            self._advance_one(steps.pop(0))
        freed = {node for step in steps for node in self._frees[step]}
        read_later = [node for step in steps for node in step.outputs if node not in freed]
        own = {node for step in steps for node in step.outputs}
        for values, theirs in zip(self._values, known, strict=False):
            values.update((node, value) for node, value in theirs.items() if node in own)
        provided = {node for node in own if known and node in known[0]}
        missing = [node for node in read_later if node not in provided]
        needed = _needed_steps(steps, missing, provided)
        computed = self._compute_at_once(needed, missing, range(self.count))
        if computed is None:
            return False
        for values, results in zip(self._values, computed, strict=True):
            for step in steps:
                self._free(step, values)
            values.update(zip(missing, results, strict=True))
        return True

    def _compute_at_once(
        self,
        steps: Sequence[Expr],
        nodes: Sequence[Node],
        batches: Sequence[int],
        use: Use = keep,
    ) -> list[Any] | None:
        """Computes ``nodes`` of ``batches`` by the engine; None if it cannot."""
        if self._engine is None or not all(isinstance(node, TensorNode) for node in nodes):
            return None
        if not nodes:
            return [use(batch, []) for batch in batches]
        run = self._engine.begin(self._segment(steps, nodes, batches))
        return None if run is None else run(use)

    def _segment(
        self, steps: Sequence[Expr], nodes: Sequence[TensorNode], batches: Sequence[int]
    ) -> GraphSegment:
        own = {node for step in steps for node in step.outputs}
        read = [n for n in dict.fromkeys(_inputs(steps)) if n not in own]
        fixed = {n: as_array(self._get(n, self._values[0])) for n in read if n.expr in self._fixed}
        outside = [n for n in read if n not in fixed]
        inputs = [{n: as_array(self._values[i][n]) for n in outside} for i in batches]
        return GraphSegment(self.traced, steps, fixed, inputs, nodes)

    def _free(self, step: Expr, values: dict[Node, Any]) -> None:
        for key in self._frees[step]:
            if key not in self._modules:
                values.pop(key, None)

    def value(self, node: Node, batch: int) -> Any:
        """Returns the value of a node that is alive, or that depends only on parameters.

        Args:
            node: a node of the graph.
            batch: the index of the batch.
        """
        return self._get(node, self._values[batch])

    def outputs(self, expr: Expr, batch: int, along: Sequence[int] = ()) -> list[Any]:
        """Returns the outputs of ``expr``, the next one or one of its group, for a batch.

        They are computed once, until parameters change.

        Args:
            expr: the expr.
            batch: the index of the batch.
            along: indices of batches whose outputs are read next, which an engine computes with it.
        """
        key = expr, batch
        if key not in self._ahead:
            missing = [i for i in dict.fromkeys((batch, *along)) if (expr, i) not in self._ahead]
            computed = self._compute_at_once([expr], expr.outputs, missing)
            if computed is None:
                self._ahead[key] = self._run(expr, self._values[batch])
            else:
                self._ahead.update(((expr, i), r) for i, r in zip(missing, computed, strict=True))
        return list(self._ahead[key])

    def compute(self, exprs: Iterable[Expr], nodes: Iterable[Node], batch: int) -> list[Any]:
        """Returns the values of ``nodes`` after running ``exprs`` on the values that are alive."""
        values = dict(self._values[batch])
        for expr in exprs:
            results = self._run(expr, values)
            values.update((n, v) for n, v in zip(expr.outputs, results, strict=True))
        return [self._get(n, values) for n in nodes]

    def fork(self) -> Stepper:
        """Returns an independent stepper at the same expr."""
        twin = copy.copy(self)
        twin._known, twin._ahead, twin._values = {}, {}, [dict(values) for values in self._values]
        return twin

    def changed(self) -> None:
        """Discards the values that were computed from parameters; call it after changing parameters."""
        self._known.clear()
        self._ahead.clear()

    def _run(self, expr: Expr, values: dict[Node, Any]) -> Any:
        inputs = [self._get(n, values) for n in expr.inputs]
        results = interpret(expr, [Tensor(v) if isinstance(v, np.ndarray) else v for v in inputs])
        self._memory.note(self._large.get(expr, 0))
        return () if results is None else results

    def _get(self, node: Node, values: dict[Node, Any]) -> Any:
        if node in values:
            return values[node]
        if node not in self._known:
            expr = node.expr
            if expr not in self._fixed:
                raise GraphError(f"{node._name} lacks a value here: it is computed later, or was dropped.")
            results = self._run(expr, values)
            self._known.update((n, v) for n, v in zip(expr.outputs, results, strict=True))
        return self._known[node]


def _inputs(steps: Iterable[Expr]) -> Iterator[TensorNode]:
    """Yields the tensors that exprs read, also those that other exprs among them compute."""
    return (node for step in steps for node in step.inputs if isinstance(node, TensorNode))


def _needed_steps(steps: Sequence[Expr], nodes: Iterable[Node], known: set[Node]) -> list[Expr]:
    """Selects the steps that ``nodes`` depend on where the values of ``known`` are given."""
    wanted, needed = set(nodes), []
    for step in reversed(steps):
        if any(node in wanted for node in step.outputs):
            needed.append(step)
            wanted.update(node for node in step.inputs if node not in known)
    return needed[::-1]


def finish_whole(
    traced: TracedModule,
    batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    engine: SegmentEngine,
) -> list[list[np.ndarray]] | None:
    """Returns the outputs of a graph for each batch; None where the engine does not compute all of it.

    Args:
        traced: a flat graph in eval mode, in its present phases.
        batches: the arguments of each batch.
        engine: computes the whole graph.
    """
    try:
        stepper = Stepper(traced, batches, engine=WholeEngine(engine))
        return [[as_array(value) for value in stepper.finish(index)] for index in range(stepper.count)]
    except RefusedRunError:
        return None
