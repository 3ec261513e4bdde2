"""Names of a graph's inputs, and the integers of its parameters."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.numerics import quantize

__all__ = ["input_names", "integer_values"]


def input_names(model: TracedModule) -> list[str]:
    """The names of a graph's inputs: those of the traced arguments.

    MegEngine numbers nodes whose names Python uses (``input_1`` for ``input``), and the parts of an argument
    that is a list or a dict; these keep their numbers.
    """
    nodes = [n.name for n in model.graph.inputs[1:]]
    arguments = set(model.argspec.args) if model.argspec is not None else set()
    bare = [name if name in arguments else re.sub(r"_\d+$", "", name) for name in nodes]
    others = {n.name for e in exprs(model) for n in e.outputs}
    counts = Counter(bare)
    return [
        short if short in arguments - others and counts[short] == 1 else name
        for name, short in zip(nodes, bare, strict=True)
    ]


def integer_values(fq: FakeQuant, value: np.ndarray) -> np.ndarray:
    """The integers to which ``fq`` rounds a parameter, in the parameter's own layout (int32)."""
    flat = fq.channels_first(value)
    qparams = fq.qparams()
    integers = quantize(flat.astype(np.float32), qparams)
    if not fq.scheme.per_channel:
        return integers.reshape(value.shape)
    axes = fq.counted_axes
    moved = np.moveaxis(value, axes, range(len(axes))).shape
    return np.moveaxis(integers.reshape(moved), range(len(axes)), axes)
