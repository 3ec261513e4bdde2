"""Runs a file that computes one sample next to a graph whose samples may lie along any axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.ncnn.samples import shapes_of_one_sample
from qtrace.preparation.model import QuantizedModel
from qtrace.verification.runtimes.base import RuntimeRun, Session, run_outputs

__all__ = ["by_sample"]

Shape = tuple[int, ...]


def by_sample(session: Session, model: QuantizedModel) -> Session:
    """Returns a session that takes one sample at a time, if the runtime does and the graph needs it.

    A runtime that computes sample by sample gives its values with the sample as the first axis. In a graph,
    samples may lie along another axis, or along one with other values; a single sample has one place.

    Args:
        session: the session of a file.
        model: the graph that the file was exported from.
    """
    if not getattr(session, "by_sample", False):
        return session
    graph = ConvertedGraph(model)
    nodes = {site.name: site.value for site in graph.sites if site.sort == "activation"}
    nodes.update({name: graph.nodes[name] for name in graph.carried if name in graph.nodes})
    known = [name for name in session.integer_names if name in nodes]
    try:
        shapes = shapes_of_one_sample(graph, [*(nodes[name] for name in known), *graph.outputs])
    except ExportError:  # a file of another graph, which is refused where the two are compared
        return session
    if shapes is None:
        return session
    return _SampleSession(session, dict(zip(known, shapes, strict=False)), shapes[len(known) :])


class _SampleSession:
    """Takes batches of one sample, and gives values the axes that they have in the graph."""

    def __init__(self, session: Session, shapes: dict[str, Shape], outputs: Sequence[Shape]) -> None:
        self._session, self._shapes, self._outputs = session, shapes, outputs
        self.fixed_samples = dict.fromkeys(getattr(session, "input_names", ()), 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def integer_names(self) -> Any:
        """The sites and nodes whose integers `run` gives."""
        return self._session.integer_names

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        run = self._session.run(inputs)
        shapes = self._shapes
        integers = {n: _reshaped(v, shapes[n]) if n in shapes else v for n, v in run.integers.items()}
        outputs = [_reshaped(v, shape) for v, shape in zip(run.outputs, self._outputs, strict=True)]
        return RuntimeRun(outputs, integers)

    def run_outputs(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Runs the model only for its outputs; see `Session`."""
        values = run_outputs(self._session, inputs)
        return [_reshaped(v, shape) for v, shape in zip(values, self._outputs, strict=True)]


def _reshaped(value: np.ndarray, shape: Shape) -> np.ndarray:
    """Returns the values of one sample in their shape in the graph; at other sizes, in as many axes."""
    if value.size == prod(shape):
        return value.reshape(shape)
    return value[0] if len(value) == 1 and value.ndim - 1 == len(shape) else value
