"""Removes ops that change no value, such as ``x + 0``.

They come from Python: ``sum(branches)`` begins with 0, and RepVGG's blocks add 0 in the place of a branch
that they do not have. Left in the graph, they stand between a layer and what is fused into it,
and cost a rounding.
"""

from __future__ import annotations

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.ops import OpCall
from qtrace.preparation.passes.base import PassResult

__all__ = ["drop_neutral"]

_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
_EITHER_SIDE = ("add", "mul")


def drop_neutral(traced: TracedModule) -> PassResult:
    """Removes sums with 0, products with 1, and their inverses, which give what they read.

    The results of a graph stay ops of their own, under their names.

    Args:
        traced: a flat, expanded traced module; it is edited in place.
    """
    changed: dict[str, str] = {}
    with GraphEditor(traced) as editor:
        for expr in exprs(traced):
            call = ops.read(expr)
            if call is None or not _is_neutral(call) or any(call.out is n for n in traced.graph.outputs):
                continue
            (source,) = call.inputs
            editor.replace_uses(call.out, source)
            changed[call.out.name] = source.name
    return PassResult(tuple(f"{out}: is {source}" for out, source in changed.items()), ())


def _is_neutral(call: OpCall) -> bool:
    number = call.attrs.get("scalar")
    if number is None or _NEUTRAL.get(call.kind) != number or len(call.inputs) != 1:
        return False
    if call.attrs["side"] == "left" and call.kind not in _EITHER_SIDE:
        return False
    (source,) = call.inputs
    return bool(source.dtype == call.out.dtype and tuple(source.shape) == tuple(call.out.shape))
