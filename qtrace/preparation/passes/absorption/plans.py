"""Walks from a constant op to the layers that can absorb it, towards the inputs or the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from qtrace import ops
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import users
from qtrace.ops import OpCall
from qtrace.preparation.passes.absorption.constants import ConstantOp, computed_constants, read_constant_op
from qtrace.preparation.passes.absorption.crossings import BlockedError, pass_backward, pass_forward
from qtrace.preparation.passes.absorption.layers import LAYERS, Change, change_of_input, change_of_result
from qtrace.preparation.passes.absorption.maps import LinearMap
from qtrace.preparation.passes.absorption.moves import MOVES, element_places

__all__ = ["AbsorptionPlan", "Planner"]

_Step = tuple[TensorNode, LinearMap, Expr]


@dataclass
class AbsorptionPlan:
    """The ops to remove, and the changes of layers that make up for them.

    Attributes:
        removed: constant ops: the one that is absorbed, and those that its map met on the way.
        changes: the changes of layers, in the order in which they are written.
    """

    removed: list[Expr]
    changes: list[Change] = field(default_factory=list)


class Planner:
    """Plans the absorption of constant ops in one graph, which the caller edits between two plans.

    A walk that ends where no map passes is remembered at every node on its way, so that all walks together
    take time linear in the graph.

    Args:
        traced: a flat, expanded traced module.
        norms: whether BatchNorms in evaluation are constant ops.
    """

    def __init__(self, traced: TracedModule, norms: bool) -> None:
        self.traced, self.norms = traced, norms
        self._computed = computed_constants(traced)
        self.gone: set[Expr] = set()
        self._ends: dict[tuple[bool, Node], str] = {}

    def read(self, expr: Expr) -> ConstantOp | None:
        """Reads ``expr`` as a constant op."""
        return read_constant_op(self.traced, ops.read(expr), self._computed, self.norms)

    def backward(self, op: ConstantOp) -> AbsorptionPlan:
        """Plans to absorb ``op`` into the layers that compute its operand.

        Raises:
            BlockedError: with the reason why it cannot be.
        """
        plan = AbsorptionPlan([op.call.expr])
        self._walk((op.x, op.map, op.call.expr), lambda step: self._step_backward(step, plan), True)
        return plan

    def forward(self, op: ConstantOp) -> AbsorptionPlan:
        """Plans to absorb ``op`` into the layers that read its result.

        Raises:
            BlockedError: with the reason why it cannot be.
        """
        plan = AbsorptionPlan([op.call.expr])
        self._walk((op.call.out, op.map, op.call.expr), lambda step: self._step_forward(step, plan), False)
        if not plan.changes:
            raise BlockedError("no layer reads it")
        return plan

    def _walk(self, start: _Step, advance: Callable[[_Step], Iterator[_Step]], back: bool) -> None:
        stack: list[tuple[_Step, int]] = [(start, -1)]
        visited: list[tuple[Node, int]] = []
        while stack:
            step, parent = stack.pop()
            visited.append((step[0], parent))
            index = len(visited) - 1
            try:
                if (back, step[0]) in self._ends:
                    raise BlockedError(self._ends[back, step[0]], always=True)
                stack.extend((following, index) for following in advance(step))
            except BlockedError as error:
                while error.always and index >= 0:
                    node, index = visited[index]
                    self._ends[back, node] = str(error)
                raise

    def _step_backward(self, step: _Step, plan: AbsorptionPlan) -> Iterator[_Step]:
        node, map, reader = step
        map = self._beside_others(node, map, reader)
        call = ops.read(node.expr)
        if call is None:
            raise BlockedError(f"no layer stands before it: it reads {node.name}", always=True)
        inner = read_constant_op(self.traced, call, self._computed, self.norms)
        if inner is not None:
            if call.expr in plan.removed:
                raise BlockedError(f"{call.out.name} is met on two ways")
            plan.removed.append(call.expr)
            yield inner.x, map.after(inner.map), call.expr
        elif call.kind in LAYERS:
            plan.changes.append(change_of_result(call, map))
        else:
            yield from ((x, passed, call.expr) for x, passed in pass_backward(call, node, map))

    def _beside_others(self, node: TensorNode, map: LinearMap, reader: Expr) -> LinearMap:
        """Returns the map with gain 1 for elements that others read; they may read none that it changes."""
        if any(node is out for out in self.traced.graph.outputs):
            raise BlockedError(f"{node.name} is also an output of the graph", always=True)
        outs: list[TensorNode] = []
        for user in self._users(node):
            if user is reader and len(user.outputs) == 1:
                continue
            call = ops.read(user)
            if call is None or call.kind not in MOVES:
                raise BlockedError(f"{node.name} is also read by {_name(user)}", always=user is not reader)
            outs += [out for out in call.outputs if out.users or out in self.traced.graph.outputs]
        if not outs or (len(outs) == 1 and outs[0].expr is reader):
            return map.compressed(free=True)
        whole = map.full(tuple(int(n) for n in node.shape))
        fixed = np.isnan(whole.gain) | ((whole.gain == 1) & (whole.shift == 0))
        for out in outs:
            places = None if out.expr is reader else _places(out)
            if places is not None and not fixed.reshape(-1)[places].all():
                raise BlockedError(f"{node.name} is also read by {out.name}")
        return map.with_identity()

    def _step_forward(self, step: _Step, plan: AbsorptionPlan) -> Iterator[_Step]:
        node, map = step[0], step[1].compressed(free=True)
        if any(node is out for out in self.traced.graph.outputs):
            raise BlockedError(f"{node.name} is an output of the graph", always=True)
        for user in self._users(node):
            call = ops.read(user)
            if call is None:
                raise BlockedError(f"{_name(user)} does not pass a factor on", always=True)
            outer = read_constant_op(self.traced, call, self._computed, self.norms)
            if outer is not None:
                if user in plan.removed:
                    raise BlockedError(f"{call.out.name} is met on two ways")
                plan.removed.append(user)
                yield call.out, outer.map.after(map), user
            elif _is_input_of(call, node):
                plan.changes.append(change_of_input(call, map))
            else:
                yield from ((out, passed, user) for out, passed in pass_forward(call, node, map))

    def _users(self, node: Node) -> Iterator[Expr]:
        return (user for user in users(node) if user not in self.gone)


def _is_input_of(call: OpCall, node: TensorNode) -> bool:
    """Returns whether ``call`` is a layer that reads ``node`` as its input, and as nothing else."""
    return call.kind in LAYERS and call.inputs == (node,) and node not in (call.weight, call.bias)


def _places(out: TensorNode) -> np.ndarray:
    call = ops.read(out.expr)
    places = None if call is None else element_places(call, out)
    if places is None:
        raise BlockedError(f"the indices of {out.name} are computed in the graph", always=True)
    return places.reshape(-1)


def _name(expr: Expr) -> str:
    return str(expr.outputs[0].name) if expr.outputs else f"%{expr._id}"
