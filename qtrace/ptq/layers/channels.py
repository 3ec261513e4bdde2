"""Groups of tensors in a float graph whose channels must be scaled together, with their layers.

Where ``f(s * x) = s * f(x)`` for every s > 0, the channels of a tensor may be scaled if every layer that
writes it scales its output channels, and every layer that reads it its input channels, the other way. Tensors
that are added, pooled or passed through such an f belong to one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from qtrace import ops
from qtrace.graph.dataflow import static_nodes
from qtrace.graph.module_tree import tied_parameters
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, op_label, users
from qtrace.ops import OpCall

__all__ = ["LAYERS", "THROUGH", "ChannelGroup", "channel_groups", "input_axes"]

# Positively homogeneous, channel by channel; interpolation and pooling are weighted means or maxima.
THROUGH = {
    *(
        "relu",
        "leaky_relu",
        "prelu",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
    ),
    *("identity", "dropout", "interpolate", "neg", "abs"),
}
LAYERS = ("conv1d", "conv2d", "conv_transpose2d", "linear")


@dataclass
class ChannelGroup:
    """Tensors whose channels are scaled together.

    Attributes:
        name: the name of the first tensor.
        channels: the number of channels of each tensor.
        writers: the layers that compute the tensors.
        readers: the layers that read the tensors.
        through: the other ops between the tensors.
        reason: why the channels cannot be scaled; "" if they can.
    """

    name: str
    channels: int
    writers: list[OpCall] = field(default_factory=list)
    readers: list[OpCall] = field(default_factory=list)
    through: list[OpCall] = field(default_factory=list)
    reason: str = ""

    def describe(self) -> str:
        """Names the layers of the group, such as ``conv1 -> conv2``."""
        sides = ([c.out.name for c in calls] for calls in (self.writers, self.readers))
        return " -> ".join(" + ".join(names) for names in sides)


def input_axes(call: OpCall) -> tuple[int, ...]:
    """Returns the axes of a layer's weight that count its input channels."""
    assert call.weight is not None
    rank, transposed = len(call.weight.shape), call.kind == "conv_transpose2d"
    plain = 2 if call.kind == "linear" else 3 if call.kind == "conv1d" else 4
    if rank > plain:
        return (0, 1) if transposed else (0, 2)
    return (0,) if transposed else (1,)


def channel_groups(model: TracedModule, every: bool = False) -> list[ChannelGroup]:
    """Finds the groups of a flat, expanded float graph, in graph order.

    Args:
        model: the graph.
        every: whether to include groups without a writer or without a reader.
    """
    groups = _GroupFinder(model).groups()
    return groups if every else [g for g in groups if g.writers and g.readers]


