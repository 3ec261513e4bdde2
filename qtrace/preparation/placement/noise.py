"""Measures what rounding each value and each weight of a float graph costs at the graph's outputs.

To first order, an error d of a value changes the outputs by J d, with the Jacobian J of the outputs. Its
power is ``|J d|^2 = E[(r . J d)^2] = E[(J^T r . d)^2]`` for a random vector r of independent signs, as in
Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
splines". A backward pass that begins with r gives J^T r at every value of the graph, so a few passes measure
all values and weights.

The square of a whole product ``J^T r . d`` is right on average, but varies much over a few passes. The sum of
the squares of its channels varies less, but is right only if the errors of the channels are uncorrelated, as
rounding errors nearly are (Widrow, Kollar and Liu 1996, "Statistical theory of quantization"). The geometric
mean of both was nearest to real rounding on trained networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qtrace.data.batches import evaluating
from qtrace.graph.engine import quiet_engine
from qtrace.graph.types import Expr, Node
from qtrace.ops import OpCall
from qtrace.preparation.placement._groups import EndGroup
from qtrace.preparation.placement._regions import before_regions
from qtrace.preparation.placement._runs import Probe, RoundedRun, RoundingErrors, Totals, choose_qparams
from qtrace.preparation.placement._sites import PlannedSchemes, find_sites
from qtrace.preparation.placement.reference import MeasuredRun

__all__ = ["OutputNoise", "PlannedSchemes", "measure_noise"]


@dataclass(frozen=True)
class OutputNoise:
    """What rounding costs at the outputs of a float graph: noise power over the power of the outputs.

    Several outputs weigh alike, each relative to its own power, and so do the groups of columns of like range
    of one output: the boxes and the scores that a detector packs into one. Where outputs hardly differ
    between samples, their noise counts more, see `qtrace.outputs.counted.noise_weight`. For an output of
    integers, such as the result of an argmax, the float values that it is computed from count instead. A node
    is absent if none of these depends on its value by a gradient, or if its values are not finite.

    Attributes:
        values: name of a node -> noise if the value is rounded to the activation scheme, with its observed
            minimum and maximum as the range.
        weights: name of a layer's output node -> noise if the layer's weight is rounded.
        samples: number of samples that it was measured on.
        synthetic: whether the samples were random inputs instead of data.
        bits: name of a layer's output node -> the bits that its weight was rounded to.
    """

    values: Mapping[str, float]
    weights: Mapping[str, float]
    samples: int
    synthetic: bool
    bits: Mapping[str, int] = field(default_factory=dict)

    def with_bits(self, bits: Mapping[str, int]) -> OutputNoise:
        """Returns the noise with weights of other bits: its power grows with the square of their step.

        Args:
            bits: name of a layer's output node -> the bits of its weight.
        """
        weights = {}
        for name, noise in self.weights.items():
            steps = [2 ** (count - 1) - 1 for count in (self.bits[name], bits.get(name, self.bits[name]))]
            weights[name] = noise * (steps[0] / max(steps[1], 0.5)) ** 2
        return replace(self, weights=weights, bits={**self.bits, **bits})


def measure_noise(
    run: MeasuredRun,
    calls: Mapping[Expr, OpCall],
    schemes: PlannedSchemes,
    probes: int = 4,
    exact: int = 0,
    names: Container[str] | None = None,
) -> OutputNoise:
    """Measures the noise of rounding each value and weight, one at a time.

    Args:
        run: a flat, expanded float graph on a few small batches; more samples bring more than more probes,
            since a few samples may cause most of the noise. Equal runs give equal results.
        calls: expr -> the `OpCall` that it is read as.
        schemes: the schemes of the values and weights.
        probes: number of random vectors, each a forward and a backward pass of every batch.
        exact: number of values with the largest noise that are measured again by real rounding, each by a
            forward pass of every batch: large steps lead far from the point of the gradient. Values whose
            real rounding selects other rows or gives infinity keep their estimate.
        names: names of the values, and of the results of the layers, that are rounded; None for all.

    Returns:
        The noise of every value and weight on which an output depends by a gradient.
    """
    model, rng = run.model, run.generator()
    values, weights = Totals(), Totals()
    with evaluating(model), quiet_engine(model):
        sites = find_sites(model, calls, schemes, names)
        planned = {node: schemes.of_value(node) for node in sites.values}
        qparams = choose_qparams(run.ranges(sites.values), planned)
        groups = run.groups

        def compute_errors(inputs: Sequence[Any]) -> RoundingErrors:
            errors = RoundingErrors(model, sites, qparams)
            errors.execute(inputs)
            return errors

        for inputs in run.batches if groups else ():
            errors = RoundingErrors(model, sites, qparams)  # the first probe computes them on its way
            for _ in range(probes):
                Probe(model, sites, errors, groups, rng, (values, weights)).execute(inputs)
                run.advance()
        estimates = {node: power / (probes * len(groups)) for node, power in values.powers().items()}
        largest = sorted(estimates, key=lambda node: -estimates[node])[:exact]
        largest += [node for node in before_regions(model) if node in sites.values and node not in largest]
        estimates |= _measure_again(largest, run.batches, compute_errors, groups)
    return OutputNoise(
        {node.name: noise for node, noise in estimates.items()},
        {node.name: power / (probes * len(groups)) for node, power in weights.powers().items()},
        sum(run.counts),
        run.synthetic,
        {node.name: schemes.of_weight(node.expr).bits for node in weights.powers()},
    )


def _measure_again(
    nodes: Sequence[Node],
    batches: Sequence[Sequence[Any]],
    compute_errors: Callable[[Sequence[Any]], RoundingErrors],
    groups: Sequence[EndGroup],
) -> dict[Node, float]:
    """Measures the noise of rounding each of ``nodes`` for real; leaves out what has no finite noise."""
    noise = dict.fromkeys(nodes, 0.0)
    for inputs in batches if nodes else ():
        errors = compute_errors(inputs)
        for node in nodes:
            run = RoundedRun(errors.traced, errors.sites, node, errors.values[node].compute())
            run.execute(inputs)
            noise[node] += run.noise(errors.ends, groups) / len(groups)
    return {node: value for node, value in noise.items() if math.isfinite(value)}
