"""Small models that the tests of reading and rewriting graphs share."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.traced_module import TracedModule, trace_module
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node

from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import flatten

IMAGE = np.random.default_rng(11).standard_normal((2, 4, 6, 6)).astype("float32")


class ConvBnRelu(M.Module):
    def __init__(self):
        super().__init__()
        self.conv = M.Conv2d(4, 4, 3, padding=1)
        self.bn = M.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Residual(M.Module):
    """Hierarchical: a block twice, another block once, and an add."""

    def __init__(self):
        super().__init__()
        self.block = ConvBnRelu()
        self.stages = [ConvBnRelu()]
        self.gain = mge.Parameter(np.full((1, 4, 1, 1), 0.5, "float32"))

    def forward(self, x):
        y = self.block(self.block(x))
        for stage in self.stages:
            y = stage(y)
        return y * self.gain + x


class SplitConcat(M.Module):
    def forward(self, x):
        a, b = F.split(x, 2, axis=1)
        return F.concat([b, a + a, F.zeros_like(b)], axis=1)


class Slices(M.Module):
    def forward(self, x):
        y = x[:, 1:3]
        y[:, 0] = 0
        return y.reshape(2, -1)


class Containers(M.Module):
    def __init__(self):
        super().__init__()
        self.fc = M.Linear(6, 3)

    def forward(self, x, scale=2.0):
        y = self.fc(x) * scale
        return {"y": y, "more": [x + 1, (y, F.relu(y))]}


class Pair(M.Module):
    """Takes a dict and a keyword."""

    def forward(self, pair, bias=None):
        y = pair["a"] - pair["b"]
        return y if bias is None else y + bias


MODELS = (ConvBnRelu, Residual, SplitConcat, Slices, Containers)


def traced_model(model: type[M.Module], flat: bool = True, *args: Any, **kwargs: Any) -> TracedModule:
    """The trace of a model in eval mode, on ``IMAGE`` unless arguments are given."""
    module = model()
    module.eval()
    result = trace_module(module, *(args or (mge.Tensor(IMAGE),)), **kwargs)
    return flatten(result) if flat else result


def function(forward: Any) -> TracedModule:
    """The flat trace of ``forward(x)``; a bare ``F.relu`` would be traced as what it does inside."""
    return traced_model(type("Net", (M.Module,), {"forward": lambda self, x: forward(x)}))


def node(traced: TracedModule, name: str) -> Node:
    """The node of that name."""
    return next(n for n in traced.graph.nodes(False) if n.name == name)


def expr(traced: TracedModule, name: str) -> Expr:
    """The expr that produces the node of that name."""
    return node(traced, name).expr


def chain(length: int) -> TracedModule:
    """A flat graph of that many relus, one after the other."""
    traced = function(lambda x: F.relu(x))
    last = first = traced.graph.outputs[0]
    with GraphEditor(traced) as editor:
        for _ in range(length - 1):
            last = editor.call_function(F.relu, last, after=last.expr, like=first)
        traced.graph.outputs[:] = [last]
    return traced
