"""Where the first value that is not finite arises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.finetuning._data import unpack
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TensorNode, TracedModule

__all__ = ["first_not_finite"]


class _Found(Exception):
    """Ends a run at a node."""


class _Looking(Interpreter):
    def on_node(self, node: Node, value: Any) -> Any:
        is_float = isinstance(node, TensorNode) and np.dtype(value.dtype).kind == "f"
        if is_float and not np.isfinite(value.numpy()).all():
            raise _Found(node.name)
        return value


def first_not_finite(model: TracedModule, form: Any, leaves: Sequence[np.ndarray]) -> str | None:
    """The name of the first node, in the order of the graph, with a NaN or infinity; None without.

    Masks of infinity count too: a graph has them only where it was asked about after a loss was NaN.

    Args:
        model: the graph, in the phase in which it is asked.
        form: the arguments of a call, with numbers for arrays.
        leaves: the arrays.
    """
    args, kwargs = unpack(form, [Tensor(leaf) for leaf in leaves])
    try:
        _Looking(model).run(*args, **kwargs)
    except _Found as found:
        return str(found)
    return None
