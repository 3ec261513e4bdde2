"""Absorbs constant factors and sums into the weights and biases of the layers around them.

A product, quotient, sum or difference with stored numbers, one for a tensor or one for each channel, is a map
``x * gain + shift``. So is a BatchNorm in evaluation. It passes through moves, poolings, concats and, if it
is a positive factor, through ReLUs.

Towards the inputs, ``conv(x) * g + s = conv(x. W * g) + (b * g + s)`` for each output channel. Towards the
outputs, ``conv(x * g + s) = conv(x; w * g) + (b + w . s)`` for each input channel, where no padding is read
that has no ``s``. Computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.operations import is_stored, numbers_of
from qtrace.graph.passes import is_pure
from qtrace.graph.types import Expr, GetAttr, ModuleNode, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.passes.absorption import (
    LAYERS,
    MOVES,
    BlockedError,
    Change,
    LayerChanges,
    LinearMap,
    change_of_input,
    change_of_result,
    element_places,
    pass_backward,
    pass_forward,
)
from qtrace.preparation.passes.base import Left, PassResult
from qtrace.preparation.passes.folding import affine, drop_dead_norms

# Reads an op with stored operands as a map ``x * gain + shift`` of its one computed operand.

_STATISTICS = ("running_mean", "running_var", "weight", "bias")


class ConstantOp:
    """An op that computes ``x * gain + shift`` with stored numbers.

    Attributes:
        call: the op.
        x: its computed operand.
        map: its gain and shift.
    """

    def __init__(self, call: OpCall, x: TensorNode, map: LinearMap) -> None:
        self.call, self.x, self.map = call, x, map


def computed_constants(traced: TracedModule) -> dict[Node, np.ndarray]:
    """Computes the factors and summands that depend only on parameters, such as one entry of a vector.

    Args:
        traced: a flat, expanded traced module.
    """
    fixed = fixed_nodes(traced, without=lambda expr: not is_pure(expr))
    wanted = [
        node
        for expr in exprs(traced)
        for node in expr.outputs
        if node in fixed and not is_stored(node) and is_float_tensor(node)
        if any(u.outputs and u.outputs[0] not in fixed for u in node.users)
    ]
    return {node: value.numpy() for node, value in evaluate_fixed(traced, wanted).items()}


def read_constant_op(
    traced: TracedModule, call: OpCall | None, computed: Mapping[Node, np.ndarray], norms: bool = True
) -> ConstantOp | None:
    """Reads ``call`` as a map of one computed tensor; None if it is no such op.

    Args:
        traced: the module of the stored numbers.
        call: the op; None for an expr that no rule reads.
        computed: the numbers of nodes that depend only on parameters.
        norms: whether to read a BatchNorm in evaluation as such an op.
    """
    if call is None or not call.expr.outputs or not is_float_tensor(call.out) or call.out.shape is None:
        return None
    if call.kind == "batch_norm":
        return _read_norm(traced, call) if norms else None
    if call.kind == "neg" and not is_stored(call.inputs[0]):
        return _build(call, call.inputs[0], np.asarray(-1.0), np.asarray(0.0))
    if call.kind not in ("mul", "add", "sub", "div"):
        return None
    left, right = call.attrs["operands"]
    known = [computed.get(v) if isinstance(v, Node) else None for v in (left, right)]
    numbers = [numbers_of(v) if k is None else k for v, k in zip((left, right), known, strict=True)]
    front = numbers[1] is None
    x, number = (right, numbers[0]) if front else (left, numbers[1])
    computed_operands = sum(n is None for n in numbers)
    if not isinstance(x, TensorNode) or computed_operands != 1 or (front and call.kind == "div"):
        return None
    assert number is not None
    if number.dtype.kind not in "iuf":
        return None
    number = number.astype(np.float64)
    one, zero = np.asarray(1.0), np.asarray(0.0)
    if call.kind == "add":
        return _build(call, x, one, number)
    if call.kind == "sub":
        return _build(call, x, *((-one, number) if front else (one, -number)))
    with np.errstate(all="ignore"):
        return _build(call, x, number if call.kind == "mul" else 1.0 / number, zero)


def _read_norm(traced: TracedModule, call: OpCall) -> ConstantOp | None:
    if owner(call.expr) is None:
        nodes = [call.attrs.get(name) for name in _STATISTICS]
        if any(n is not None and not isinstance(getattr(n, "expr", None), GetAttr) for n in nodes):
            return None
    norm, rank = affine(traced, call), len(call.out.shape)
    form = (1, -1, *(1,) * (rank - 2))
    return _build(call, call.inputs[0], norm.gain.reshape(form), norm.shift.reshape(form))


def _build(call: OpCall, x: TensorNode, gain: np.ndarray, shift: np.ndarray) -> ConstantOp | None:
    """Builds the op; None if it changes the shape of ``x``, or a number is not finite."""
    shape = tuple(int(n) for n in call.out.shape)
    if not is_float_tensor(x) or tuple(int(n) for n in x.shape or ()) != shape or not shape:
        return None
    if (
        max(np.ndim(gain), np.ndim(shift)) > len(shape)
        or not np.isfinite([*_ends(gain), *_ends(shift)]).all()
    ):
        return None
    arrays = (np.reshape(a, (1,) * (len(shape) - np.ndim(a)) + np.shape(a)) for a in (gain, shift))
    return ConstantOp(call, x, LinearMap(*arrays).compressed())


def _ends(array: np.ndarray) -> tuple[float, float]:
    return float(np.min(array)), float(np.max(array))


# Walks from a constant op to the layers that can absorb it, towards the inputs or the outputs.

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
