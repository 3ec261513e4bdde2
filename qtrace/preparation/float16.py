"""Which ops that stay float are computed in float16, decided by the ranges that the calibration observed.

float16 ends at 65504 and has 11 bits. An op is computed in it if every value that it reads and gives is known
to stay far below that end. Nothing inside the op may leave it either. Squares, sums of many values, divisions
and exponentials may, though their results do not. Other ops stay float32, each with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.kernels import read_array
from qtrace.graph.types import Expr, Node, TensorNode
from qtrace.graph.walk import exprs, is_float_tensor
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedModel

_END = float(np.finfo(np.float16).max)
LARGEST = _END / 4
"""The largest magnitude that was observed of a value in float16: other data may have larger ones."""
_SMALLEST = float(np.finfo(np.float16).eps)
"""The least magnitude that the largest value of a tensor has: float16 has few digits below 2**-14."""
_MOST_LOSS = 2 * _SMALLEST
"""The most that parameters lose, as a share of their root mean square: numbers below 2**-14 lose more."""

_LAYERS_TEXT = (
    "conv1d conv2d conv3d conv_transpose2d conv_transpose3d linear matmul scaled_dot_product_attention"
)
_MOVES_TEXT = (
    "reshape flatten transpose swapaxes expand_dims squeeze broadcast_to tile repeat roll identity dropout "
    "pad split pixel_shuffle concat stack getitem gather channel_shuffle space_to_depth sliding_window where "
    "max_pool2d adaptive_max_pool2d embedding"
)
_FUNCTIONS_TEXT = (
    "add sub mul div neg abs maximum minimum scale_and_shift relu relu6 clip leaky_relu prelu sigmoid tanh "
    "silu hsigmoid hard_sigmoid hswish gelu gelu_tanh erf softmax interpolate avg_pool2d adaptive_avg_pool2d"
)
_LAYERS = frozenset(_LAYERS_TEXT.split())
_MOVES = frozenset(_MOVES_TEXT.split()) - {"embedding"}
_KINDS = _LAYERS | _MOVES | {"embedding", *_FUNCTIONS_TEXT.split()}
_TOO_LARGE = "its values come near 65504, where float16 ends"
_TOO_SMALL = "its values are so small that float16 has few of their digits"
_SUMS = "it adds up many values, which float16 loses or cannot hold"
_SQUARES = "it adds up squares, which float16 cannot hold"
_STEEP = "small errors of what it reads become large ones of its result"
_SUMMING = "mean sum cumsum var std prod norm"
_NORMS = "layer_norm group_norm instance_norm general_norm rms_norm local_response_norm normalize"
_STEEP_KINDS = "exp expm1 log log1p pow sqrt logsoftmax logsumexp logaddexp softplus mish"
_REASONS = {
    **dict.fromkeys(_SUMMING.split(), _SUMS),
    **dict.fromkeys(_NORMS.split(), _SQUARES),
    **dict.fromkeys(_STEEP_KINDS.split(), _STEEP),
    "batch_norm": "it divides by variances that may be too small for float16",
    "opaque": "it is kept as in the file",
    "astype": "it makes floats of other types, or other types of floats",
}
_POSITIONS_TEXT = (
    "astype floor ceil round floor_div mod argmax argmin topk sort argsort nms cond_take one_hot "
    "indexing_one_hot remap warp_affine warp_perspective roi_align opaque less less_equal greater "
    "greater_equal equal not_equal sign"
)
_POSITIONS = frozenset(_POSITIONS_TEXT.split())
"""The ops that make positions, counts or choices of the values that they read."""
_PRECISE_CAUSES = {
    "selection": "it belongs to a selection of rows, which must stand",
    "range": "it holds values of unlike size",
    "infinity": "it holds a number that stands for infinity",
}


@dataclass(frozen=True)
class Float16Choice:
    """Whether an op that stays float is computed in float16.

    Attributes:
        op: the name of the op's first output.
        kind: its kind, or its callee without one.
        reason: why it stays float32, as a clause; "" if it is computed in float16.
        detail: what was found of this op, as a clause; "" if the reason says all.
    """

    op: str
    kind: str
    reason: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        """The reason with its detail."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def uses_float16(model: QuantizedModel) -> bool:
    """Returns whether the config of a model asks for float16."""
    return model.config.effective_float == "fp16"


def float_values(model: QuantizedModel) -> list[str]:
    """Returns the names of the nodes whose ranges decide what is computed in float16, in graph order.

    Those are what the ops in float read and give, but for stored values; none if the config does not ask for
    float16.
    """
    return _Graph(model).values if uses_float16(model) else []


def choose_float16(model: QuantizedModel) -> tuple[Float16Choice, ...]:
    """Decides for each op that stays float whether it is computed in float16.

    Args:
        model: the view of a calibrated or converted graph whose record has the ranges of `float_values`.
    """
    graph = _Graph(model)
    reasons = {expr: graph.reason(expr) for expr in graph.floats}
    _keep_positions(graph, reasons)
    _keep_lone_moves(graph, reasons)
    return tuple(
        Float16Choice(note.name, note.kind or note.op, *reasons[expr].split(": ", 1))
        for expr, note in graph.floats.items()
    )


