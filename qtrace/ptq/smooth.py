"""SmoothQuant: moves the range of activation channels into the weights that read them.

A tensor with one scale rounds all channels by the step that the largest channel needs. Where the channels
of a tensor may be scaled, each is divided by ``s = max|x|^alpha / max|w|^(1 - alpha)`` of what is read and of
the weights that read it. These are multiplied by s, so that the float model stays the same. Source: Xiao et
al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", section
4. The divisor goes into the layers or the LayerNorm before the tensor, also before ReLU, pooling and other ops for
which ``f(s * x) = s * f(x)``.

Every fourth sample is held back: a tensor is smoothed only if that lowers the error of the layers that read
it, with rounded inputs and weights, on the samples held back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from megengine import Tensor
from pydantic import Field

from qtrace import ops
from qtrace.comparing.sums import ErrorSums, finite_or_none
from qtrace.data.batches import HELD_EVERY, evaluating, translate_errors
from qtrace.graph.flatten import tied_parameters
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.types import GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.numerics import alive, choose, fake_quantize
from qtrace.ops import OpCall
from qtrace.plugins.options import Float
from qtrace.preparation.annotation import Site
from qtrace.preparation.passes.annotate import annotate
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Left, Report, SiteNoise
from qtrace.ptq.layers.scaling import ChannelGroup, Parameters, channel_groups, rounded_weight

__all__ = ["Smooth"]

_Batches = Sequence[np.ndarray]


class Smooth(FloatAlgorithm):
    """Divides the channels of tensors by factors that the weights after them take.

    Attributes:
        alpha: the exponent of the range of what is read; for weights it is ``1 - alpha``. At 1 all
            channels of a smoothed tensor have the same range.
    """

    after: ClassVar[tuple[str, ...]] = ("fuse_bn", "reparameterize", "equalize")
    reason: ClassVar[str] = "smooth looks at the weights that will be rounded"
    reads_samples: ClassVar[bool] = True

    alpha: Annotated[Float, Field(ge=0, le=1)] = 0.5

    def apply(self, task: FloatTask) -> Report:
        if not task.samples:
            return Report(left=(Left("", "it needs data: give prepare(..., samples=batches)"),))
        groups = [*channel_groups(task.model), *_norm_groups(task.model)]
        left = [Left(f"{g.name} ({g.describe()})", g.reason) for g in groups if g.reason]
        groups = [g for g in groups if not g.reason]
        sites = _Sites(task)
        read = {call.inputs[0]: None for g in groups for call in g.readers}
        values = _values(task.model, list(read), task.samples)
        parameters = Parameters(task.model)
        changed, errors = [], []
        for group in groups:
            name = f"{group.name} ({group.describe()})"
            reason = sites.reason_against(group)
            if reason:
                left.append(Left(name, reason))
                continue
            trial = _Trial(parameters, group, sites, values)
            factor = trial.factor(self.alpha)
            before, after = trial.errors(np.ones_like(factor)), trial.errors(factor)
            if after.noise < before.noise:
                parameters.scale(group, factor)
                for path in _norm_parameters(group):
                    parameters.divide(path, factor)
                gain = after.sqnr_db - before.sqnr_db
                text = f"channels divided by {factor.min():.3g} to {factor.max():.3g}"
                changed.append(f"{name}: {text}; on held-back samples the error falls by {gain:.2f} dB")
            else:
                left.append(Left(name, "the error on held-back samples does not fall"))
                after = before
            errors.append(SiteNoise(group.name, *(finite_or_none(e.sqnr_db) for e in (before, after))))
        parameters.store()
        if not groups and not left:
            left.append(Left("", "no layer reads a tensor whose channels may be scaled"))
        return Report(tuple(changed), tuple(left), tuple(errors))


@dataclass
class _NormGroup(ChannelGroup):
    """The output of a LayerNorm that linear layers read.

    Attributes:
        norm: the LayerNorm.
    """

    norm: OpCall | None = field(default=None)

    def describe(self) -> str:
        return f"layer_norm -> {' + '.join(call.out.name for call in self.readers)}"


def _norm_parameters(group: ChannelGroup) -> list[str]:
    """Returns the paths of the weight and the bias of the LayerNorm before a group, if there is one."""
    if not isinstance(group, _NormGroup) or group.norm is None:
        return []
    attrs, module = group.norm.attrs, owner(group.norm.expr)
    if module is not None:
        path = group.norm.expr.inputs[0].expr.name
        return [f"{path}.{name}" for name in ("weight", "bias") if attrs[name] is not None]
    return [attrs[name].expr.name for name in ("weight", "bias") if attrs[name] is not None]


def _norm_groups(model: TracedModule) -> list[ChannelGroup]:
    """Finds the LayerNorms over the last axis whose result linear layers read."""
    groups: list[ChannelGroup] = []
    for expr in exprs(model):
        norm = ops.read(expr)
        if norm is None or norm.kind != "layer_norm":
            continue
        readers = [ops.read(user) for user in users(norm.out)]
        linear = [call for call in readers if call is not None and call.kind == "linear"]
        if not linear:
            continue
        group = _NormGroup(norm.out.name, int(norm.out.shape[-1]), readers=linear, norm=norm)
        group.reason = _reason_against_norm(model, norm, len(readers) - len(linear), linear)
        groups.append(group)
    return groups


def _reason_against_norm(model: TracedModule, norm: OpCall, others: int, linear: Sequence[OpCall]) -> str:
    """Returns why the result of a LayerNorm cannot be scaled; "" if it can."""
    if others or norm.out in model.graph.outputs:
        return "not only linear layers read it"
    if norm.attrs["weight"] is None:
        return "its LayerNorm has no weight"
    nodes = [node for call in linear for node in (call.weight, call.bias)]
    if owner(norm.expr) is None:
        nodes += [norm.attrs["weight"], norm.attrs["bias"]]
    elif len(list(users(norm.expr.inputs[0]))) > 1:
        return "its LayerNorm is called several times"
    tied = tied_parameters(model)
    for node in (n for n in nodes if n is not None):
        if not isinstance(node, TensorNode) or not isinstance(node.expr, GetAttr):
            return "a weight is computed, not a parameter"
        if len(list(users(node))) > 1:
            return f"{node.expr.name} is shared with another call"
        if node.expr.name in tied:
            return f"{node.expr.name} is tied to {tied[node.expr.name]}"
    if tuple(norm.attrs["weight"].shape) != tuple(norm.out.shape[-1:]):
        return "its LayerNorm is over several axes"
    return ""


class _Sites:
    """The sites of what layers read and of their weights, as they are before an algorithm changed them."""

    def __init__(self, task: FloatTask) -> None:
        annotation = annotate(task.model, task.config)
        named = {s.name: s for s in annotation.sites}
        self.weights = {s.node: s for s in annotation.sites if s.sort == "weight"}
        self.activations = {
            node: named[group] for node, group in annotation.carried.items() if group in named
        }
        activations = (s for s in reversed(annotation.sites) if s.sort == "activation")
        self.activations.update((s.node, s) for s in activations)

    def reason_against(self, group: ChannelGroup) -> str:
        """Returns why the smoothing of a group would gain nothing; "" if it may."""
        for call in group.readers:
            if self._site(self.activations, call.inputs[0]) is None:
                return f"what {call.out.name} reads is not rounded"
            if self._site(self.weights, call.weight) is None:
                return f"the weight of {call.out.name} is not rounded"
        for call in group.writers:
            site = self._site(self.weights, call.weight)
            if site is not None and not site.channel_axes:
                return f"the weight of {call.out.name} has one scale, to which factors of channels matter"
        return ""

    @staticmethod
    def _site(sites: Mapping[str, Site], node: Node | None) -> Site | None:
        site = None if node is None else sites.get(node.name)
        return site if site is not None and site.plan is not None else None


class _Trial:
    """The error of the layers that read a group, with and without factors.

    Args:
        parameters: the weights, as smoothed so far.
        group: the group.
        sites: the sites of inputs and weights.
        values: node -> its float values, samples first: one array for each size.
    """

    def __init__(
        self, parameters: Parameters, group: ChannelGroup, sites: _Sites, values: Mapping[Node, _Batches]
    ) -> None:
        self.parameters, self.group, self.sites, self.values = parameters, group, sites, values

    def factor(self, alpha: float) -> np.ndarray:
        """Returns the divisors (C,) of the group's channels; 1 for channels that are not used."""
        read, weights = [], []
        for call in self.group.readers:
            fitted, _ = _split(self.values[call.inputs[0]])
            read += [_channel_maxima(call, value) for value in fitted]
            weights.append(self.parameters.ranges(call, outputs=False))
        largest = np.max(np.stack(read), axis=0).astype(np.float64)
        weight = np.max(np.stack([_per_channel(w, largest.size) for w in weights]), axis=0)
        used = alive(largest) & alive(weight)
        safe = np.where(used, largest, 1.0) ** alpha / np.where(used, weight, 1.0) ** (1 - alpha)
        return np.where(used, safe / np.exp(np.mean(np.log(safe[used]))) if used.any() else 1.0, 1.0)

    def errors(self, factor: np.ndarray) -> ErrorSums:
        """Sums the errors of all readers on the samples held back, where ``factor`` (C,) is moved."""
        sums, model = ErrorSums(), self.parameters.model
        for call in self.group.readers:
            plan = self.sites.activations[call.inputs[0].name].plan
            site = self.sites.weights[call.weight.name] if call.weight is not None else None
            assert plan is not None
            assert site is not None
            assert site.plan is not None
            fitted, held = _split(self.values[call.inputs[0]])
            weight = self.parameters.weight(call)
            small = [_divided(call, value, factor) for value in fitted]
            scheme = plan.scheme if not plan.scheme.per_channel else plan.scheme.replace(axis=None)
            qparams = choose(min(v.min() for v in small), max(v.max() for v in small), scheme)
            moved = self.parameters.multiplied(call, factor)
            rounded = rounded_weight(moved, site.plan.scheme, site.channel_axes)
            for value in held:
                divided = fake_quantize(_divided(call, value, factor), qparams)
                exact = _output(model, call, value, weight)
                sums.add(exact, _output(model, call, divided, rounded))
        return sums


