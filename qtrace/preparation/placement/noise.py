"""Estimates what rounding each value and each weight of a calibrated graph costs at its outputs.

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

from collections.abc import Mapping

from megengine import Tensor

from qtrace.data.batches import evaluating
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.types import Expr, Node
from qtrace.preparation.placement._runs import Probe
from qtrace.preparation.placement.reference import MeasuredRun
from qtrace.scheme import QParams

__all__ = ["estimate_noise"]


def estimate_noise(
    run: MeasuredRun, qparams: Mapping[Node, QParams], weights: Mapping[Expr, tuple[Node, Tensor]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimates the noise of rounding each value and weight, one at a time, relative to the outputs' power.

    More samples tell more than more random vectors for each, so that each batch gets one. Half of the
    batches are enough to compare roundings.

    Args:
        run: a flat, expanded float graph on a few small batches. Equal runs give equal results.
        qparams: node -> what its value is rounded by.
        weights: expr of a layer -> the node of its weight, and the rounded weight.

    Returns:
        Name of a node -> the noise of its value, and name of a layer's result -> the noise of its weight.
        What is absent has no gradient to an output, or no finite one.
    """
    model, groups = run.model, run.groups
    if not groups:
        return {}, {}
    with evaluating(model), quiet_engine(model):
        probe = Probe(model, groups, qparams, weights, run.generator())
        half = run.batches[::2]
        for inputs in half:
            probe.execute(inputs)
            run.advance()
    share = len(run.batches) / len(half) / len(groups)
    values, layers = (
        {node.name: share * power for node, power in totals.powers().items()} for totals in probe.totals
    )
    return values, layers