def describe_float16(choices: Sequence[Float16Choice]) -> list[str]:
    """Returns how many ops are in float16, and which stay float32 for which reason, a line each.

    Args:
        choices: what `choose_float16` decided.
    """
    wide = [choice for choice in choices if choice.reason]
    lines = [f"float16: {len(choices) - len(wide)} of {len(choices)} ops that stay float"]
    if not choices:
        return ["float16: no op stays float"]
    for reason in dict.fromkeys(choice.reason for choice in wide):
        ops = [choice for choice in wide if choice.reason == reason]
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(c.kind for c in ops).items())
        example = next((f" ({c.op}: {c.detail})" for c in ops if c.detail), "")
        lines.append(f"  float32: {kinds}: {reason}{example}")
    return lines


def loses(values: np.ndarray) -> bool:
    """Returns whether float16 holds too little of ``values``: it ends before them, or they are too small."""
    exact = np.asarray(values, np.float64)
    if not exact.size:
        return False
    with np.errstate(over="ignore"):
        error = exact - exact.astype(np.float16)
    signal = float(np.square(exact).sum())
    return not np.isfinite(error).all() or float(np.square(error).sum()) > _MOST_LOSS**2 * signal


class _Graph:
    """The ops of a graph that stay float, and the ranges of what they read and give."""

    def __init__(self, model: QuantizedModel) -> None:
        self.model, self.ranges = model, model.record.float_ranges
        self.fixed = fixed_nodes(model.module)
        self._parameters: dict[Node, tuple[float, bool]] = {}

    @cached_property
    def floats(self) -> dict[Expr, ExprNote]:
        """The ops in float that give floats of the batch, with their notes, in graph order."""
        notes = {note.name: note for note in self.model.annotation.notes if note.state == "float"}
        named = ((e, notes.get(e.outputs[0].name)) for e in exprs(self.model.module) if e.outputs)
        return {e: note for e, note in named if note is not None and any(map(is_float_tensor, e.outputs))}

    @cached_property
    def calls(self) -> dict[Expr, OpCall | None]:
        """The ops as their rules read them."""
        return {expr: ops.read(expr) for expr in self.floats}

    @cached_property
    def values(self) -> list[str]:
        """The names of the float nodes that the ops read and give, but for stored ones."""
        read = [e for e, call in self.calls.items() if call is not None and call.kind in _KINDS]
        nodes = (n for e in read for n in (*e.inputs, *e.outputs))
        names = {self.model.unrounded_name(n) for n in nodes if is_float_tensor(n) and n not in self.fixed}
        return [name for name in self.model.nodes if name in names]

    def range_of(self, node: Node) -> float | None:
        """Returns the largest magnitude of a node; None where it is not known."""
        if node in self.fixed:
            return self._parameter(node)[0]
        return self.ranges.get(self.model.unrounded_name(node))

    @cached_property
    def _stored(self) -> dict[Node, Any]:
        read = (n for expr in self.floats for n in expr.inputs if is_float_tensor(n) and n in self.fixed)
        return evaluate_fixed(self.model.module, [n for n in read if isinstance(n, TensorNode)])

    def _parameter(self, node: Node) -> tuple[float, bool]:
        """Returns the largest magnitude of a stored value, and whether float16 loses too much of it."""
        if node not in self._parameters:
            value = read_array(self._stored[node])
            largest = float(np.abs(value).max(initial=0.0))
            self._parameters[node] = largest, value.ndim > 1 and loses(value)
        return self._parameters[node]

    def reason(self, expr: Expr) -> str:
        """Returns why one op stays float32 for what it computes; "" if nothing is in the way."""
        call, note = self.calls[expr], self.floats[expr]
        kind = call.kind if call is not None else ""
        precise = next((text for cause, text in _PRECISE_CAUSES.items() if cause in note.causes), "")
        if precise:
            return precise
        if call is None or kind not in _KINDS:
            return _REASONS.get(kind, "it has no form in float16 here")
        if not all(map(is_float_tensor, expr.outputs)):
            return "it gives other types than floats"
        return self._range_problem(expr) or self._inside_problem(call)

    def _range_problem(self, expr: Expr) -> str:
        """Says which value of an op float16 does not hold; "" if it holds all of them."""
        for node in (*expr.inputs, *expr.outputs):
            if not is_float_tensor(node):
                continue
            if node in self.fixed:
                if problem := self._parameter_problem(node):
                    return problem
                continue
            largest = self.range_of(node)
            if largest is None:
                return f"a range was not observed: that of {node.name}"
            verb = "gives" if node in expr.outputs else "reads"
            if largest > LARGEST:
                return f"{_TOO_LARGE}: it {verb} up to {largest:.4g}"
            if 0.0 < largest < _SMALLEST:
                return f"{_TOO_SMALL}: it {verb} at most {largest:.2g}"
        return ""

    def _parameter_problem(self, node: TensorNode) -> str:
        largest, small = self._parameter(node)
        if largest > LARGEST:
            return f"{_TOO_LARGE}: {node.name} has {largest:.4g}"
        if small:
            return f"{_TOO_SMALL}: {node.name} has at most {largest:.2g}"
        return ""

    def _inside_problem(self, call: OpCall) -> str:
        """Says what inside of an op float16 does not hold; "" if it holds all of it."""
        largest = max((self.range_of(n) or 0.0 for n in call.inputs if n not in self.fixed), default=0.0)
        if call.kind in _LAYERS and (sums := self._sums(call, largest)) > _END:
            return f"{_TOO_LARGE}: its products may add up to {sums:.4g}"
        if call.kind == "div" and not self._divides_by_number(call):
            return "it divides by computed values, which may be too small for float16"
        if call.kind in ("avg_pool2d", "adaptive_avg_pool2d"):
            return "" if _window(call) * largest <= LARGEST else _SUMS
        if call.kind == "softmax":
            axes = call.attrs["axis"]
            return "" if len(axes) == 1 else _SUMS
        if call.kind == "gelu_tanh" and 0.05 * largest**3 > LARGEST:
            return f"{_TOO_LARGE}: the cube of {largest:.4g}"
        if call.kind in ("hswish", "hsigmoid", "hard_sigmoid") and largest > LARGEST / 8:
            return f"{_TOO_LARGE}: it multiplies {largest:.4g} before it divides"
        return ""

    def _sums(self, call: OpCall, largest: float) -> float:
        """Returns how far the products of a layer may add up: some engines add them up in float16."""
        if call.weight is not None and call.weight in self.fixed:
            return self._weight_sum(call) * largest
        factors = [self.range_of(node) for node in call.inputs[:2]]
        if call.weight is not None:
            factors = [largest, self.range_of(call.weight)]
        inner = prod(int(n) for n in call.weight.shape[1:]) if call.weight is not None else _inner_size(call)
        return inner * float(prod(factor if factor is not None else np.inf for factor in factors))

    def _weight_sum(self, call: OpCall) -> float:
        """Returns the largest sum of magnitudes of the weights that give one result."""
        assert call.weight is not None
        value = np.abs(read_array(self._stored[call.weight]))
        axes = tuple(axis for axis in range(value.ndim) if axis not in call.channel_axes)
        return float(value.sum(axis=axes, dtype=np.float64).max(initial=0.0))

    def _divides_by_number(self, call: OpCall) -> bool:
        operands = call.attrs.get("operands", ())
        divisor = operands[1] if len(operands) > 1 else None
        return divisor is not None and (not isinstance(divisor, TensorNode) or divisor in self.fixed)


