"""Equalization: biases, groups of channels that are scaled together, and their arithmetic in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.comparing.sums import finite_or_none, sqnr_db
from qtrace.fakequant.base import split_blocks
from qtrace.fakequant.following.bias import BIAS_LIMIT, BiasQuant
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import set_parameter, tied_parameters
from qtrace.graph.interpreter import static_nodes
from qtrace.graph.stepping import order_together
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, is_float_tensor, op_label, owner, users
from qtrace.numerics import alive, choose, fake_quantize
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Site
from qtrace.preparation.passes.folding import bias_shape, free_bias
from qtrace.ptq.layers.held_back import Gain, OutputErrors, gain_text
from qtrace.ptq.layers.quantized import LAYERS, QuantizedLayer, calls_by_weight, write
from qtrace.scheme import QScheme

# A correction is a multiple of this share (as a power of two) of the error of the output.
_STEP_BITS = 12


def add_biases(model: TracedModule) -> None:
    """Gives layers without a bias a bias of zeros, unless a BatchNorm follows; used in the float stage."""
    with GraphEditor(model) as editor:
        for calls in calls_by_weight(model):
            source = calls[0].weight.expr if calls[0].weight is not None else None
            if not isinstance(source, GetAttr) or not _can_have_bias(model, calls):
                continue
            path = free_bias(model, source.name)
            channels = int(calls[0].out.shape[LAYERS[calls[0].kind]])
            zeros = np.zeros(channels, np.float32).reshape(bias_shape(calls[0].kind))
            set_parameter(model, path, Parameter(zeros))
            for call in calls:
                editor.set_argument(call.expr, "bias", editor.get_attr(path))


def _can_have_bias(model: TracedModule, calls: list[OpCall]) -> bool:
    """Whether the calls that share a weight lack a bias and can get one."""
    for call in calls:
        if call.kind != calls[0].kind or call.kind not in LAYERS or call.bias is not None:
            return False
        followers = [ops.read(u) for u in users(call.out)]
        if any(f is not None and f.kind == "batch_norm" for f in followers):
            return False
    group = [call.expr for call in calls]
    if set(users(calls[0].weight)) != set(group):
        return False
    return len(group) == 1 or order_together(exprs(model), [group]) is not None


def correct_bias(
    model: TracedModule,
    layer: QuantizedLayer,
    errors: OutputErrors,
    fitted: np.ndarray,
    held: Mapping[int, OutputErrors],
) -> tuple[float | None, str]:
    """Adds the mean error of each channel to the bias, unless that raises the error on held-back batches.

    Args:
        model: the quantized graph.
        layer: a layer with a bias.
        errors: the errors of the layer's output in all batches.
        fitted: the mean error of each channel, (C,), in the batches that are not held back.
        held: those in each batch that is held back.

    Returns:
        The largest change of the bias (None if it stays), and a clause on the held-back batches or "".
    """
    text = ""
    if held:
        gain = Gain.of([(e.noise(), e.noise(fitted)) for e in held.values()])
        text = gain_text(*gain.noises, tuple(held))
        if not gain.supported:
            return None, text
    return move_bias(model, layer, _coarse(errors)), text


def _coarse(errors: OutputErrors) -> np.ndarray:
    """Returns the mean error of each channel in steps far below the error: last bits decide no integer."""
    spread = np.sqrt(errors.square / max(errors.count * errors.total.size, 1))
    step = 2.0 ** (np.floor(np.log2(max(spread, 1e-30))) - _STEP_BITS)
    return np.asarray(np.round(errors.mean / step) * step)


def move_bias(model: TracedModule, layer: QuantizedLayer, shift: np.ndarray) -> float:
    """Adds ``shift`` (C,) to the bias of ``layer``; returns the largest change."""
    assert layer.bias is not None
    old = get_module(model, layer.bias).numpy().astype(np.float64).reshape(-1)
    new = _within_int32(layer, old + shift)
    write(model, layer.bias, new)
    return float(np.abs(new - old).max())


def _within_int32(layer: QuantizedLayer, bias: np.ndarray) -> np.ndarray:
    """Clips ``bias`` to the int32 accumulators of all calls, since a dead channel's scale may be tiny."""
    for call in layer.calls:
        assert call.bias is not None
        source = call.bias.expr
        module = owner(source)
        if isinstance(module, BiasQuant):
            activation, weight = (node.owner for node in source.args[2:])
            scale = module.scale(activation, weight)[0].numpy().astype(np.float64).reshape(-1)
            bias = np.clip(bias, -BIAS_LIMIT * scale, BIAS_LIMIT * scale)
    return bias


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