def _per_channel(ranges: np.ndarray, channels: int) -> np.ndarray:
    """Returns the ranges of a weight's input channels, one for each channel of what it reads."""
    return ranges if ranges.size == channels else np.full(channels, ranges.max())


def _channel_axis(call: OpCall) -> int:
    return -1 if call.kind == "linear" else 1


def _divided(call: OpCall, value: np.ndarray, factor: np.ndarray) -> np.ndarray:
    shape = [1] * value.ndim
    shape[_channel_axis(call)] = -1
    return np.asarray(value / factor.reshape(shape), np.float32)


def _channel_maxima(call: OpCall, value: np.ndarray) -> np.ndarray:
    """Returns the largest absolute value of each channel of what a layer reads."""
    axis = _channel_axis(call) % value.ndim
    return np.asarray(np.abs(value).max(axis=tuple(a for a in range(value.ndim) if a != axis)))


def _split(values: _Batches) -> tuple[_Batches, _Batches]:
    """Splits values into the samples that are fitted to and those held back; fewer than 4 are both."""
    fitted, held, first = [], [], 0
    for value in values:
        is_held = np.arange(first, first + len(value)) % HELD_EVERY == HELD_EVERY - 1
        fitted.append(value[~is_held])
        held.append(value[is_held])
        first += len(value)
    fitted, held = ([value for value in part if len(value)] for part in (fitted, held))
    return (fitted, held) if held else (values, values)


