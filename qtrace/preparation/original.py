"""A network that its graph is compared with: a graph, or what `qtrace.quantizing` opens with it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from qtrace.data import Batch
from qtrace.data.batches import as_arguments, evaluating
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.native import lower
from qtrace.graph.tracing.diff import values
from qtrace.graph.types import TracedModule

__all__ = ["Original", "Run", "UnpreparedGraph", "arrays_of", "run_graph"]

Run = Callable[[Batch], list[np.ndarray]]
"""A network that gives its outputs for a batch, and may keep a state from call to call."""


class Original(abc.ABC):
    """A network as the user gave it.

    Attributes:
        name: the network in words.
        keeps_state: whether a call may change the results of the next ones.
        precision: the relative error of one operation.
        granularity: the absolute error of activations that are close to 0.
    """

    name: str
    keeps_state: bool = False
    precision: float = 2.0**-23
    granularity: float = 0.0

    @abc.abstractmethod
    def start(self) -> Run:
        """Returns the network in the state in which the user gave it."""


class UnpreparedGraph(Original):
    """A graph as it was given, before it is prepared."""

    name = "the graph that was given"

    def __init__(self, traced: TracedModule) -> None:
        self._traced = traced

    @cached_property
    def _plain(self) -> TracedModule:
        """The graph without MegEngine's own fake quants, which are no part of the float network."""
        return lower(self._traced)[0]

    def start(self) -> Run:
        """Returns the graph, which keeps no state."""
        return lambda batch: run_graph(self._plain, batch)


def run_graph(model: TracedModule, batch: Batch) -> list[np.ndarray]:
    """Returns the outputs of a graph for a batch."""
    args, kwargs = as_arguments(batch, model)
    with evaluating(model), quiet_engine(model):
        return arrays_of(values(Interpreter(model, waits=True).run(*args, **kwargs)))


def arrays_of(results: list[Any]) -> list[np.ndarray]:
    """Returns the arrays among the results of a call."""
    return [value for value in results if isinstance(value, np.ndarray)]
