"""Finds the numbers that stand for infinity or for no value, and the ops that read or write them.

A mask that attention adds to its scores, the padding of a max pooling and the filling of a `where` hold
numbers such as -1e9, -65504 or -inf. A softmax, a maximum or a comparison ignores what they replace. A range
that holds them leaves no integers for anything else. So the ops that read or write them stay in float. A
constant padding that only a maximum reads runs on integers: the tensor's lowest integer does the same. NaN
stands for no value, and for it no integer stands either.

How far a number must lie from all others depends on what reads it. Beyond 1e8 no reader has a use for
integers. From 1e4 on, no reader may calculate with it, as a scaling of 16-bit images does. Smaller ones, such
as the -100 of Swin's masks, count only if nothing but a softmax or a maximum reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.passes import is_pure
from qtrace.graph.types import CallFunction, Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor
from qtrace.numerics import GAP
from qtrace.ops import OpCall, Role

INFINITE = "it reads or writes NaN or a number that stands for infinity, for which no integer stands"

_FOR_ALL, _UNLESS_CALCULATED, _FOR_ORDER = 1e8, 1e4, 50.0

_MAXIMA = ("max", "max_pool2d", "adaptive_max_pool2d")
_SATURATING = (
    "exp",
    "sigmoid",
    "hsigmoid",
    "hard_sigmoid",
    "tanh",
    "relu",
    "relu6",
    "gelu",
    "silu",
    "softplus",
)
_ORDERING = (*_MAXIMA, "min", "argmax", "argmin", "argsort", "nms", *_SATURATING)
_SOFTMAXES = ("softmax", "logsoftmax", "logsumexp")
_PASSING = ("add", "sub", "neg", "abs", "maximum", "minimum", "clip", "topk", "sort")
_SCALING = ("mul", "div")
_CREATING = ("full", "full_like")
_MERGING = ("add", "sub", "minimum", "maximum", "where")  # ops that apply a mask


class Infinity(enum.Flag):
    """The infinities for which the values of a tensor stand, and NaN."""

    NONE = 0
    LOW = enum.auto()
    HIGH = enum.auto()
    NAN = enum.auto()

    @property
    def negated(self) -> Infinity:
        """The infinities of the negated values."""
        low, high = Infinity.LOW in self, Infinity.HIGH in self
        return (Infinity.HIGH if low else Infinity.NONE) | (Infinity.LOW if high else Infinity.NONE)


class _Use(enum.Flag):
    """What becomes of the values of a tensor, moved, added or scaled."""

    NONE = 0
    SOFTMAX = enum.auto()
    ORDER = enum.auto()  # only which value is larger counts, or large values saturate
    OUTPUT = enum.auto()
    ARITHMETIC = enum.auto()


def infinity_of(values: Any, smallest: float = _UNLESS_CALCULATED) -> Infinity:
    """Returns the infinities for which the far values of an array stand.

    Args:
        values: a number or an array.
        smallest: the smallest magnitude of a far value. Up to 1e8, nothing may lie between the far values and
            the others: the values of a continuous range count for themselves.
    """
    array = np.asarray(values, np.float64).reshape(-1)
    infinity = Infinity.NAN if np.isnan(array).any() else Infinity.NONE
    array = array[~np.isnan(array)]
    sizes = np.abs(array)
    far = sizes >= smallest
    if not far.any():
        return infinity
    if sizes.max() < _FOR_ALL and sizes[~far].max(initial=0.0) * GAP > sizes[far].min():
        return infinity
    low = Infinity.LOW if (array[far] < 0).any() else Infinity.NONE
    return infinity | low | (Infinity.HIGH if (array[far] > 0).any() else Infinity.NONE)


def read_paddings(traced: TracedModule, calls: Mapping[Expr, OpCall]) -> dict[Expr, OpCall]:
    """Reads the constant paddings that only a maximum (or minimum) reads as moves, which carry integers.

    Args:
        traced: a flat, expanded graph.
        calls: expr -> the `OpCall` that it is read as.

    Returns:
        The paddings with the role of a move; `calls` has them in float, as their number may be any.
    """
    outputs = set(traced.graph.outputs)
    return {
        expr: replace(call, role=Role.CARRY, reason="")
        for expr, call in calls.items()
        if call.kind == "pad" and call.role is Role.FLOAT and isinstance(expr, CallFunction)
        if _is_ignored(call, calls, outputs)
    }


def _is_ignored(call: OpCall, calls: Mapping[Expr, OpCall], outputs: set[Node]) -> bool:
    infinity = infinity_of(call.attrs.get("value", 0.0))
    node = call.out
    while len(node.users) == 1 and node not in outputs:
        reader = calls.get(node.users[0])
        if reader is None or reader.role is not Role.CARRY or len(reader.outputs) != 1:
            return False
        if reader.kind in _MAXIMA:
            return infinity is Infinity.LOW
        if reader.kind == "min":
            return infinity is Infinity.HIGH
        node = reader.out
    return False


def find_infinite(
    traced: TracedModule, calls: Mapping[Expr, OpCall], inputs: Mapping[str, np.ndarray] | None = None
) -> set[Expr]:
    """Finds the exprs that read or write numbers that stand for infinity.

    Args:
        traced: a flat, expanded graph.
        calls: expr -> the `OpCall` that it is read as.
        inputs: name of an input of the graph, or of a node that holds NaN -> its values in samples.
    """
    finder = _Finder(traced, calls)
    infinities = finder.run(inputs or {})
    return {
        expr
        for expr in finder.order
        if expr in calls
        if any(infinities.get(node) for node in (*calls[expr].inputs, *expr.outputs))
    }


class _Finder:
    """Follows infinities through a graph.

    Attributes:
        order: the exprs in execution order.
        uses: float node -> what becomes of its values.
        dynamic: the nodes that depend on an input of the graph.
        layered: the nodes that depend on a layer or a product of two tensors.
        infinities: node -> the infinities for which its values stand.
    """

    def __init__(self, traced: TracedModule, calls: Mapping[Expr, OpCall]) -> None:
        self.traced, self.calls, self.order = traced, calls, exprs(traced)
        self.outputs: set[Node] = set(traced.graph.outputs)
        self.infinities: dict[Node, Infinity] = {}
        self.dynamic: set[Node] = {n for n in traced.graph.inputs if isinstance(n, TensorNode)}
        self.layered: set[Node] = set()
        for expr in self.order:
            call = calls.get(expr)
            if not self.dynamic.isdisjoint(expr.inputs) and (call is None or call.kind not in _CREATING):
                self.dynamic.update(expr.outputs)
            computes = call is not None and call.role in (Role.COMPUTE, Role.NORM)
            if (computes and not self.dynamic.isdisjoint(expr.inputs)) or not self.layered.isdisjoint(
                expr.inputs
            ):
                self.layered.update(expr.outputs)
        self.uses: dict[Node, _Use] = {}
        for expr in reversed(self.order):
            for node in expr.inputs:
                if is_float_tensor(node):
                    self.uses[node] = self._use(node) | self._use_by(expr)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[Node, Infinity]:
        """Returns the infinities of all nodes that have some."""
        self._shown = {name for name, values in inputs.items() if np.isnan(values).any()}
        for node in (*self.traced.graph.inputs, *(n for expr in self.order for n in expr.outputs)):
            if node.name in inputs:
                self._source(node, self._judge(inputs[node.name], node, marked=False))
        self._find_masks()
        for node, value in self._constants():
            self._source(node, self._judge(value, node))
        for expr in self.order:
            call = self.calls.get(expr)
            if call is None or not expr.outputs or not is_float_tensor(expr.outputs[0]):
                continue
            infinity = self._written(call) | self._passed(call)
            if infinity:
                for node in expr.outputs:
                    self.infinities[node] = self.infinities.get(node, Infinity.NONE) | infinity
        return self.infinities

    def _source(self, node: Node, infinity: Infinity) -> None:
        if infinity:
            self.infinities[node] = self.infinities.get(node, Infinity.NONE) | infinity

    def _use(self, node: Node) -> _Use:
        return self.uses.get(node, _Use.OUTPUT if node in self.outputs else _Use.NONE)

    def _use_by(self, expr: Expr) -> _Use:
        call = self.calls.get(expr)
        if call is None:
            return _Use.ARITHMETIC
        if call.kind in _SOFTMAXES:
            return _Use.SOFTMAX
        if call.kind in _ORDERING or _removed(call) or not any(map(is_float_tensor, expr.outputs)):
            return _Use.ORDER
        if not self._passes(call):
            return _Use.ARITHMETIC
        use = _Use.NONE
        for node in expr.outputs:
            use |= self._use(node)
        return use

    def _passes(self, call: OpCall) -> bool:
        if call.kind in _SCALING:
            return len(call.inputs) == 1 or any(n not in self.layered for n in call.inputs)
        return call.role in (Role.CARRY, Role.CONCAT) or call.kind in (*_PASSING, "pad", "astype")

    def _judge(self, value: Any, node: Node, marked: bool = True) -> Infinity:
        """Returns the infinities of ``value``, which has the readers of ``node``.

        Args:
            value: a number or an array.
            node: the tensor that holds it.
            marked: whether a number below 1e4 may stand for infinity.
        """
        use = self._use(node)
        infinity = infinity_of(value, _FOR_ALL)
        if not infinity and _Use.ARITHMETIC not in use:
            infinity = infinity_of(value)
            if not infinity and marked and use and not use & _Use.OUTPUT:
                infinity = infinity_of(value, _FOR_ORDER)
        return infinity

    def _constants(self) -> Iterator[tuple[Node, np.ndarray]]:
        """Yields the tensors made of parameters and constants that the passing ops read."""
        fixed = fixed_nodes(self.traced, without=lambda expr: not is_pure(expr))
        wanted = [
            node
            for expr in self.order
            for node in expr.outputs
            if node in fixed and is_float_tensor(node) and any(map(self._is_wanted, node.users))
        ]
        yield from ((node, value.numpy()) for node, value in evaluate_fixed(self.traced, wanted).items())

    def _is_wanted(self, user: Expr) -> bool:
        call = self.calls.get(user)
        if call is None or not self._passes(call):
            return False
        return call.kind not in _SCALING or self.layered.isdisjoint(call.inputs)

    def _find_masks(self) -> None:
        """Marks masks that are given at run time: what a softmax reads besides the scores of layers."""
        for expr in self.order:
            call = self.calls.get(expr)
            if call is None or call.kind not in _MERGING or self._use(call.out) is not _Use.SOFTMAX:
                continue
            masks = [n for n in call.inputs if n in self.dynamic and n not in self.layered]
            if masks and any(n in self.layered for n in call.inputs):
                for mask in masks:
                    self._mark(mask)

    def _mark(self, mask: Node) -> None:
        """Marks a mask and the tensors that it is made of."""
        stack, visited = [mask], set()
        while stack:
            node = stack.pop()
            if node in visited or not is_float_tensor(node) or node not in self.dynamic:
                continue
            visited.add(node)
            if self._use(node) is _Use.SOFTMAX:
                self._source(node, Infinity.LOW)
                call = self.calls.get(node.expr) if isinstance(node, TensorNode) else None
                if call is not None and self._passes(call):
                    stack.extend(call.inputs)

    def _written(self, call: OpCall) -> Infinity:
        """Returns the infinities that ``call`` writes as numbers."""
        attrs, out = call.attrs, call.out
        if call.kind in (*_CREATING, "setitem") or (call.kind == "pad" and call.role is Role.FLOAT):
            return self._judge_number(attrs.get("value"), out)
        if call.kind == "where":
            infinity = Infinity.NONE
            for value in attrs["operands"]:
                infinity |= self._judge_number(value, out)
            return infinity
        if "scalar" in attrs and call.kind in ("add", "sub"):
            negated = call.kind == "sub" and attrs["side"] == "right"
            infinity = self._judge(attrs["scalar"], out, marked=False)
            return infinity.negated if negated else infinity
        if "scalar" in attrs and call.kind == "mul" and call.inputs[0] not in self.layered:
            infinity = self._judge(attrs["scalar"], out)
            return infinity | infinity.negated if infinity else infinity
        return Infinity.NONE

    def _judge_number(self, value: Any, out: Node) -> Infinity:
        return self._judge(value, out) if isinstance(value, (int, float)) else Infinity.NONE

    def _passed(self, call: OpCall) -> Infinity:
        """Returns the infinities that ``call`` passes on."""
        read = [self.infinities.get(node, Infinity.NONE) for node in call.inputs]
        union = Infinity.NONE
        for infinity in read:
            union |= infinity
        nan = Infinity.NONE if self._shown else union & Infinity.NAN
        union &= ~Infinity.NAN
        if call.kind in ("maximum", "minimum"):
            return self._chosen(call, union) | nan
        if not union or not self._passes(call):
            return nan if call.kind in _SATURATING or self._passes(call) else Infinity.NONE
        if call.kind == "neg" or (call.kind in _SCALING and call.attrs.get("scalar", 1.0) < 0):
            union = union.negated
        elif call.kind == "abs":
            union = Infinity.HIGH
        elif call.kind == "sub":
            left, right = call.attrs["operands"]
            union = self._of(left) | self._of(right).negated
        elif call.kind == "div" and call.attrs.get("side") != "right":
            return nan
        return (union & ~_removed(call)) | nan

    def _of(self, operand: Any) -> Infinity:
        return (
            self.infinities.get(operand, Infinity.NONE) if isinstance(operand, TensorNode) else Infinity.NONE
        )

    def _chosen(self, call: OpCall, union: Infinity) -> Infinity:
        """Returns what the larger (or smaller) of two values stands for: an infinity of both, or of one."""
        both = Infinity.LOW if call.kind == "maximum" else Infinity.HIGH
        operands = [
            self._of(v) if isinstance(v, TensorNode) else infinity_of(v) for v in call.attrs["operands"]
        ]
        infinity = union & ~both
        return infinity | both if all(both in operand for operand in operands) else infinity


def _removed(call: OpCall) -> Infinity:
    """Returns the infinities that ``call`` ends: by a maximum, or by a near bound."""
    if call.kind in _MAXIMA:
        return Infinity.LOW
    if call.kind == "min":
        return Infinity.HIGH
    bounds: Sequence[tuple[Any, Infinity]] = ()
    if call.kind == "clip":
        bounds = ((call.attrs["lower"], Infinity.LOW), (call.attrs["upper"], Infinity.HIGH))
    elif call.kind in ("maximum", "minimum") and "scalar" in call.attrs:
        bounds = ((call.attrs["scalar"], Infinity.LOW if call.kind == "maximum" else Infinity.HIGH),)
    removed = Infinity.NONE
    for bound, infinity in bounds:
        if isinstance(bound, float) and abs(bound) < _UNLESS_CALCULATED:
            removed |= infinity
    return removed