def _joined(values: _Batches) -> _Batches:
    """Joins the samples of batches of one size; batches of unlike sizes stay apart."""
    return [np.concatenate(values)] if len({value.shape[1:] for value in values}) == 1 else values


def _output(model: TracedModule, call: OpCall, value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Computes a layer on ``value`` with ``weight``."""
    given = {call.inputs[0]: value, call.weight: weight}
    inputs = [
        Tensor(np.ascontiguousarray(given[node], np.float32))
        if node in given
        else get_module(model, node.expr.name)
        for node in call.expr.inputs
    ]
    results = interpret(call.expr, inputs)
    assert results is not None
    return np.asarray(results[0].numpy())


def _values(model: TracedModule, nodes: Sequence[TensorNode], samples: Sequence[Any]) -> dict[Node, _Batches]:
    """Returns the float values of ``nodes``, the samples of batches of one size joined."""
    parts: dict[Node, list[np.ndarray]] = {node: [] for node in nodes}

    class Recorder(Interpreter):
        def on_node(self, node: Node, value: Any) -> Any:
            if node in parts:
                parts[node].append(value.numpy())
            return value

    with evaluating(model):
        for index, (args, kwargs) in enumerate(samples):
            with translate_errors(model, (args, kwargs), index):
                Recorder(model).run(*args, **kwargs)
    return {node: _joined(values) for node, values in parts.items()}
