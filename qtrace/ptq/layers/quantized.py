"""The quantized layers of a prepared graph: how each is read, and where its parameters lie."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
from megengine import Parameter, Tensor

from qtrace import ops
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph.ordering import order_together
from qtrace.graph.stepping import Stepper
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.ops import OpCall
from qtrace.ptq.base import CalibratedTask, Left

__all__ = [
    "KEPT_NORM",
    "LAYERS",
    "Layer",
    "Twins",
    "by_weight",
    "layers",
    "mean_error",
    "per_channel",
    "write",
]

# Why a layer is left whose BatchNorm is not folded.
KEPT_NORM = "its BatchNorm is kept in training; fuse_bn in ptq folds it"

# The layers whose outputs algorithms look at, with the axis of the output that counts channels.
LAYERS = {"conv1d": 1, "conv2d": 1, "conv_transpose2d": 1, "linear": -1}


@dataclass(frozen=True)
class Layer:
    """A layer that computes with a quantized weight of its own, in one call or several.

    Attributes:
        name: the name of the output of its first call.
        calls: how each is read, in graph order.
        quant: the fake quant of its weight.
        weight: the path of its float weight.
        bias: the path of its float bias; None when it has none.
        axis: the axis of the output that counts channels.
    """

    name: str
    calls: tuple[OpCall, ...]
    quant: FakeQuant
    weight: str
    bias: str | None
    axis: int

    @property
    def call(self) -> OpCall:
        """The first call."""
        return self.calls[0]

    @property
    def title(self) -> str:
        """What a report calls it."""
        return self.name + (f" and {len(self.calls) - 1} more calls" if len(self.calls) > 1 else "")


def by_weight(model: TracedModule) -> list[list[OpCall]]:
    """The calls that read one weight, for each weight; all in graph order."""
    found: dict[Node, list[OpCall]] = {}
    for expr in exprs(model):
        call = ops.read(expr)
        if call is not None and call.weight is not None:
            found.setdefault(call.weight, []).append(call)
    return list(found.values())


def layers(model: TracedModule, shared: bool = False) -> tuple[list[Layer], list[Left]]:
    """The quantized layers, and the calls that cannot be worked on with the reason.

    Args:
        model: a prepared graph.
        shared: whether layers that are called several times are wanted, too.

    Returns:
        The layers in graph order, or, where they are called several times, in the order of a graph in which
        these calls stand together, which is how `Twins` goes through them.
    """
    folds = [e for e in exprs(model) if isinstance(owner(e), BnFold)]
    left = [Left(e.outputs[0].name, KEPT_NORM) for e in folds]
    found: list[Layer] = []
    for calls in by_weight(model):
        weight = calls[0].weight
        if weight is None or not isinstance(owner(weight.expr), FakeQuant):
            continue
        for some in [calls] if shared else [[call] for call in calls]:
            layer = _layer(some)
            if isinstance(layer, Layer):
                found.append(layer)
            else:
                left += [Left(call.out.name, layer) for call in some]
    kept, apart = _side_by_side(model, found)
    for layer in apart:
        reason = f"its weight {layer.weight} is shared by calls that have to wait for each other"
        left += [Left(call.out.name, reason) for call in layer.calls]
    return kept, left


def _side_by_side(model: TracedModule, found: list[Layer]) -> tuple[list[Layer], list[Layer]]:
    """The layers whose calls can stand together, in that order, and the others."""
    steps, kept, apart = exprs(model), found, list[Layer]()
    order = order_together(steps, _groups(kept))
    if order is None:  # one by one
        order, kept = steps, []
        for layer in found:
            longer = order_together(steps, _groups([*kept, layer])) if len(layer.calls) > 1 else order
            (apart if longer is None else kept).append(layer)
            order = longer or order
    place = {expr: i for i, expr in enumerate(order)}
    return sorted(kept, key=lambda layer: place[layer.call.expr]), apart


def _groups(layers: Iterable[Layer]) -> list[list[Expr]]:
    """What is to stand together."""
    return [[call.expr for call in layer.calls] for layer in layers if len(layer.calls) > 1]


def _layer(calls: list[OpCall]) -> Layer | str:
    """The layer that these calls are, all that read its weight, or why they are none."""
    call, *others = calls
    assert call.weight is not None
    if call.kind not in LAYERS or any(other.kind != call.kind for other in others):
        return f"{call.kind} is not supported"
    raw = call.weight.expr.args[1]
    if not isinstance(raw.expr, GetAttr):
        return "its weight is computed"
    ours = {c.expr for c in calls}
    if len(list(users(raw))) > 1 or set(users(call.weight)) != ours:
        return f"its weight {raw.expr.name} is shared with another call"
    bias = _raw_bias(call)
    if any(_raw_bias(other) is not bias for other in others):
        return "its calls have biases of their own"
    if bias is not None and (not isinstance(bias.expr, GetAttr) or _readers(bias) != ours):
        return "its bias is computed or shared with another call"
    path = None if bias is None else bias.expr.name
    quant = owner(call.weight.expr)
    assert isinstance(quant, FakeQuant)
    if quant.transforms:
        return "its fake quant transforms the weight before it rounds"
    return Layer(call.out.name, tuple(calls), quant, raw.expr.name, path, LAYERS[call.kind])


def _raw_bias(call: OpCall) -> TensorNode | None:
    """The bias of a call before it is rounded, which each call does at a scale of its own."""
    bias = call.bias
    if bias is not None and isinstance(owner(bias.expr), BiasQuant):
        return cast(TensorNode, bias.expr.args[1])
    return bias


def _readers(bias: TensorNode) -> set[Expr]:
    """The exprs that read a bias, rounded or not."""
    found: set[Expr] = set()
    for user in users(bias):
        rounded = isinstance(owner(user), BiasQuant)
        found.update(e for e in (users(user.outputs[0]) if rounded else (user,)))
    return found


def write(model: TracedModule, path: str, value: np.ndarray) -> None:
    """Gives the parameter at ``path`` the values ``value``, in its own shape and in place."""
    tensor = get_module(model, path)
    new = np.ascontiguousarray(value.reshape(tuple(int(n) for n in tensor.shape)), dtype=np.float32)
    tensor._reset(Parameter(new) if isinstance(tensor, Parameter) else Tensor(new))


def per_channel(value: np.ndarray, axis: int) -> np.ndarray:
    """``value`` as (channels, rest)."""
    return np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)


def mean_error(pairs: Iterable[tuple[np.ndarray, np.ndarray]], axis: int) -> np.ndarray:
    """What each channel lacks on average; float64 (C,).

    Args:
        pairs: wanted values, and those that there are.
        axis: the axis that counts channels.
    """
    total, count = np.zeros(1), 0
    for want, have in pairs:
        rows = per_channel(want.astype(np.float64) - have, axis)
        total, count = total + rows.sum(axis=1), count + rows.shape[1]
    return total / count


class Twins:
    """The quantized graph and the float one, stepped through side by side.

    Args:
        task: its model and its reference are run on its batches.
        layers: what to look at; calls of one layer are computed together.
    """

    def __init__(self, task: CalibratedTask, layers: Iterable[Layer] = ()) -> None:
        self._twin = {n.name: e for e in exprs(task.reference) for n in e.outputs}
        self._nodes = {n.name: n for n in task.reference.graph.inputs}
        self._nodes.update((n.name, n) for e in self._twin.values() for n in e.outputs)
        groups = _groups(layers)
        self.quantized = Stepper(task.model, task.batches, groups)
        self.float = Stepper(task.reference, task.batches, [[self.twin(e) for e in g] for g in groups])
        self.count = self.quantized.count

    def twin(self, expr: Expr) -> Expr:
        """The expr of the float graph that gives the tensor of the same name."""
        return self._twin[expr.outputs[0].name]

    def node(self, node: TensorNode) -> TensorNode:
        """The node of the float graph with the same name."""
        return self._nodes[node.name]

    def advance(self, expr: Expr) -> None:
        """Computes both graphs up to ``expr``."""
        self.quantized.advance(expr)
        self.float.advance(self.twin(expr))

    def fork(self, expr: Expr) -> Twins:
        """Both graphs just before ``expr``, to be stepped through on their own; this pair goes there, too."""
        self.advance(expr)
        found = copy.copy(self)
        found.quantized, found.float = self.quantized.fork(), self.float.fork()
        return found

    def outputs(self, expr: Expr) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For every batch, what ``expr`` gives in the float graph, and in the quantized one."""
        for batch in range(self.count):
            want = self.float.outputs(self.twin(expr), batch)[0].numpy()
            yield want, self.quantized.outputs(expr, batch)[0].numpy()

    def results(self, layer: Layer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The `outputs` of each call of a layer, one call after the other."""
        for call in layer.calls:
            yield from self.outputs(call.expr)

    def read(self, node: TensorNode, batch: int) -> np.ndarray:
        """The value of a node of the quantized graph."""
        value: np.ndarray = self.quantized.value(node, batch).numpy()
        return value
