"""The quantized layers of a prepared graph: their calls, parameters and outputs in both graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from megengine import Parameter, Tensor

from qtrace import ops
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph.flatten import tied_parameters
from qtrace.graph.stepping import Stepper, as_array, order_together
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.ops import OpCall
from qtrace.ptq.base import CalibratedTask, Left

# The reason for leaving a layer whose BatchNorm is not folded.
KEPT_NORM = "its BatchNorm is kept in training; fuse_bn in ptq folds it"

# Kind of a layer -> the axis of its output that counts channels.
LAYERS = {"conv1d": 1, "conv2d": 1, "conv_transpose2d": 1, "linear": -1}


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer with a quantized weight that no other layer shares, called once or several times.

    Attributes:
        name: the name of the output of its first call.
        calls: the calls of the layer, in graph order.
        quant: the fake quant of its weight.
        weight: the path of its float weight.
        bias: the path of its float bias; None without a bias.
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
        """The name of the layer in a report."""
        return self.name + (f" and {len(self.calls) - 1} more calls" if len(self.calls) > 1 else "")


def calls_by_weight(model: TracedModule) -> list[list[OpCall]]:
    """Groups the calls of a graph by their weight; in graph order."""
    calls: dict[Node, list[OpCall]] = {}
    for expr in exprs(model):
        call = ops.read(expr)
        if call is not None and call.weight is not None:
            calls.setdefault(call.weight, []).append(call)
    return list(calls.values())


def quantized_layers(model: TracedModule, shared: bool = False) -> tuple[list[QuantizedLayer], list[Left]]:
    """Collects the quantized layers, and the calls that no algorithm can change, with the reason.

    Args:
        model: a prepared graph.
        shared: whether to include layers that are called several times.

    Returns:
        The layers in the order in which `LayerTwins` computes them: the calls of one layer are neighbours.
    """
    folds = [e for e in exprs(model) if isinstance(owner(e), BnFold)]
    left = [Left(e.outputs[0].name, KEPT_NORM) for e in folds]
    candidates: list[QuantizedLayer] = []
    tied = tied_parameters(model)
    for calls in calls_by_weight(model):
        weight = calls[0].weight
        if weight is None or not isinstance(owner(weight.expr), FakeQuant):
            continue
        for group in [calls] if shared else [[call] for call in calls]:
            layer = _layer(group)
            path = next((p for p in _paths(layer) if p in tied), None)
            if path is not None:
                layer = f"its parameter {path} is tied to {tied[path]}, which would change, too"
            if isinstance(layer, QuantizedLayer):
                candidates.append(layer)
            else:
                left += [Left(call.out.name, layer) for call in group]
    ordered, blocked = _order_layers(model, candidates)
    for layer in blocked:
        reason = f"its weight {layer.weight} is shared by calls that have to wait for each other"
        left += [Left(call.out.name, reason) for call in layer.calls]
    return ordered, left


def _paths(layer: QuantizedLayer | str) -> tuple[str, ...]:
    """Returns the paths of the parameters of a layer; none for a reason against one."""
    if isinstance(layer, str):
        return ()
    return (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)


def _order_layers(
    model: TracedModule, candidates: list[QuantizedLayer]
) -> tuple[list[QuantizedLayer], list[QuantizedLayer]]:
    """Orders the layers so that the calls of each are neighbours; returns those that cannot be, too."""
    steps, ordered, blocked = exprs(model), candidates, list[QuantizedLayer]()
    order = order_together(steps, call_groups(ordered))
    if order is None:  # try each layer in turn
        order, ordered = steps, []
        for layer in candidates:
            groups = call_groups([*ordered, layer])
            extended = order_together(steps, groups) if len(layer.calls) > 1 else order
            (blocked if extended is None else ordered).append(layer)
            order = extended or order
    position = {expr: i for i, expr in enumerate(order)}
    return sorted(ordered, key=lambda layer: position[layer.call.expr]), blocked


def call_groups(layers: Iterable[QuantizedLayer]) -> list[list[Expr]]:
    """Returns the exprs of each layer that is called several times."""
    return [[call.expr for call in layer.calls] for layer in layers if len(layer.calls) > 1]


def _layer(calls: list[OpCall]) -> QuantizedLayer | str:
    """Builds the layer of all ``calls`` of a weight, or returns the reason against it."""
    call, *others = calls
    assert call.weight is not None
    if call.kind not in LAYERS or any(other.kind != call.kind for other in others):
        return f"{call.kind} is not supported"
    raw = call.weight.expr.args[1]
    if not isinstance(raw.expr, GetAttr):
        return "its weight is computed"
    own = {c.expr for c in calls}
    if len(list(users(raw))) > 1 or set(users(call.weight)) != own:
        return f"its weight {raw.expr.name} is shared with another call"
    bias = _raw_bias(call)
    if any(_raw_bias(other) is not bias for other in others):
        return "its calls have biases of their own"
    if bias is not None and (not isinstance(bias.expr, GetAttr) or _consumers(bias) != own):
        return "its bias is computed or shared with another call"
    path = None if bias is None else bias.expr.name
    quant = owner(call.weight.expr)
    assert isinstance(quant, FakeQuant)
    if quant.transforms:
        return "its fake quant transforms the weight before it rounds"
    return QuantizedLayer(call.out.name, tuple(calls), quant, raw.expr.name, path, LAYERS[call.kind])


def _raw_bias(call: OpCall) -> TensorNode | None:
    """Returns the bias of a call before it is rounded at the scale of that call."""
    bias = call.bias
    if bias is not None and isinstance(owner(bias.expr), BiasQuant):
        return cast(TensorNode, bias.expr.args[1])
    return bias


def _consumers(bias: TensorNode) -> set[Expr]:
    """Returns the exprs that read a bias, rounded or not."""
    consumers: set[Expr] = set()
    for user in users(bias):
        rounded = isinstance(owner(user), BiasQuant)
        consumers.update(users(user.outputs[0]) if rounded else (user,))
    return consumers


def write(model: TracedModule, path: str, value: np.ndarray) -> None:
    """Sets the parameter at ``path`` to ``value``, in place and in the parameter's shape."""
    tensor = get_module(model, path)
    new = np.ascontiguousarray(value.reshape(tuple(int(n) for n in tensor.shape)), dtype=np.float32)
    tensor._reset(Parameter(new) if isinstance(tensor, Parameter) else Tensor(new))