class _GroupFinder:
    def __init__(self, model: TracedModule) -> None:
        self.model = model
        self.static, self.tied = static_nodes(model), tied_parameters(model)
        self.parent: dict[Node, Node] = {}
        self.reasons: dict[Node, str] = {}
        self.writers: dict[Node, list[OpCall]] = {}
        self.readers: dict[Node, list[OpCall]] = {}
        self.through: list[tuple[Node, OpCall]] = []
        self.nodes: dict[Node, TensorNode] = {}

    def groups(self) -> list[ChannelGroup]:
        for node in self.model.graph.inputs:
            self._block(node, "it is an input of the model")
        for expr in exprs(self.model):
            if not expr.outputs or all(n in self.static for n in expr.outputs):
                continue
            self._visit(expr)
        for node in self.model.graph.outputs:
            self._block(node, "it leaves the model")
        groups: dict[Node, ChannelGroup] = {}
        for key, node in self.nodes.items():
            root = self._root(key)
            if root not in groups:
                groups[root] = ChannelGroup(node.name, _channels(node))
        for calls, name in ((self.writers, "writers"), (self.readers, "readers")):
            for key, layers in calls.items():
                getattr(groups[self._root(key)], name).extend(layers)
        for key, call in self.through:
            groups[self._root(key)].through.append(call)
        for key, reason in self.reasons.items():
            if self._root(key) in groups and not groups[self._root(key)].reason:
                groups[self._root(key)].reason = reason
        return list(groups.values())

    def _visit(self, expr: Expr) -> None:
        call = ops.read(expr)
        if call is None:
            label = op_label(expr)
            for node in _floats(expr):
                self._block(node, f"{label} reads or gives it")
        elif call.kind in LAYERS:
            self._layer(call)
        elif self._scales(call):
            ends = (*call.inputs, *call.outputs)
            for node in ends:
                self._unite(ends[0], node)
            self.through.append((ends[0], call))
        else:
            why = f"{call.kind} ({call.out.name}) does not scale with its input"
            for node in (*call.inputs, *call.outputs):
                self._block(node, why)

    def _layer(self, call: OpCall) -> None:
        reason = _why_not_layer(call, self.tied)
        rank = 2 if call.kind == "linear" else len(call.inputs[0].shape)
        if reason is None and len(call.inputs[0].shape) != rank:
            reason = "its channels are on another axis than those before"
        for node, calls in ((call.inputs[0], self.readers), (call.out, self.writers)):
            self._add(node)
            if reason is None:
                calls.setdefault(node, []).append(call)
            else:
                self._block(node, f"{call.out.name}: {reason}")

    def _scales(self, call: OpCall) -> bool:
        """Returns whether scaling the input channels of ``call`` scales its output channels."""
        if not call.inputs:  # it reads only parameters
            return False
        source, out = call.inputs[0], call.out
        alike = _channels(source) == _channels(out) > 0
        if call.kind in THROUGH:
            return alike
        if call.kind in ("add", "sub"):
            pair = len(call.inputs) == 2 and "scalar" not in call.attrs
            return pair and all(tuple(n.shape) == tuple(out.shape) for n in call.inputs)
        if call.kind in ("mul", "div"):
            return "scalar" in call.attrs and (call.kind == "mul" or call.attrs["side"] == "right")
        if call.kind == "pad":
            return alike and call.attrs["mode"] == "constant" and call.attrs["value"] == 0.0
        if call.kind in ("mean", "sum", "max"):
            return alike and tuple(source.shape[:2]) == tuple(out.shape[:2]) and _spatial(call)
        if call.kind in ("flatten", "reshape", "squeeze"):
            single = all(int(n) == 1 for n in (*source.shape[2:], *out.shape[2:]))
            return alike and single and int(source.shape[0]) == int(out.shape[0])
        return False

    # -- sets of nodes --------------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        if node not in self.parent and isinstance(node, TensorNode):
            self.parent[node] = node
            self.nodes[node] = node

    def _root(self, key: Node) -> Node:
        root = key
        while self.parent[root] != root:
            root = self.parent[root]
        self.parent[key] = root
        return root

    def _unite(self, first: Node, second: Node) -> None:
        self._add(first)
        self._add(second)
        self.parent[self._root(second)] = self._root(first)

    def _block(self, node: Node, reason: str) -> None:
        if isinstance(node, TensorNode) and is_float_tensor(node):
            self._add(node)
            self.reasons.setdefault(node, reason)


def _channels(node: TensorNode) -> int:
    return int(node.shape[1]) if node.shape is not None and len(node.shape) > 1 else 0


def _spatial(call: OpCall) -> bool:
    """Returns whether a reduction is over axes after the channels."""
    axis = call.attrs.get("axis")
    rank = len(call.inputs[0].shape)
    return axis is not None and all(int(a) % rank >= 2 for a in axis)


def _floats(expr: Expr) -> Iterator[TensorNode]:
    return (n for n in (*expr.inputs, *expr.outputs) if isinstance(n, TensorNode) and is_float_tensor(n))


def _why_not_layer(call: OpCall, tied: Mapping[str, str]) -> str | None:
    """Returns why the parameters of a layer cannot be changed; None if they can."""
    assert call.weight is not None
    for node in (call.weight, call.bias):
        if node is not None and not isinstance(node.expr, GetAttr):
            return f"{node.name} is computed, not a parameter"
        if node is not None and len(list(users(node))) > 1:
            return f"{node.expr.name} is shared with another call"
        if node is not None and node.expr.name in tied:
            return f"{node.expr.name} is tied to {tied[node.expr.name]}"
    return None