class Parameters:
    """Weights and biases of a graph as float64 arrays.

    Args:
        model: the graph; it is changed by `store` only.
    """

    def __init__(self, model: TracedModule) -> None:
        self.model = model
        self._values: dict[str, np.ndarray] = {}

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._values:
            self._values[path] = get_module(self.model, path).numpy().astype(np.float64)
        return self._values[path]

    def weight(self, call: OpCall) -> np.ndarray:
        """Returns the weight of a layer in the shape that the model has."""
        assert call.weight is not None
        return self[call.weight.expr.name]

    def ranges(self, call: OpCall, outputs: bool) -> np.ndarray:
        """Returns the largest magnitude of the weights of each output or input channel, shape (C,)."""
        weight = np.abs(self.weight(call))
        axes = call.channel_axes if outputs else input_axes(call)
        rest = tuple(a for a in range(weight.ndim) if a not in axes)
        ranges: np.ndarray = weight.max(axis=rest).reshape(-1)
        return ranges

    def scale(self, group: ChannelGroup, factor: np.ndarray) -> None:
        """Divides the channels of a group by ``factor`` (C,); the outputs of the model stay the same."""
        for call in group.writers:
            self._multiply(call, 1.0 / factor, call.channel_axes)
            if call.bias is not None:
                self.divide(call.bias.expr.name, factor)
        for call in group.readers:
            self._multiply(call, factor, input_axes(call))

    def multiplied(self, call: OpCall, factor: np.ndarray) -> np.ndarray:
        """Returns the weight of a layer whose input channels are multiplied by ``factor`` (C,)."""
        return self._product(call, factor, input_axes(call))

    def divide(self, path: str, divisor: np.ndarray) -> None:
        """Divides the parameter at ``path`` by ``divisor`` (C,)."""
        self._values[path] = (self[path].reshape(-1) / divisor).reshape(self[path].shape)

    def _multiply(self, call: OpCall, factor: np.ndarray, axes: tuple[int, ...]) -> None:
        assert call.weight is not None
        self._values[call.weight.expr.name] = self._product(call, factor, axes)

    def _product(self, call: OpCall, factor: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        weight = self.weight(call)
        shape = tuple(n if i in axes else 1 for i, n in enumerate(weight.shape))
        return weight * factor.reshape(shape)

    def add_to_bias(self, call: OpCall, shift: np.ndarray) -> None:
        """Adds ``shift`` (C,) to the bias of a layer that has one."""
        assert call.bias is not None
        path = call.bias.expr.name
        self._values[path] = self[path] + shift.reshape(self[path].shape)

    def store(self) -> None:
        """Writes the values into the graph, as float32."""
        for path, value in self._values.items():
            write(self.model, path, value)


def factors(parameters: Parameters, group: ChannelGroup) -> np.ndarray:
    """Returns the divisors of a group's channels that make writers and readers use their ranges alike.

    For one writer and one reader with ranges r1 and r2 this is ``sqrt(r1 / r2)``, after which both ranges are
    ``sqrt(r1 * r2)`` (Nagel et al. 2019, section 4.1 and appendix A). Of several layers on one side, each
    channel counts as in the layer where it is largest, measured by that layer's own range. The means of
    these ranges give the common factor. Channels that one side does not use, or whose weights are next to 0
    compared with the others (`qtrace.numerics.alive`), keep their scale: their output may be only a bias.
    """
    sides = []
    for calls, outputs in ((group.writers, True), (group.readers, False)):
        ranges = [parameters.ranges(call, outputs) for call in calls]
        whole = [max(float(r.max()), float(np.finfo(np.float64).tiny)) for r in ranges]
        share = np.max(np.stack([r / w for r, w in zip(ranges, whole, strict=True)]), axis=0)
        sides.append(share * np.exp(np.mean(np.log(whole))))
    written, read = sides
    used = alive(written) & alive(read)
    return np.where(used, np.sqrt(np.where(used, written, 1.0) / np.where(used, read, 1.0)), 1.0)


def precision(ranges: np.ndarray) -> np.ndarray:
    """Returns the bits that each used channel loses under one scale for all: ``log2(max(r) / r)``."""
    used = ranges[alive(ranges)]
    return np.log2(used.max() / used) if used.size else np.zeros(1)


def weight_sqnr(weight: np.ndarray, scheme: QScheme, axes: tuple[int, ...]) -> float | None:
    """Returns the SQNR in dB of a weight that is rounded over its whole range; None if it is exact.

    Args:
        weight: the weight in the shape that the model has.
        scheme: the scheme of the weight.
        axes: the axes that count channels with a scale each; () for one scale.
    """
    return finite_or_none(sqnr_db(weight, rounded_weight(weight, scheme, axes)))


def rounded_weight(weight: np.ndarray, scheme: QScheme, axes: tuple[int, ...]) -> np.ndarray:
    """Rounds a weight over its whole range.

    Args:
        weight: the weight.
        scheme: the scheme of the weight.
        axes: the axes that count channels with a scale each; () for one scale.
    """
    if scheme.block is not None:
        blocks = split_blocks(weight, scheme.block)
        return fake_quantize(weight, choose(blocks.min(axis=1), blocks.max(axis=1), scheme))
    moved = np.moveaxis(weight, axes, range(len(axes))) if axes else weight
    rows = moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)
    if axes:
        qparams = choose(rows.min(axis=1), rows.max(axis=1), scheme.replace(axis=0))
    else:
        qparams = choose(rows.min(), rows.max(), scheme)
    rounded = fake_quantize(rows, qparams).reshape(moved.shape)
    return np.moveaxis(rounded, range(len(axes)), axes) if axes else rounded


def site_sqnr(parameters: Parameters, call: OpCall, site: Site) -> float | None:
    """Returns the `weight_sqnr` of a layer under the plan of its weight's site."""
    assert site.plan is not None
    return weight_sqnr(parameters.weight(call), site.plan.scheme, site.channel_axes)
