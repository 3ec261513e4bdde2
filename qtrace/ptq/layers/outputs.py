"""The error of a model's outputs before and after an algorithm: what the algorithm is run for.

The errors of single sites do not tell it. Where a layer's weights have one scale, for instance, rounding may
erase a channel of small weights that the next layer enlarges, and hardly change the ratio of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import evaluating, first_samples
from qtrace.errors import QtraceError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.metrics import comparable, finite_or_none, sqnr_db
from qtrace.preparation.annotation import Site
from qtrace.preparation.model import QuantizedModel
from qtrace.ptq.base import Batches, SiteNoise
from qtrace.ptq.layers.scaling import rounded_weight

__all__ = ["CalibrationOutputs", "RandomOutputs", "output_errors"]

_MOST_SAMPLES = 8
# What MegEngine and the interpreter raise for inputs that a graph does not take.
_REFUSALS = (QtraceError, AssertionError, TypeError, RuntimeError, ValueError)

Ratios = Mapping[str, float | None]


class _Outputs(Interpreter):
    """Keeps the float outputs of a graph, and may change the values of nodes on the way.

    Args:
        model: the graph.
        change: node name -> what its value is replaced by.
    """

    def __init__(
        self, model: TracedModule, change: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None
    ) -> None:
        super().__init__(model)
        self.change = change or {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Replaces the value of a node that is to be changed."""
        change = self.change.get(node.name)
        return value if change is None else Tensor(change(value.numpy()).astype(np.float32))

    def compute(self, inputs: list[Tensor]) -> list[np.ndarray]:
        """The outputs, in the order of the graph's, for the values of its inputs."""
        graph = self.traced.graph
        values = self._execute(graph, [self.traced, *inputs], None)
        return [values[node].numpy() for node in graph.outputs]


class RandomOutputs:
    """The ratio of each output to the error that rounding the weights makes of it, on random inputs.

    There are no data in ``prepare``: the inputs are normally distributed, of the traced shapes. Activations
    are not rounded.

    Args:
        model: a flat, expanded float graph.
        sites: weight node -> how it is quantized.
    """

    measured = "random inputs, with rounded weights and float activations"

    def __init__(self, model: TracedModule, sites: Mapping[str, Site]) -> None:
        self.model, self.sites = model, sites

    def ratios(self) -> Ratios:
        """Output -> its ratio in dB, None without an error; empty where the graph takes no random inputs."""
        rng, inputs = np.random.default_rng(0), []
        for node in self.model.graph.inputs:
            if isinstance(node, TensorNode):
                kind = np.dtype(node.dtype)
                value = rng.normal(size=node.shape) if kind.kind == "f" else np.zeros(node.shape)
                inputs.append(Tensor(value.astype(kind)))
        changes = {name: _rounding(site) for name, site in self.sites.items()}
        with evaluating(self.model):
            try:
                exact = _Outputs(self.model).compute(inputs)
            except _REFUSALS:
                return {}
            rounded = _Outputs(self.model, changes).compute(inputs)
        return _ratios([node.name for node in self.model.graph.outputs], exact, rounded)


def _rounding(site: Site) -> Callable[[np.ndarray], np.ndarray]:
    assert site.plan is not None
    scheme, axes = site.plan.scheme, site.channel_axes
    return lambda weight: rounded_weight(weight.astype(np.float64), scheme, axes)


class CalibrationOutputs:
    """The ratio of each output to its whole quantization error, on a few samples of the calibration data.

    Args:
        model: the calibrated graph, in the phase ``quantize`` and in eval mode.
        reference: the float graph.
        batches: the calibration data.
    """

    def __init__(self, model: QuantizedModel, reference: TracedModule, batches: Batches) -> None:
        arguments = next(iter(batches.spread(_MOST_SAMPLES)))
        arguments = first_samples(arguments, _MOST_SAMPLES) or arguments
        self.model = model.module
        self.inputs = Interpreter(self.model).bind(*arguments)[1][1:]
        self.exact = _Outputs(reference).compute(self.inputs)
        self.names = [model.unrounded_name(node) for node in self.model.graph.outputs]
        first = self.inputs[0]
        count = int(first.shape[0]) if first.ndim else 1
        self.measured = f"{count} sample{'' if count == 1 else 's'} of the calibration data"

    def ratios(self) -> Ratios:
        """Output -> its ratio in dB, None without an error."""
        return _ratios(self.names, self.exact, _Outputs(self.model).compute(self.inputs))


def _ratios(names: list[str], exact: list[np.ndarray], rounded: list[np.ndarray]) -> Ratios:
    pairs = zip(names, exact, rounded, strict=True)
    return {name: finite_or_none(sqnr_db(f, q)) for name, f, q in pairs if comparable(f, q)}


def output_errors(before: Ratios, after: Ratios) -> tuple[SiteNoise, ...]:
    """The ratios of all outputs that both have; those of a graph without names in common, in order."""
    if set(before) != set(after) and len(before) == len(after):  # an op that gives an output was replaced
        before = dict(zip(after, before.values(), strict=True))
    return tuple(SiteNoise(name, before[name], after[name]) for name in after if name in before)
