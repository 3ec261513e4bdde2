"""The error of a model's outputs before and after an algorithm.

The errors of single sites do not show it. If a layer's weights have one scale, for instance, rounding may
erase a channel of small weights that the next layer enlarges, and hardly change the SQNR of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.comparing.groups import find_groups
from qtrace.comparing.sums import column_errors, finite_or_none
from qtrace.data.batches import ENOUGH_SAMPLES, evaluating, first_samples
from qtrace.errors import QtraceError
from qtrace.graph.deferred_runs import begin_run
from qtrace.graph.interpreter import ENGINE_ERRORS, Interpreter
from qtrace.graph.stepping import SegmentEngine, Stepper, as_array
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.preparation.annotation import Site
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from qtrace.process import count_threads
from qtrace.ptq.base import Batches, SiteNoise
from qtrace.ptq.layers.scaling import rounded_weight

# The errors of MegEngine and the interpreter for inputs that a graph does not accept.
_REFUSALS = (QtraceError, *ENGINE_ERRORS)

Ratios = Mapping[str, float | None]


class _Outputs(Interpreter):
    """Computes the float outputs of a graph, with the values of some nodes changed.

    Args:
        model: the graph.
        change: node name -> the function that changes its value.
    """

    def __init__(
        self, model: TracedModule, change: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None
    ) -> None:
        super().__init__(model)
        self.change = change or {}

    def on_node(self, node: Node, value: Any) -> Any:
        """Replaces the value of a changed node."""
        change = self.change.get(node.name)
        return value if change is None else Tensor(change(value.numpy()).astype(np.float32))

    def compute(self, inputs: list[Tensor]) -> list[np.ndarray]:
        """Computes the outputs for the values of the graph's inputs, in graph order."""
        return [value.numpy() for value in self.run_all(self.traced.graph, [self.traced, *inputs])]


class RandomOutputs:
    """The SQNR of each output under rounded weights, on random inputs.

    ``prepare`` gets no data: the inputs are normally distributed and have the traced shapes. Activations are
    not rounded.

    Args:
        model: a flat, expanded float graph.
        sites: weight node -> its site.
    """

    measured = "random inputs, with rounded weights and float activations"

    def __init__(self, model: TracedModule, sites: Mapping[str, Site]) -> None:
        self.model, self.sites = model, sites

    def ratios(self) -> Ratios:
        """Returns column group -> SQNR in dB, None without an error; {} if the graph refuses the inputs."""
        rng, inputs = np.random.default_rng(0), []
        for node in self.model.graph.inputs:
            if isinstance(node, TensorNode):
                dtype = np.dtype(node.dtype)
                value = rng.normal(size=node.shape) if dtype.kind == "f" else np.zeros(node.shape)
                inputs.append(Tensor(value.astype(dtype)))
        changes = {name: _rounding(site) for name, site in self.sites.items()}
        with evaluating(self.model):
            try:
                exact = _Outputs(self.model).compute(inputs)
            except _REFUSALS:
                return {}
            rounded = _Outputs(self.model, changes).compute(inputs)
        return _ratios(self.model, [node.name for node in self.model.graph.outputs], exact, rounded)


def _rounding(site: Site) -> Callable[[np.ndarray], np.ndarray]:
    assert site.plan is not None
    scheme, axes = site.plan.scheme, site.channel_axes
    return lambda weight: rounded_weight(weight.astype(np.float64), scheme, axes)


class CalibrationOutputs:
    """The SQNR of each output of the quantized graph, on up to 8 samples of the calibration data.

    Outputs of the float graph, and outputs before any change, are computed while the graph is changed, where
    the engine can. Leaving a ``with`` block ends it.

    Args:
        model: the calibrated graph, in the phase ``quantize`` and in eval mode.
        reference: the float graph, which nothing changes.
        batches: the calibration data.
        engine: computes the graphs where it can; None for MegEngine.
        threads: number of threads; None for all cores.
    """

    def __init__(
        self,
        model: QuantizedModel,
        reference: TracedModule,
        batches: Batches,
        engine: SegmentEngine | None = None,
        threads: int | None = None,
    ) -> None:
        arguments = next(iter(batches.spread(ENOUGH_SAMPLES)))
        self.arguments = first_samples(arguments, ENOUGH_SAMPLES, model.module) or arguments
        self.model, self.engine = model.module, engine
        self._reference = reference
        beside = engine is not None and count_threads(threads) > 1
        # One thread, so that the values of one run are in memory next to the algorithms' values.
        self._pool = ThreadPoolExecutor(1) if beside else None
        first = Interpreter(self.model).bind(*self.arguments)[1][1]
        self._exact = self._begin(reference, "float")
        self._before = self._begin(self.model, "quantize")
        self.names = [model.unrounded_name(node) for node in self.model.graph.outputs]
        count = int(first.shape[0]) if first.ndim else 1
        self.measured = f"{count} sample{'' if count == 1 else 's'} of the calibration data"

    def __enter__(self) -> CalibrationOutputs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @cached_property
    def exact(self) -> list[np.ndarray]:
        """The outputs of the float graph."""
        return self._exact()

    @cached_property
    def before(self) -> Ratios:
        """The ratios of the quantized graph as it was given; see `ratios`."""
        # The float graph is that graph as it was.
        return _ratios(self._reference, self.names, self.exact, self._before())

    def ratios(self) -> Ratios:
        """Returns column group of an output -> SQNR in dB, None without an error."""
        return _ratios(self.model, self.names, self.exact, self._compute(self.model))

    def _begin(self, graph: TracedModule, phase: str) -> Callable[[], list[np.ndarray]]:
        """Begins to compute the outputs of a graph, which may then change; returns what gives them.

        Args:
            graph: the graph.
            phase: its phase.
        """
        run = None
        if self._pool is not None and self.engine is not None:
            run = begin_run(graph, [self.arguments], self.engine)
        if self._pool is None or run is None:
            values = self._compute(graph)
            return lambda: values
        begun = self._pool.submit(run)

        def finish() -> list[np.ndarray]:
            computed = begun.result()
            if computed is not None:
                return computed[0]
            with in_phase(self._reference, phase):  # it has the parameters from before
                return self._compute(self._reference)

        return finish

    def _compute(self, model: TracedModule) -> list[np.ndarray]:
        outputs = Stepper(model, [self.arguments], engine=self.engine).finish()
        return [as_array(value) for value in outputs]


def _ratios(
    model: TracedModule, names: list[str], exact: list[np.ndarray], rounded: list[np.ndarray]
) -> Ratios:
    """Returns the SQNR of each column group of the outputs by its name."""
    errors = column_errors([exact], [rounded], find_groups(model, [exact], names=names))
    return {figures.group.name: finite_or_none(figures.sqnr_db) for figures in errors.errors()}


def output_errors(before: Ratios, after: Ratios) -> tuple[SiteNoise, ...]:
    """Pairs the SQNRs of the column groups by name; by order if an output was renamed."""
    if set(before) != set(after) and len(before) == len(after):  # the op of an output was replaced
        before = dict(zip(after, before.values(), strict=True))
    return tuple(SiteNoise(name, before[name], after[name]) for name in after if name in before)
