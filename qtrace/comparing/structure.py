"""Which op makes each value of an output: joins and moves after it are run on numbers of parts.

Every value of a part gets the number of the op that makes it. Moves and joins then carry these numbers to the
output as they carry values, whatever their axes and orders are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace import ops
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import ENGINE_ERRORS, interpret, static_nodes
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.types import Expr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import called_graph, exprs, is_float_tensor, owner, shape_of, tensor_inputs
from qtrace.ops import OpCall, Role, elementwise, moves

_UNIT = ("sigmoid", "softmax", "hsigmoid", "hard_sigmoid", "tanh")
_BOUNDED = (*_UNIT, "relu6", "erf")
_FAR = 6.0  # a bound beyond relu6's, such as the size of an image, says nothing about a range
_AFFINE = ("add", "sub", "mul", "div", "neg")
_ALIKE = (*_AFFINE, "relu", "relu6", "clip", "mean", "avg_pool2d", "adaptive_avg_pool2d", "identity")
_JOINS = ("concat", "stack", "setitem")
_MOVES = frozenset(rule.kind for rule in moves.RULES if rule.role is Role.CARRY)
_ELEMENTWISE = frozenset(rule.kind for rule in elementwise.RULES)
_BY_VALUES = ("indexing_one_hot", "cond_take")  # which values they pick depends on values
_CONSTANT = 0


@dataclass(frozen=True)
class Layout:
    """What the graph says about the columns of one axis.

    Attributes:
        parts: the number of each column's part.
        bounded: the parts that a bounded function makes.
        unit: the parts of these bounded as by sigmoid and softmax.
        sums: the parts of which a layer computes all columns as sums of the same values.
    """

    parts: np.ndarray
    bounded: frozenset[int]
    unit: frozenset[int]
    sums: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Parts:
    """The part of each value of one output, for the traced shapes.

    Attributes:
        numbers: the number of the part of each value.
        bounded: the parts that a bounded function makes.
        unit: the parts whose bounds are 0 or -1 and 1.
        sums: the parts of which a layer computes all columns as sums of the same values.
    """

    numbers: np.ndarray
    bounded: frozenset[int]
    unit: frozenset[int]
    sums: frozenset[int]

    def along(self, axis: int, count: int) -> Layout | None:
        """Returns what is known about the columns of an axis; None if it has another size than ``count``.

        Along axis 0, parts are not divided: its indices are samples, and no quantities.
        """
        if axis >= self.numbers.ndim or self.numbers.shape[axis] != count:
            return None
        if not any(self.numbers.strides):  # one number everywhere
            number, parts = {int(self.numbers.flat[0])} if self.numbers.size else set(), np.zeros(count, int)
            bounded, unit, sums = (
                frozenset({0} if number and number <= known else ())
                for known in (self.bounded, self.unit, self.sums)
            )
            return Layout(parts, frozenset({0}) if axis == 0 else bounded, unit, sums)
        combinations, places = _find_combinations([self.numbers])
        consists = np.zeros((count, len(combinations)), bool)
        consists[np.indices(self.numbers.shape, sparse=True)[axis], places] = True
        numbers = np.array(combinations, np.int64).reshape(-1)
        keys: dict[tuple[int, ...], int] = {}
        parts = np.array([keys.setdefault(tuple(numbers[row].tolist()), len(keys)) for row in consists])

        def consists_of(known: frozenset[int]) -> frozenset[int]:
            return frozenset(part for key, part in keys.items() if known.issuperset(key))

        bounded = frozenset(keys.values()) if axis == 0 else consists_of(self.bounded)
        return Layout(parts, bounded, consists_of(self.unit), consists_of(self.sums))


def find_parts(model: TracedModule, ends: Sequence[Node]) -> list[Parts | None]:
    """Finds the part of each value of each end; None where one op makes all of them, or that is unknown.

    Args:
        model: a traced module.
        ends: float nodes of its graph.
    """
    if any(called_graph(expr) is not None for expr in exprs(model)):
        places = [list(model.graph.outputs).index(end) if end in model.graph.outputs else -1 for end in ends]
        model = flatten(model)
        ends = [model.graph.outputs[place] if place >= 0 else model.graph.inputs[0] for place in places]
    with quiet_engine(model):
        walk = _Walk(model, ends)
    return [walk.parts(end) for end in ends]


class _Walk:
    """Numbers the values of nodes from the ops that make them on.

    A node whose values all have one number is stored as that number, and moves need not be run on it.

    Args:
        model: a flat traced module.
        ends: the nodes to number.
    """

    def __init__(self, model: TracedModule, ends: Sequence[Node]) -> None:
        self.static = static_nodes(model)
        self.numbers: dict[Node, int | np.ndarray] = {}
        self.bounded: set[int] = set()
        self.unit: set[int] = set()
        self.sums: set[int] = set()
        self._count = _CONSTANT
        self._constants: dict[Node, Any] = {}
        for expr, inputs in self._steps(model, ends):
            self._number(expr, inputs)

    def parts(self, end: Node) -> Parts | None:
        """Returns the parts of an end; None if all its values are of one that may be divided."""
        number = self.numbers.get(end)
        if number is None or (isinstance(number, int) and number not in self.bounded | self.sums):
            return None
        numbers = np.broadcast_to(np.int64(number), shape_of(end)) if isinstance(number, int) else number
        return Parts(numbers, frozenset(self.bounded), frozenset(self.unit), frozenset(self.sums))

    def _steps(self, model: TracedModule, ends: Sequence[Node]) -> list[tuple[Expr, list[TensorNode]]]:
        """Returns the exprs to number with the inputs whose numbers they pass on, in the graph's order."""
        needed, steps = set(ends), []
        for expr in reversed(exprs(model)):
            if needed.isdisjoint(expr.outputs):
                continue
            inputs = self._passed_inputs(expr)
            steps.append((expr, inputs))
            needed.update(inputs)
        return steps[::-1]

    def _passed_inputs(self, expr: Expr) -> list[TensorNode]:
        """Returns the inputs whose numbers an expr passes on; [] for an op that makes new values."""
        if isinstance(owner(expr), FakeQuant):
            return [expr.inputs[1]]
        call = ops.read(expr)
        if call is None or expr.outputs[0] in self.static or not _is_passed(call):
            return []
        inputs = [node for node in call.inputs if is_float_tensor(node) and node.shape is not None]
        others = [n for n in tensor_inputs(expr) if n not in inputs and n not in self.static]
        return [] if others or any(node.shape is None for node in call.outputs) else inputs

    def _number(self, expr: Expr, inputs: Sequence[TensorNode]) -> None:
        """Numbers the outputs of an expr."""
        living = [node for node in dict.fromkeys(inputs) if node not in self.static]
        if not living:
            new = _CONSTANT if expr.outputs[0] in self.static else self._new(expr)
            self.numbers.update(dict.fromkeys(expr.outputs, new))
            return
        if isinstance(owner(expr), FakeQuant):
            self.numbers[expr.outputs[0]] = self._of(inputs[0])
            return
        call = ops.read(expr)
        assert call is not None
        if call.kind in _ELEMENTWISE:
            self.numbers[call.out] = self._combined(call, living)
        else:
            self.numbers.update(self._moved(expr, inputs))

    def _of(self, node: Node) -> int | np.ndarray:
        return _CONSTANT if node in self.static else self.numbers.get(node, _CONSTANT)

    def _new(self, expr: Expr | None, kept: bool = False, unit: bool = False) -> int:
        """Returns a new number, marked as bounded if the op of ``expr`` is, or if the bound is ``kept``."""
        self._count += 1
        call = None if expr is None else ops.read(expr)
        kind = "" if call is None else call.kind
        if kept or kind in _BOUNDED or (call is not None and _is_clipped_near(call)):
            self.bounded.add(self._count)
        if unit or kind in _UNIT:
            self.unit.add(self._count)
        if expr is not None and _is_sum(expr):
            self.sums.add(self._count)
        return self._count

    def _combined(self, call: OpCall, living: Sequence[TensorNode]) -> int | np.ndarray:
        """Returns the numbers after an elementwise op: new ones for each combination of its operands'."""
        numbers = [self._of(node) for node in living]
        scalar = all(
            n.shape is not None and np.prod(shape_of(n)) == 1 for n in call.inputs if n not in living
        )
        keeps = scalar and call.kind in _AFFINE and len(living) == 1
        if all(isinstance(number, int) for number in numbers):
            return self._new(call.expr, kept=keeps and numbers[0] in self.bounded)
        shape = shape_of(call.out)
        keys, inverse = _find_combinations([np.broadcast_to(np.asarray(n), shape) for n in numbers])
        squashed = call.kind in _UNIT
        limits = call.kind in ("clip", "relu6", "relu", "maximum", "minimum") and len(living) == 1
        new = [
            self._new(
                None,
                kept=squashed or ((keeps or limits) and key[0] in self.bounded),
                unit=squashed or (limits and key[0] in self.unit),
            )
            for key in keys
        ]
        return np.array(new)[inverse]

    def _moved(self, expr: Expr, inputs: Sequence[TensorNode]) -> dict[Node, int | np.ndarray]:
        """Returns the numbers after a join or a move, which is run on its inputs' numbers."""
        numbers = {node: self._of(node) for node in inputs}
        first = next(iter(numbers.values()))
        if all(isinstance(number, int) and number == first for number in numbers.values()):
            return dict.fromkeys(expr.outputs, first)
        try:
            values = [
                Tensor(np.broadcast_to(np.asarray(numbers[n], np.float32), shape_of(n)).copy())
                if n in numbers
                else self._constant(n)
                for n in expr.inputs
            ]
            results = interpret(expr, values)
        except ENGINE_ERRORS:  # of a size that depends on values
            return dict.fromkeys(expr.outputs, self._new(None))
        return {
            node: value.numpy().astype(np.int64)
            for node, value in zip(expr.outputs, results or (), strict=True)
        }

    def _constant(self, node: Node) -> Any:
        """Computes a node that depends only on parameters and shapes."""
        if node not in self._constants:
            if isinstance(node, TensorNode) and node not in self.static:  # its shape is read, not its values
                self._constants[node] = Tensor(np.zeros(shape_of(node), np.dtype(node.dtype)))
            elif isinstance(node.expr, Input):
                self._constants[node] = node.owner
            else:
                results = interpret(node.expr, [self._constant(n) for n in node.expr.inputs])
                self._constants.update(zip(node.expr.outputs, results or (), strict=True))
        return self._constants[node]


