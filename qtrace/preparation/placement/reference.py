"""The float graph on a few samples, which all measurements of `prepare` share: it runs once for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import count_samples, evaluating, translate_errors
from qtrace.errors import GraphError
from qtrace.graph.dataflow import evaluate_fixed, fixed_nodes
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.opaque import divides_by_inputs
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor
from qtrace.outputs.columns import LEAST_VALUES
from qtrace.preparation.placement._runs import (
    EndGroup,
    RangeStatistics,
    find_end_groups,
    find_ends,
    find_scores,
    find_unseen,
    make_regions,
    region_inputs,
)

__all__ = ["Arguments", "MeasuredRun"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_SYNTHETIC_BATCHES = 2


def _nothing() -> None:
    """Shows no progress."""


class MeasuredRun:
    """The batches on which a float graph is measured, and what one run on them tells.

    Nothing runs before the first question. The run then reads the ranges of all values that depend on an
    input of the graph, so that later questions are answered without another run.

    Args:
        model: a flat, expanded float graph; it is not changed.
        samples: a few small batches as arguments of a call. None for random inputs of the traced shapes with
            the spectrum of natural images and variance 1: a stand-in, which may be far off where the network
            was trained on other inputs.
        seed: seed of the random inputs.
        advance: is called after each run of a batch, by whoever runs one.
        ranges: whether ranges will be asked for.

    Attributes:
        outputs: the nodes that stand for the outputs; without the scores of sorts, which are judged by rows.
        ends: the nodes at which noise is measured: these, the scores by which rows are selected, and what
            nodes without a gradient read.
    """

    def __init__(
        self,
        model: TracedModule,
        samples: Sequence[Arguments] | None,
        seed: int = 0,
        advance: Callable[[], object] = _nothing,
        ranges: bool = True,
    ) -> None:
        self.model, self.samples, self.advance, self._reads_ranges = model, samples, advance, ranges
        ends, scores = find_ends(model), find_scores(model)
        self.ends = tuple(dict.fromkeys((*ends, *scores, *find_unseen(model))))
        self.outputs = tuple(e for e in ends if e not in scores or e in model.graph.outputs) or ends
        self._generator = np.random.default_rng(seed)
        self._ranges: dict[Node, tuple[float, float]] = {}
        self._exact: list[dict[Node, np.ndarray]] = []

    @property
    def synthetic(self) -> bool:
        """Whether the batches are random inputs instead of data."""
        return self.samples is None

    @cached_property
    def batches(self) -> list[Sequence[Any]]:
        """The values of the graph's inputs for each batch: the module itself, then its tensors."""
        if self.samples is None:
            return [_synthetic_inputs(self.model, self._generator) for _ in range(_SYNTHETIC_BATCHES)]
        binder = Interpreter(self.model)
        return [binder.bind(args, kwargs)[1] for args, kwargs in self.samples]

    @property
    def counts(self) -> list[int]:
        """The number of samples of each batch."""
        return [count_samples((tuple(inputs[1:]), {})) for inputs in self.batches]

    def columns_are_known(self, node: TensorNode) -> bool:
        """Returns whether the columns of a layer's result may have enough values to have known ranges."""
        shape = node.shape
        few = shape is not None and len(shape) == 2 and _SYNTHETIC_BATCHES * int(shape[0]) < LEAST_VALUES
        return not (self.synthetic and few)

    def generator(self) -> np.random.Generator:
        """Returns a new generator of random numbers, in the state after the batches' own."""
        assert self.batches is not None
        return copy.deepcopy(self._generator)

    def ranges(self, nodes: Iterable[Node]) -> dict[Node, tuple[float, float]]:
        """Returns the smallest and largest value of each of ``nodes`` that has values.

        Raises:
            CalibrationError: when the graph does not run on the samples.
        """
        nodes = list(nodes)
        self._run(())
        self._read_fixed([n for n in nodes if n not in self._ranges])
        return {node: self._ranges[node] for node in nodes if node in self._ranges}

    def exact(self, nodes: Sequence[Node] = ()) -> Sequence[Mapping[Node, np.ndarray]]:
        """Returns for each batch the values of the ends and of ``nodes``, which are kept from now on.

        Raises:
            CalibrationError: when the graph does not run on the samples.
        """
        self._run(nodes)
        return self._exact

    @cached_property
    def groups(self) -> tuple[EndGroup, ...]:
        """The groups of columns of like range of the ends."""
        # Random inputs tell nothing of what differs between samples.
        counts = [0] * len(self.batches) if self.synthetic else self.counts
        return find_end_groups(self.model, self.ends, self.exact(), counts)

    @cached_property
    def _fixed(self) -> set[Node]:
        return fixed_nodes(self.model)

    def _run(self, columns: Sequence[Node]) -> None:
        """Runs the graph on every batch, unless that tells nothing new; an error names the batch."""
        kept = tuple(dict.fromkeys((*self.ends, *columns)))
        if self._exact and all(node in self._exact[0] for node in kept):
            return
        graph = self.model.graph
        nodes = [*graph.inputs, *(node for expr in exprs(self.model) for node in expr.outputs)]
        values = frozenset(n for n in nodes if is_float_tensor(n) and n not in self._fixed)
        values = values if self._reads_ranges else frozenset()
        with evaluating(self.model), quiet_engine(self.model):
            statistics = RangeStatistics(self.model, kept, values)
            for index, inputs in enumerate(self.batches):
                with translate_errors(self.model, (tuple(inputs[1:]), {}), index):
                    statistics.execute(inputs)
                self.advance()
        self._ranges.update(statistics.ranges)
        self._exact = statistics.exact

    def _read_fixed(self, nodes: Sequence[Node]) -> None:
        """Reads the ranges of those of ``nodes`` that depend only on parameters and constants."""
        fixed = [node for node in nodes if node in self._fixed and is_float_tensor(node)]
        with evaluating(self.model), quiet_engine(self.model):
            values = evaluate_fixed(self.model, fixed) if fixed else {}
        for node, value in values.items():
            if value.size:
                array = value.numpy()
                self._ranges[node] = float(array.min()), float(array.max())


