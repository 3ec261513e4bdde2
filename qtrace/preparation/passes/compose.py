"""Turns activation functions and norms that are written in pieces into one op, before anything is decided.

They come from Python: ``sum(branches)`` begins with 0, and RepVGG's blocks add 0 in the place of a branch
that they do not have. Left in the graph, they stand between a layer and what is fused into it,
and cost a rounding.

One reason keeps them: ``z = y * 1`` is how a network copies a tensor before it writes ``z[:, :2] = 0``, since
MegEngine writes into the Tensor itself, whoever else reads it.

``qtrace.graph.compose`` does the work. Composites whose pieces have integer kernels, such as the two products
of attention, are written as these pieces instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

import megengine.functional as F

from qtrace import ops
from qtrace.config import QConfig, backends
from qtrace.graph import functions
from qtrace.graph.composites import CompositeCall, CompositeRule, compose, composite_rules
from qtrace.graph.edit import GraphEditor
from qtrace.graph.passes import find_written
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import CallFunction, CallMethod, Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, shape_of, tensor_inputs, writes_into
from qtrace.ops import OpCall, Role
from qtrace.ops.arguments import arguments
from qtrace.preparation.passes.base import Left, PassResult

# Writes ops in pieces, and lists the activation functions whose pieces have integer kernels.


class PiecesWriter:
    """Writes calls in the place of an op, one after the other.

    Args:
        editor: the editor of the graph.
        expr: the op, whose users the caller connects with the last call.

    Attributes:
        like: the output of the op, after which the results of the calls are named.
        exprs: the calls.
    """

    def __init__(self, editor: GraphEditor, expr: Expr) -> None:
        self.like: TensorNode = expr.outputs[0]
        self.exprs: list[Expr] = []
        self._editor, self._after = editor, expr

    def call(self, func: Callable[..., Any], *args: Any, shape: tuple[int, ...] | None = None) -> TensorNode:
        """Calls ``func``; its output has ``shape``, or the shape of the op's output."""
        node = self._editor.call_function(func, *args, after=self._after, like=self.like)
        if shape is not None:
            node.shape = shape
        return self._append(node)

    def every(self, x: TensorNode, step: int, row: int, column: int) -> TensorNode:
        """Takes every ``step``-th row and column of an image, from ``row`` and ``column`` on."""
        index = (slice(None), slice(None), slice(row, None, step), slice(column, None, step))
        node = self._editor.call_method("__getitem__", x, index, after=self._after, like=x)
        node.shape = tuple(n // step if axis > 1 else n for axis, n in enumerate(shape_of(x)))
        return self._append(node)

    def _append(self, node: TensorNode) -> TensorNode:
        self._after = node.expr
        self.exprs.append(node.expr)
        return node


@dataclass(frozen=True)
class Pieces:
    """The ops with integer kernels that make an activation function.

    Attributes:
        write: writes the ops for an input.
        kernels: how the `OpShape` of each kernel differs from the function's; a clamp has none.
    """

    write: Callable[[PiecesWriter, TensorNode], TensorNode]
    kernels: tuple[dict[str, Any], ...]


def _silu(pieces: PiecesWriter, x: TensorNode) -> TensorNode:
    return pieces.call(F.mul, x, pieces.call(F.sigmoid, x))


def _hswish(pieces: PiecesWriter, x: TensorNode) -> TensorNode:
    factor = pieces.call(F.relu6, pieces.call(F.add, x, 3.0))
    # The sixth of the factor is its integers with another scale: it takes no time.
    return pieces.call(F.mul, x, pieces.call(F.mul, factor, 1 / 6))


def _gated_hswish(pieces: PiecesWriter, x: TensorNode) -> TensorNode:
    return pieces.call(F.mul, x, pieces.call(F.hsigmoid, x))


PIECES = {
    "silu": Pieces(_silu, ({"kind": "sigmoid"}, {"kind": "mul"})),
    "hswish": Pieces(
        _hswish,
        ({"kind": "add", "stored": True}, {"kind": "mul"}),
    ),
    "gated_hswish": Pieces(_gated_hswish, ({"kind": "hsigmoid"}, {"kind": "mul"})),
}


# Removes ops that change no value, such as ``x + 0``.

_SUMS, _PRODUCTS = ("add", "sub"), ("mul", "div", "pow")
_EITHER_SIDE = ("add", "mul")
# Their kernels give memory of their own; any other op may give the Tensor that it reads, as dropout does.
_COMPUTING = (Role.COMPUTE, Role.ELEMENTWISE, Role.ACTIVATION, Role.NORM)


def drop_neutral(traced: TracedModule) -> PassResult:
    """Removes sums with 0, products with 1, and their inverses, which give what they read.

    The results of a graph stay ops of their own, under their names. So do copies: ops whose result, or whose
    source, is written into.

    Args:
        traced: a flat, expanded traced module; it is edited in place.
    """
    order = exprs(traced)
    calls = [call for call in map(ops.read, order) if call is not None and _is_neutral(call)]
    if not calls:
        return PassResult((), ())
    written = _find_written(order, {call.expr for call in calls})
    sources: dict[Node, Node] = {}
    with GraphEditor(traced) as editor:
        for call in calls:
            source = sources.get(call.inputs[0], call.inputs[0])
            ends = any(call.out is node for node in traced.graph.outputs)
            if not ends and call.out not in written and source not in written:
                editor.replace_uses(call.out, source)
                sources[call.out] = source
    return PassResult(tuple(f"{out.name}: is {source.name}" for out, source in sources.items()), ())


def _is_neutral(call: OpCall) -> bool:
    if call.kind not in (*_SUMS, *_PRODUCTS) or call.attrs.get("scalar") != int(call.kind in _PRODUCTS):
        return False
    if len(call.inputs) != 1:
        return False
    if call.attrs["side"] == "left" and call.kind not in _EITHER_SIDE:
        return False
    (source,) = call.inputs
    return bool(source.dtype == call.out.dtype and tuple(source.shape) == tuple(call.out.shape))


def _find_written(order: list[Expr], neutral: set[Expr]) -> set[Node]:
    """Returns the nodes whose Tensor an expr may write into, be it under the name of another node."""
    written = find_written([e for e in order if e not in neutral])  # x += 0 writes what stands there
    if not written:
        return set()
    others: dict[Node, set[Node]] = {}
    for expr in order:
        if not _may_give_its_input(expr):
            continue
        for node in tensor_inputs(expr):
            for out in expr.outputs:
                others.setdefault(node, set()).add(out)
                others.setdefault(out, set()).add(node)
    pending = list(written)
    while pending:
        new = others.get(pending.pop(), set()) - written
        written |= new
        pending += new
    return written


def _may_give_its_input(expr: Expr) -> bool:
    """Returns whether a result of ``expr`` may be a Tensor that it reads."""
    if isinstance(expr, CallMethod) and writes_into(expr):
        return expr.method != "__setitem__"  # the reader of its result reads what was written
    call = ops.read(expr)
    return call is None or call.role not in _COMPUTING


def compose_pieces(traced: TracedModule, config: QConfig, rounded: Collection[str] = ()) -> PassResult:
    """Replaces the pieces of composites by one op, and ops that only their pieces quantize by the pieces.

    Args:
        traced: a flat traced module; it is edited in place.
        config: its backend says which ops run on integers.
        rounded: names of nodes that the model was trained to round: none of them vanishes in a composite.
    """
    known = {"", *backends.get(config.backend).ops}
    rules = [r for r in composite_rules() if r.in_prepare and r.kind in known]
    results = compose(traced, [_Guarded(rule, rounded) for rule in rules] if rounded else rules)
    changed = [f"{r.where}: {r.rule} in one op" for r in results if r.applied]
    left = [Left(r.where, f"no {r.rule}: {r.reason}") for r in results if not r.applied]
    return PassResult((*changed, *write_pieces(traced, known)), tuple(left))


class _Guarded(CompositeRule):
    """A rule that leaves composites with a trained rounding inside as they are."""

    def __init__(self, rule: CompositeRule, rounded: Collection[str]) -> None:
        self.rule, self.rounded = rule, rounded
        self.pattern, self.from_outputs = rule.pattern, rule.from_outputs

    @property
    def name(self) -> str:
        """Name of the rule in reports."""
        return self.rule.name

    def check(self, match: PatternMatch) -> str | None:
        """Returns why ``match`` stays as it is; None if it is replaced."""
        names = (node.name for expr in match.exprs for node in expr.outputs if node is not match.node)
        inside = next((name for name in names if name in self.rounded), None)
        if inside is not None:
            return f"the model's own quantization rounds {inside} inside of it"
        return self.rule.check(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Returns the call that replaces ``match``."""
        return self.rule.call(match)

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Replaces ``match``."""
        return self.rule.rewrite(match, editor)


def write_pieces(traced: TracedModule, known: Container[str] = ()) -> tuple[str, ...]:
    """Writes composites whose pieces more runtimes have as these pieces.

    Args:
        traced: a flat traced module; it is edited in place.
        known: the ops that stay.

    Returns:
        A line for each composite.
    """
    changed: list[str] = []
    with GraphEditor(traced) as editor:
        for expr in exprs(traced):
            write = _WRITERS.get(expr.func) if isinstance(expr, CallFunction) else None
            if write is not None and expr.func.__name__ not in known:
                changed.append(f"{expr.outputs[0].name}: {expr.func.__name__} in pieces")
                editor.replace_expr(expr, write(PiecesWriter(editor, expr), **arguments(expr)))
    return tuple(changed)


def _attention(
    pieces: PiecesWriter,
    query: TensorNode,
    key: TensorNode,
    value: TensorNode,
    mask: Any,
    scale: float,
    bias: Any,
) -> TensorNode:
    shape = (*shape_of(pieces.like)[:-1], shape_of(key)[-2])
    scores = pieces.call(F.matmul, query, key, False, True, shape=shape)
    if scale != 1.0:
        scores = pieces.call(F.mul, scores, scale, shape=shape)
    if bias is not None:
        scores = pieces.call(F.add, scores, bias, shape=shape)
    if mask is not None and len(shape_of(mask)) > len(shape):
        windows = shape_of(mask)[1]
        split = (shape[0] // windows, windows, *shape[1:])
        scores = pieces.call(F.reshape, scores, (-1, *split[1:]), shape=split)
        scores = pieces.call(F.add, scores, mask, shape=split)
        scores = pieces.call(F.reshape, scores, (-1, *shape[1:]), shape=shape)
    elif mask is not None:
        scores = pieces.call(F.add, scores, mask, shape=shape)
    return pieces.call(F.matmul, pieces.call(F.softmax, scores, [-1], shape=shape), value)


def _channel_shuffle(pieces: PiecesWriter, x: TensorNode, groups: int) -> TensorNode:
    batch, channels, *space = shape_of(x)
    split = (groups, channels // groups, *space)
    y = pieces.call(F.reshape, x, (-1, *split), shape=(batch, *split))
    turned = (channels // groups, groups, *space)
    order = (0, 2, 1, *range(3, 3 + len(space)))
    y = pieces.call(F.transpose, y, order, shape=(batch, *turned))
    return pieces.call(F.reshape, y, (-1, channels, *space))


def _space_to_depth(pieces: PiecesWriter, x: TensorNode, block: int, order: tuple[int, ...]) -> TensorNode:
    batch, channels, height, width = shape_of(x)
    if order[2] == 2:  # one slice after the other, as YOLOX writes it
        first, _, _ = order
        places = [(i, j) if first == 0 else (j, i) for i in range(block) for j in range(block)]
        return pieces.call(F.concat, [pieces.every(x, block, *place) for place in places], 1)
    split = (channels, height // block, block, width // block, block)
    y = pieces.call(F.reshape, x, (-1, *split), shape=(batch, *split))
    axes = (0, *((3, 5, 1)[i] for i in order), 2, 4)
    moved = tuple((batch, *split)[axis] for axis in axes)
    y = pieces.call(F.transpose, y, axes, shape=moved)
    return pieces.call(F.reshape, y, (-1, channels * block * block, height // block, width // block))


def _scale_and_shift(pieces: PiecesWriter, x: TensorNode, scale: TensorNode, shift: TensorNode) -> TensorNode:
    return pieces.call(F.add, pieces.call(F.mul, x, scale), shift)


_WRITERS: dict[Callable[..., Any], Callable[..., TensorNode]] = {
    functions.scaled_dot_product_attention: _attention,
    functions.channel_shuffle: _channel_shuffle,
    functions.space_to_depth: _space_to_depth,
    functions.scale_and_shift: _scale_and_shift,
}