def _find_combinations(numbers: Sequence[np.ndarray]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Finds the different combinations of numbers that stand at one place; does not sort the places.

    Args:
        numbers: arrays of one shape, of numbers from 0 on.

    Returns:
        The combinations, and the index of the one at each place.
    """
    keys: list[tuple[int, ...]] = [()]
    codes = np.zeros(numbers[0].shape, np.int64)
    for values in numbers:
        size = int(values.max(initial=0)) + 1
        codes = codes * size + values
        seen = np.flatnonzero(np.bincount(codes.ravel(), minlength=len(keys) * size))
        ranks = np.zeros(len(keys) * size, np.int64)
        ranks[seen] = np.arange(len(seen))
        keys = [(*keys[code // size], code % size) for code in seen.tolist()]
        codes = ranks[codes]
    return keys, codes


def _is_sum(expr: Expr) -> bool:
    """Returns whether a layer gives the values of ``expr``, which changed no column on its own.

    A function of each value, a number that all are multiplied with, and a mean change all columns alike.
    """
    if isinstance(owner(expr), FakeQuant):
        return _is_sum(expr.inputs[1].expr)
    call = ops.read(expr)
    if call is None or call.role in (Role.COMPUTE, Role.NORM):
        return call is not None
    data = [node for node in call.inputs if is_float_tensor(node)]
    alone = len(data) == 1 and len(tensor_inputs(expr)) == 1
    return alone and (call.kind in _ALIKE or call.role is Role.CARRY) and _is_sum(data[0].expr)


def _is_clipped_near(call: OpCall) -> bool:
    """Returns whether an op is a clip whose two bounds lie near 0."""
    if call.kind != "clip":
        return False
    bounds = call.attrs["lower"], call.attrs["upper"]
    return all(isinstance(bound, (int, float)) and abs(bound) <= _FAR for bound in bounds)


def _is_passed(call: OpCall) -> bool:
    """Returns whether the values of an op are its inputs', moved or each changed by itself."""
    if call.kind in _ELEMENTWISE:
        return True
    if call.kind in _BY_VALUES:
        return False
    return call.kind in _JOINS or call.role is Role.CARRY or call.kind in _MOVES
