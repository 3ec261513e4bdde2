"""Where the quantized graph is compared with the float one, besides its outputs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.types import Expr, GetAttr
from qtrace.graph.walk import exprs, is_float_tensor, owner, tensor_inputs, users
from qtrace.preparation.model import QuantizedModel
from qtrace.ptq.learning.blocks import bottlenecks

__all__ = ["block_outputs"]


def block_outputs(prepared: QuantizedModel, wanted: Sequence[str] | None, most: int) -> tuple[str, ...]:
    """The names of the nodes that are compared, in graph order.

    By structure: tensors that are alive alone (ends of residual blocks and stages, layers of a chain), and
    sums of two ways in parts where several tensors are alive (the neck of a detector). Where there are more
    than ``most``, they are thinned out evenly.

    Args:
        prepared: a prepared graph.
        wanted: names or glob patterns of nodes; None to choose by structure.
        most: how many are chosen by structure at most.

    Raises:
        ConfigError: when a name or pattern fits no float node.
    """
    model = prepared.module
    computed = [e for e in exprs(model) if not isinstance(e, GetAttr)]
    computed = [e for e in computed if not isinstance(owner(e), (FakeQuant, BiasQuant))]
    nodes = [n.name for e in computed for n in e.outputs if is_float_tensor(n)]
    if wanted is not None:
        found: set[str] = set()
        for pattern in wanted:
            matched = fnmatch.filter(nodes, pattern)
            if not matched:
                raise ConfigError(
                    f"finetune: no float node of the graph fits blocks: {pattern!r}; see `qtrace explain`."
                )
            found.update(matched)
        return tuple(name for name in nodes if name in found)
    outputs = {n.name for n in model.graph.outputs}
    outputs.update(
        n.name for end in model.graph.outputs for n in tensor_inputs(end.expr) if _rounds(end.expr)
    )
    chosen = {n.name for n in bottlenecks(model)} | _sums(prepared)
    names = [name for name in nodes if name in chosen and name not in outputs]
    if len(names) <= most:
        return tuple(names)
    last = len(names) - 1
    return tuple(names[round(last * i / max(most - 1, 1))] for i in range(most))


def _rounds(expr: Expr) -> bool:
    return isinstance(owner(expr), FakeQuant)


def _sums(prepared: QuantizedModel) -> set[str]:
    """Nodes that are rounded and hold a sum of two tensors, or an activation of one."""
    kinds = {gives: note.kind for note in prepared.annotation.notes for gives in note.gives}
    found = set()
    for expr in exprs(prepared.module):
        for node in expr.outputs:
            readers = list(users(node))
            if not readers or not all(_rounds(reader) for reader in readers):
                continue
            before = tensor_inputs(expr)
            sources = [node.name, *(n.name for n in before if len(before) == 1)]
            if any(kinds.get(name) == "add" for name in sources):
                found.add(node.name)
    return found
