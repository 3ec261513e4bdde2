"""The quantized layers of a prepared graph: how each is read, and where its parameters lie."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from megengine import Parameter, Tensor

from qtrace import ops
from qtrace.fakequant._bias import BiasQuant
from qtrace.fakequant._bn_fold import BnFold
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.stepping import Stepper
from qtrace.graph.types import Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.ops import OpCall
from qtrace.ptq.base import CalibratedTask

__all__ = ["KEPT_NORM", "LAYERS", "Layer", "Twins", "layers", "per_channel", "write"]

# Why a layer is left whose BatchNorm is not folded.
KEPT_NORM = "its BatchNorm is kept in training; fuse_bn in ptq folds it"

# The layers whose outputs algorithms look at, with the axis of the output that counts channels.
LAYERS = {"conv1d": 1, "conv2d": 1, "conv_transpose2d": 1, "linear": -1}


@dataclass(frozen=True)
class Layer:
    """A layer that computes with a quantized weight of its own.

    Attributes:
        name: the name of its output.
        call: how it is read.
        quant: the fake quant of its weight.
        weight: the path of its float weight.
        bias: the path of its float bias; None when it has none.
        axis: the axis of the output that counts channels.
    """

    name: str
    call: OpCall
    quant: FakeQuant
    weight: str
    bias: str | None
    axis: int


def layers(model: TracedModule) -> tuple[list[Layer], list[str]]:
    """The quantized layers in graph order, and a line with the reason for each that cannot be worked on."""
    found: list[Layer] = []
    left: list[str] = []
    for expr in exprs(model):
        if isinstance(owner(expr), BnFold):
            left.append(f"{expr.outputs[0].name}: {KEPT_NORM}")
            continue
        call = ops.read(expr)
        if call is None or call.weight is None or not isinstance(owner(call.weight.expr), FakeQuant):
            continue
        layer = _layer(call)
        if isinstance(layer, str):
            left.append(f"{call.out.name}: {layer}")
        else:
            found.append(layer)
    return found, left


def _layer(call: OpCall) -> Layer | str:
    assert call.weight is not None
    if call.kind not in LAYERS:
        return f"{call.kind} is not supported"
    raw = call.weight.expr.args[1]
    if not isinstance(raw.expr, GetAttr):
        return "its weight is computed"
    if len(list(users(raw))) > 1 or len(list(users(call.weight))) > 1:
        return f"its weight {raw.expr.name} is shared with another call"
    bias = call.bias
    if bias is not None and isinstance(owner(bias.expr), BiasQuant):
        bias = bias.expr.args[1]
    if bias is not None and (not isinstance(bias.expr, GetAttr) or len(list(users(bias))) > 1):
        return "its bias is computed or shared with another call"
    path = None if bias is None else bias.expr.name
    quant = owner(call.weight.expr)
    assert isinstance(quant, FakeQuant)
    if quant.transforms:
        return "its fake quant transforms the weight before it rounds"
    return Layer(call.out.name, call, quant, raw.expr.name, path, LAYERS[call.kind])


def write(model: TracedModule, path: str, value: np.ndarray) -> None:
    """Gives the parameter at ``path`` the values ``value``, in its own shape and in place."""
    tensor = get_module(model, path)
    new = np.ascontiguousarray(value.reshape(tuple(int(n) for n in tensor.shape)), dtype=np.float32)
    tensor._reset(Parameter(new) if isinstance(tensor, Parameter) else Tensor(new))


def per_channel(value: np.ndarray, axis: int) -> np.ndarray:
    """``value`` as (channels, rest)."""
    return np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)


class Twins:
    """The quantized graph and the float one, stepped through side by side.

    Args:
        task: its model and its reference are run on its batches.
    """

    def __init__(self, task: CalibratedTask) -> None:
        self.quantized = Stepper(task.model, task.batches)
        self.float = Stepper(task.reference, task.batches)
        self.count = self.quantized.count
        self._twin = {n.name: e for e in exprs(task.reference) for n in e.outputs}
        self._nodes = {n.name: n for n in task.reference.graph.inputs}
        self._nodes.update((n.name, n) for e in self._twin.values() for n in e.outputs)

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

    def read(self, node: TensorNode, batch: int) -> np.ndarray:
        """The value of a node of the quantized graph."""
        value: np.ndarray = self.quantized.value(node, batch).numpy()
        return value