def _inner_size(call: OpCall) -> int:
    """Returns how many products one result of a product of two tensors adds up."""
    return int(call.inputs[0].shape[-2 if call.attrs.get("transpose_a") else -1])


def _window(call: OpCall) -> int:
    """Returns how many values a mean pooling adds up for one result."""
    if call.kind == "avg_pool2d":
        size = call.attrs["kernel"]
        return prod(size) if isinstance(size, Iterable) else int(size) ** 2
    whole, result = (prod(int(n) for n in node.shape[-2:]) for node in (call.inputs[0], call.out))
    return -(-whole // max(result, 1)) * 4  # windows that overlap are larger than their share


def _keep_positions(graph: _Graph, reasons: dict[Expr, str]) -> None:
    """Keeps float32 what leads to positions, counts or choices, back to the layer that computes it."""
    waiting = [e for e in exprs(graph.model.module) if (call := ops.read(e)) and call.kind in _POSITIONS]
    seen = set(waiting)
    while waiting:
        for node in waiting.pop().inputs:
            source = node.expr
            if not is_float_tensor(node) or source in seen or source not in reasons:
                continue
            seen.add(source)
            reasons[source] = reasons[source] or "its values become positions, counts or choices"
            call = graph.calls[source]
            if call is not None and call.kind not in _LAYERS:
                waiting.append(source)


def _keep_lone_moves(graph: _Graph, reasons: dict[Expr, str]) -> None:
    """Keeps float32 what moves values between ops that are not in float16: it would round for nothing."""
    changed = True
    while changed:
        changed = False
        for expr in [e for e, reason in reasons.items() if not reason and _only_moves(graph.calls[e])]:
            beside = [node.expr for node in expr.inputs if is_float_tensor(node)]
            beside += [user for node in expr.outputs for user in node.users]
            if not any(reasons.get(other, "no") == "" for other in beside):
                reasons[expr] = "it moves values between ops that are not in float16"
                changed = True


def _only_moves(call: OpCall | None) -> bool:
    return call is not None and (call.role in (Role.CARRY, Role.CONCAT) and call.kind != "embedding")
