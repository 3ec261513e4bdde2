"""Batches at other sizes of open axes, made of the first batch: a file is verified at several sizes.

Runs a file that computes one sample next to a graph whose samples may lie along any axis.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.data.batches import as_arguments, evaluating
from qtrace.errors import ExportError, GraphError
from qtrace.export import find_format
from qtrace.export.converted import ConvertedGraph, PlainGraph, is_plain
from qtrace.graph.interpreter import Interpreter, locate_failure
from qtrace.graph.open_axes import OpenAxes, OpenAxis, other_sizes, read_open_axes, repeat_to
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.onnxfile.external_data import read_model
from qtrace.preparation.model import QuantizedModel
from qtrace.verification.runtimes.base import RuntimeRun, Session, run_outputs

_LOG = logging.getLogger("qtrace")


# A size shrinks to this share at least: a network may not run at a smaller one, and shows less there.
_LEAST_SHARE = 0.25


def at_other_sizes(path: Path, model: TracedModule, batch: Any) -> list[list[tuple[np.ndarray, ...]]]:
    """Repeats the first sample of a batch to two other sizes of the axes that a file leaves open.

    One is larger, which shows where the file cuts at the size that was traced. The other one is smaller,
    since that takes less time, or larger still where the size cannot shrink. The graph may not run at one of
    them, see `runs_at`.

    Args:
        path: the file.
        model: the graph.
        batch: the first batch.

    Returns:
        For each of both sizes the batches as positional inputs, of which the first one at which the graph
        runs is to be taken; none if the file leaves no axis but the batch open.
    """
    record = read_open_axes(model)
    opened = open_in_file(path, model)
    if record is None:
        return []
    batch_sizes = {axis.size for axis in record.axes if axis.axis == 0}
    axes = [axis for axis in opened if axis.size not in batch_sizes]
    if not axes:
        return []
    _, (_, *tensors) = Interpreter(model).bind(*as_arguments(batch, model, 0))
    nodes = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    arrays = {str(n.name): t.numpy() for n, t in zip(nodes, tensors, strict=True)}
    if any(axis.axis >= arrays[axis.input].ndim for axis in axes):
        return []
    for axis in record.axes:  # one sample; a recurrent state counts the samples on its second axis
        if axis.size in batch_sizes and axis.axis < arrays[axis.input].ndim:
            arrays[axis.input] = arrays[axis.input].take([0], axis.axis)
    recorded = {name: array.shape for name, array in arrays.items()}
    larger, largest = other_sizes(recorded, axes)
    smaller = _mirrored(recorded, larger)
    choices = [[larger], [largest] if smaller is None else [smaller, largest]]
    return [
        [tuple(repeat_to(array, shapes[name]) for name, array in arrays.items()) for shapes in choice]
        for choice in choices
    ]


def _mirrored(
    recorded: Mapping[str, tuple[int, ...]], larger: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]] | None:
    """Returns shapes that are as much smaller as others are larger; None if one would be too small."""
    shapes = {
        name: tuple(2 * n - other for n, other in zip(shape, larger[name], strict=True))
        for name, shape in recorded.items()
    }
    sizes = ((n, own) for name, shape in recorded.items() for n, own in zip(shape, shapes[name], strict=True))
    return shapes if all(own >= max(1, _LEAST_SHARE * n) for n, own in sizes) else None


def say_other_size(path: Path, values: Sequence[np.ndarray]) -> None:
    """Says that a file was verified at the size of some inputs."""
    _LOG.info("%s is verified at %s, too", path.name, ", ".join(str(v.shape) for v in values))


def open_in_file(path: Path, model: TracedModule) -> tuple[OpenAxis, ...]:
    """Returns the open axes of a graph that its file leaves open."""
    record = read_open_axes(model)
    if record is None or record.only_batch():
        return ()
    if path.suffix.lower() == ".onnx":
        return _declared_open(path, model, record)
    return () if _fixes_sizes(path, model) else record.axes


def _fixes_sizes(path: Path, model: TracedModule) -> bool:
    """Returns whether the file of a graph may run only at the recorded sizes, by its format."""
    try:
        format = find_format(path)
        if format.fixes_sizes or format.find_fixing_layer is None:
            return True
        return bool(format.find_fixing_layer(PlainGraph(model) if is_plain(model) else ConvertedGraph(model)))
    except ExportError:  # no format's, or written with allow_float, of which the file says nothing
        return True


def _declared_open(path: Path, model: TracedModule, record: OpenAxes) -> tuple[OpenAxis, ...]:
    nodes = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    inputs = read_model(path).graph.input
    opened: list[OpenAxis] = []
    for node, info in zip(nodes, inputs, strict=False):
        dims = info.type.tensor_type.shape.dim
        own = (axis for axis in record.axes if axis.input == node.name and axis.axis < len(dims))
        opened.extend(axis for axis in own if not dims[axis.axis].HasField("dim_value"))
    return tuple(opened)


def runs_at(model: TracedModule, values: Sequence[np.ndarray]) -> bool:
    """Returns whether the graph runs on some inputs."""
    try:
        with evaluating(model):
            return not locate_failure(model, *map(Tensor, values))
    except GraphError:  # an opaque node refuses what onnxruntime refuses
        return False


Shape = tuple[int, ...]


def by_sample(session: Session, model: QuantizedModel) -> Session:
    """Returns a session that takes one sample at a time, if the runtime does and the graph needs it.

    A runtime that computes sample by sample gives its values with the sample as the first axis. In a graph,
    samples may lie along another axis, or along one with other values; a single sample has one place.

    Args:
        session: the session of a file.
        model: the graph that the file was exported from.
    """
    shapes_of_one_sample = getattr(session, "shapes_of_one_sample", None)
    if shapes_of_one_sample is None:
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
