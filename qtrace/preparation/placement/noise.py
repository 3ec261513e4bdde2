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
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import count_samples, evaluating, translate_errors
from qtrace.errors import GraphError
from qtrace.graph.engine import quiet_engine
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.ops import OpCall
from qtrace.preparation.placement._runs import Probe, RoundedRun, RoundingErrors, Statistics, Totals
from qtrace.preparation.placement._sites import Sites, find_sites
from qtrace.scheme import QScheme

__all__ = ["Arguments", "Noise", "measure_noise"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_SYNTHETIC_BATCHES = 2


@dataclass(frozen=True)
class Noise:
    """What rounding costs at the outputs of a float graph: noise power over the power of the outputs.

    Several outputs weigh alike, each relative to its own power. For an output of integers, such as the result
    of an argmax, the float values that it is computed from count instead. A node is absent if none of these
    depends on its value by a gradient, or if its values are not finite.

    Attributes:
        values: name of a node -> noise if the value is rounded to the activation scheme, with its observed
            minimum and maximum as the range.
        weights: name of a layer's output node -> noise if the layer's weight is rounded.
        samples: number of samples that it was measured on.
        synthetic: whether the samples were random inputs instead of data.
    """

    values: Mapping[str, float]
    weights: Mapping[str, float]
    samples: int
    synthetic: bool


def measure_noise(
    model: TracedModule,
    calls: Mapping[Expr, OpCall],
    activation: QScheme,
    weight: QScheme,
    samples: Sequence[Arguments] | None,
    probes: int = 4,
    seed: int = 0,
    exact: int = 0,
    names: Container[str] | None = None,
) -> Noise:
    """Measures the noise of rounding each value and weight, one at a time.

    Args:
        model: a flat, expanded float graph; it is not changed.
        calls: expr -> the `OpCall` that it is read as.
        activation: the scheme of values, read as one per tensor.
        weight: the scheme of weights, per channel or per tensor.
        samples: a few small batches as arguments of a call; more samples bring more than more probes, since
            a few samples may cause most of the noise. None for random inputs of the traced shapes with the
            spectrum of natural images and variance 1: a stand-in, which may be far off where the network was
            trained on other inputs.
        probes: number of random vectors, each a forward and a backward pass of every batch.
        seed: seed of all random numbers; equal seeds give equal results.
        exact: number of values with the largest noise that are measured again by real rounding, each by a
            forward pass of every batch: large steps lead far from the point of the gradient. Values whose
            real rounding selects other rows or gives infinity keep their estimate.
        names: names of the values, and of the results of the layers, that are rounded; None for all.

    Returns:
        The noise of every value and weight on which an output depends by a gradient.
    """
    rng = np.random.default_rng(seed)
    values, weights = Totals(), Totals()
    with evaluating(model), quiet_engine(model):
        batches = _read_batches(model, samples, rng)
        sites = find_sites(model, calls, weight, names)
        statistics = _read_statistics(model, sites, batches)
        qparams, powers = statistics.qparams(activation), statistics.live_powers()

        def compute_errors(inputs: Sequence[Any]) -> RoundingErrors:
            errors = RoundingErrors(model, sites, qparams)
            errors.execute(inputs)
            return errors

        for inputs in batches if powers else ():
            errors = compute_errors(inputs)
            for _ in range(probes):
                Probe(model, sites, errors, powers, rng, (values, weights)).execute(inputs)
        estimates = {node: power / (probes * len(powers)) for node, power in values.powers().items()}
        largest = sorted(estimates, key=lambda node: -estimates[node])[:exact]
        estimates |= _measure_again(largest, batches, compute_errors, powers)
    return Noise(
        {node.name: noise for node, noise in estimates.items()},
        {node.name: power / (probes * len(powers)) for node, power in weights.powers().items()},
        sum(count_samples((tuple(inputs[1:]), {})) for inputs in batches),
        samples is None,
    )


def _read_batches(
    model: TracedModule, samples: Sequence[Arguments] | None, rng: np.random.Generator
) -> list[Sequence[Any]]:
    """Returns the values of the graph's inputs for each batch: the module itself, then its tensors."""
    if samples is None:
        return [_synthetic_inputs(model, rng) for _ in range(_SYNTHETIC_BATCHES)]
    binder = Interpreter(model)
    return [binder.bind(args, kwargs)[1] for args, kwargs in samples]


def _read_statistics(model: TracedModule, sites: Sites, batches: Sequence[Sequence[Any]]) -> Statistics:
    """Runs the float graph on every batch; an error of MegEngine names the batch."""
    statistics = Statistics(model, sites)
    for index, inputs in enumerate(batches):
        with translate_errors(model, (tuple(inputs[1:]), {}), index):
            statistics.execute(inputs)
    return statistics


def _measure_again(
    nodes: Sequence[Node],
    batches: Sequence[Sequence[Any]],
    compute_errors: Callable[[Sequence[Any]], RoundingErrors],
    powers: Mapping[Node, float],
) -> dict[Node, float]:
    """Measures the noise of rounding each of ``nodes`` for real; leaves out what has no finite noise."""
    noise = dict.fromkeys(nodes, 0.0)
    for inputs in batches if nodes else ():
        errors = compute_errors(inputs)
        for node in nodes:
            run = RoundedRun(errors.traced, errors.sites, node, errors.values[node])
            run.execute(inputs)
            noise[node] += run.noise(errors.ends, powers) / len(powers)
    return {node: value for node, value in noise.items() if math.isfinite(value)}


def _synthetic_inputs(model: TracedModule, rng: np.random.Generator) -> list[Any]:
    """Generates a batch of the traced shapes, after the module itself, which is the graph's first input."""
    tensors = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    return [model, *(_synthetic(node, rng) for node in tensors)]


def _synthetic(node: TensorNode, rng: np.random.Generator) -> Tensor:
    """Generates a tensor; an image has amplitudes that fall with the frequency f as 1/f, and variance 1.

    Field 1987, "Relations between the statistics of natural images and the response properties of cortical
    cells", finds this spectrum. Integers are 0, a valid index of any table.
    """
    if node.shape is None or node.dtype is None:
        raise GraphError(
            f"input {node.name} has no recorded shape or type, so no values can be made to measure noise: "
            "give images by prepare(samples=), or set placement to fastest or everything."
        )
    shape, dtype = tuple(int(n) for n in node.shape), np.dtype(node.dtype)
    if dtype.kind != "f":
        return Tensor(np.zeros(shape, dtype))
    value = rng.standard_normal(shape)
    if len(shape) == 4:
        frequency = np.hypot(np.fft.fftfreq(shape[2])[:, None], np.fft.fftfreq(shape[3])[None, :])
        spectrum = np.fft.fft2(value) / np.maximum(frequency, 1.0 / max(shape[2:]))
        value = np.fft.ifft2(spectrum).real
        value /= max(float(value.std()), 1e-6)
    return Tensor(value.astype(dtype))
