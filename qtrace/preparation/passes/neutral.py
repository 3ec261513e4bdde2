"""Removes ops that change no value, such as ``x + 0``.

They come from Python: ``sum(branches)`` begins with 0, and RepVGG's blocks add 0 in the place of a branch
that they do not have. Left in the graph, they stand between a layer and what is fused into it,
and cost a rounding.

One reason keeps them: ``z = y * 1`` is how a network copies a tensor before it writes ``z[:, :2] = 0``, since
MegEngine writes into the Tensor itself, whoever else reads it.
"""

from __future__ import annotations

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.purity import find_written
from qtrace.graph.types import CallMethod, Expr, Node, TracedModule
from qtrace.graph.walk import exprs, tensor_inputs, writes_into
from qtrace.ops import OpCall, Role
from qtrace.preparation.passes.base import PassResult

__all__ = ["drop_neutral"]

_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
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
    number = call.attrs.get("scalar")
    if number is None or _NEUTRAL.get(call.kind) != number or len(call.inputs) != 1:
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