def per_channel(value: np.ndarray, axis: int) -> np.ndarray:
    """Returns ``value`` as (channels, values of a channel)."""
    return np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)


class LayerTwins:
    """The quantized graph and the float graph, computed side by side, expr by expr.

    Args:
        task: the model, the reference and the batches to run both on.
        layers: the layers whose calls are computed together.
        fast: whether the engine of the task computes what it can; values are then arrays.
    """

    def __init__(
        self, task: CalibratedTask, layers: Iterable[QuantizedLayer] = (), fast: bool = False
    ) -> None:
        self._twin = {n.name: e for e in exprs(task.reference) for n in e.outputs}
        self._nodes = {n.name: n for n in task.reference.graph.inputs}
        self._nodes.update((n.name, n) for e in self._twin.values() for n in e.outputs)
        groups = call_groups(layers)
        engine = task.engine if fast else None
        twin_groups = [[self.twin(e) for e in g] for g in groups]
        self.quantized = Stepper(task.model, task.batches, groups, engine)
        self.float = Stepper(task.reference, task.batches, twin_groups, engine)
        self.count = self.quantized.count
        self._unrounded = self._unrounded_nodes(task) if engine is not None else {}

    def _unrounded_nodes(self, task: CalibratedTask) -> dict[Node, list[Node]]:
        """Maps each node that no rounding and no changed parameter precedes to nodes with its value.

        These are its node of the float graph, and the node after its fake quant, which rounds nothing there.
        """
        unrounded: dict[Node, list[Node]] = {n: [self.node(n)] for n in task.model.graph.inputs[1:]}
        for expr in exprs(task.model):
            if isinstance(expr, GetAttr):
                path = expr.name
                same = isinstance(expr.outputs[0], TensorNode) and np.array_equal(
                    *(get_module(model, path).numpy() for model in (task.model, task.reference))
                )
            else:
                same = all(n in unrounded for n in expr.inputs)
            if same:
                unrounded.update((n, [self.node(n)]) for n in expr.outputs)
            elif isinstance(owner(expr), FakeQuant) and expr.args[1] in unrounded:
                unrounded[expr.args[1]].append(self.node(expr.outputs[0]))
        return unrounded

    def twin(self, expr: Expr) -> Expr:
        """Returns the expr of the float graph whose output has the same name."""
        return self._twin[expr.outputs[0].name]

    def node(self, node: TensorNode) -> TensorNode:
        """Returns the node of the float graph with the same name."""
        return self._nodes[node.name]

    def advance(self, expr: Expr) -> None:
        """Computes both graphs up to ``expr``; what nothing rounded precedes is the same in both."""
        self.float.advance(self.twin(expr))
        known: list[dict[Node, Any]] = []
        for batch in range(self.count if self._unrounded else 0):
            alive = self.float.alive(batch)
            pairs = ((node, twin) for node, twins in self._unrounded.items() for twin in twins)
            known.append({node: alive[twin] for node, twin in pairs if twin in alive})
        self.quantized.advance(expr, known)

    def fork(self, expr: Expr) -> LayerTwins:
        """Advances to ``expr`` and returns an independent pair of graphs at the same expr."""
        self.advance(expr)
        twins = copy.copy(self)
        twins.quantized, twins.float = self.quantized.fork(), self.float.fork()
        return twins

    def outputs(
        self, expr: Expr, batches: Sequence[int] | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the output of ``expr`` in the float and in the quantized graph, batch by batch.

        Args:
            expr: the next expr, or one of its group.
            batches: the numbers of the batches; None for all.
        """
        numbers = range(self.count) if batches is None else batches
        for batch in numbers:
            reference = as_array(self.float.outputs(self.twin(expr), batch, numbers)[0])
            yield reference, as_array(self.quantized.outputs(expr, batch, numbers)[0])

    def results(self, layer: QuantizedLayer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the `outputs` of each call of a layer, call by call."""
        for call in layer.calls:
            yield from self.outputs(call.expr)

    def read(self, node: TensorNode, batch: int) -> np.ndarray:
        """Returns the value of a node of the quantized graph."""
        return as_array(self.quantized.value(node, batch))