def _synthetic_inputs(model: TracedModule, rng: np.random.Generator) -> list[Any]:
    """Generates a batch of the traced shapes, after the module itself, which is the graph's first input."""
    tensors = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    regions = region_inputs(model)
    integer = int(divides_by_inputs(model))
    return [model, *(make_regions(n, rng) if n in regions else _synthetic(n, rng, integer) for n in tensors)]


def _synthetic(node: TensorNode, rng: np.random.Generator, integer: int) -> Tensor:
    """Generates a tensor; an image has amplitudes that fall with the frequency f as 1/f, and variance 1.

    Field 1987, "Relations between the statistics of natural images and the response properties of cortical
    cells", finds this spectrum. Integers are ``integer``: 0, a valid index of any table, or 1 where the graph
    divides by some.
    """
    if node.shape is None or node.dtype is None:
        raise GraphError(
            f"input {node.name} lacks a recorded shape or type, so noise cannot be measured on generated "
            "values: give prepare(samples=), or set placement to fastest or everything."
        )
    shape, dtype = tuple(int(n) for n in node.shape), np.dtype(node.dtype)
    if dtype.kind != "f":
        return Tensor(np.full(shape, integer, dtype))
    value = rng.standard_normal(shape)
    if len(shape) == 4:
        frequency = np.hypot(np.fft.fftfreq(shape[2])[:, None], np.fft.fftfreq(shape[3])[None, :])
        spectrum = np.fft.fft2(value) / np.maximum(frequency, 1.0 / max(shape[2:]))
        value = np.fft.ifft2(spectrum).real
        value /= max(float(value.std()), 1e-6)
    return Tensor(value.astype(dtype))
