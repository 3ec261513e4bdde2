"""The choice of the block outputs: nodes whose values are compared with the float graph's."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence, Set

from qtrace.errors import ConfigError, TrainingError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.types import Expr, GetAttr
from qtrace.graph.walk import exprs, is_float_tensor, owner, tensor_inputs, users
from qtrace.preparation.model import QuantizedModel
from qtrace.ptq.rounding.blocks import bottlenecks

__all__ = ["block_outputs"]


def block_outputs(
    prepared: QuantizedModel, patterns: Sequence[str] | None, max_blocks: int, known: Set[str]
) -> tuple[str, ...]:
    """Returns the names of the block outputs, in graph order.

    Without patterns the structure decides. Block outputs are then the bottleneck tensors (ends of
    residual blocks and stages, layers of a chain) and the sums of two branches (the neck of a detector), as
    far as the float graph has them: the backend may have written an activation in pieces. More than
    ``max_blocks`` of them are thinned out evenly.

    Args:
        prepared: a prepared graph.
        patterns: names or glob patterns of nodes; None to choose by structure.
        max_blocks: the most nodes to choose by structure.
        known: the names of the nodes of the float graph.

    Raises:
        ConfigError: when a name or pattern matches no float node.
        TrainingError: when the float graph lacks the nodes.
    """
    model = prepared.module
    computed = [e for e in exprs(model) if not isinstance(e, GetAttr)]
    computed = [e for e in computed if not isinstance(owner(e), (FakeQuant, BiasQuant, DynamicQuant))]
    nodes = [n.name for e in computed for n in e.outputs if is_float_tensor(n)]
    if patterns is not None:
        matched: set[str] = set()
        for pattern in patterns:
            names = fnmatch.filter(nodes, pattern)
            if not names:
                raise ConfigError(
                    f"finetune: no float node of the graph fits blocks: {pattern!r}; see `qtrace explain`."
                )
            matched.update(names)
        names = [name for name in nodes if name in matched]
        _refuse_unknown([name for name in names if name not in known])
        return tuple(names)
    outputs = {n.name for n in model.graph.outputs}
    outputs.update(
        n.name for end in model.graph.outputs for n in tensor_inputs(end.expr) if _rounds(end.expr)
    )
    chosen = {n.name for n in bottlenecks(model)} | _sums(prepared)
    names = [name for name in nodes if name in chosen and name not in outputs]
    if names and known.isdisjoint(names):
        _refuse_unknown(names)
    names = [name for name in names if name in known]
    if len(names) <= max_blocks:
        return tuple(names)
    last = len(names) - 1
    return tuple(names[round(last * i / max(max_blocks - 1, 1))] for i in range(max_blocks))


def _refuse_unknown(names: Sequence[str]) -> None:
    if names:
        raise TrainingError(
            f"the teacher lacks node {names[0]}: give the float network that was prepared, not another."
        )


def _rounds(expr: Expr) -> bool:
    return isinstance(owner(expr), FakeQuant)


def _sums(prepared: QuantizedModel) -> set[str]:
    """Returns the rounded nodes that hold a sum of two tensors, or the activation of such a sum."""
    kinds = {gives: note.kind for note in prepared.annotation.notes for gives in note.gives}
    sums = set()
    for expr in exprs(prepared.module):
        for node in expr.outputs:
            consumers = list(users(node))
            if not consumers or not all(_rounds(consumer) for consumer in consumers):
                continue
            inputs = tensor_inputs(expr)
            sources = [node.name, *(n.name for n in inputs if len(inputs) == 1)]
            if any(kinds.get(name) == "add" for name in sources):
                sums.add(node.name)
    return sums
