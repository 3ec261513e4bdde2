"""Runs segments of a prepared graph in onnxruntime for algorithms that change its layers one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from qtrace.calibration.base import EngineError
from qtrace.calibration.onnxruntime import run_session, start_session
from qtrace.errors import ExportError
from qtrace.export.onnx.segment import PreparedSegments
from qtrace.graph.stepping import GraphSegment, SegmentRun, Use
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.process import prefetch_map

__all__ = ["OnnxSegments"]

_LOG = logging.getLogger("qtrace")
_Result = TypeVar("_Result")


class OnnxSegments:
    """Computes segments of prepared graphs in onnxruntime; see `qtrace.graph.stepping.SegmentEngine`.

    Every segment is written with the parameters that the graph has at that moment. A segment without an ONNX
    form is left to MegEngine, and the logger ``qtrace`` gets the reason (INFO), once.

    Args:
        model: the view of a prepared module, with the record of every graph that is computed.
        threads: number of threads; None for all cores.
    """

    def __init__(self, model: QuantizedModel, threads: int | None = None) -> None:
        self._model, self._threads = model, threads
        self._writers: dict[TracedModule, PreparedSegments] = {}
        self._refused: set[Node] = set()

    def begin(self, segment: GraphSegment) -> SegmentRun | None:
        """Writes the segment as a model, which its run opens; see `SegmentEngine`."""
        outputs = segment.outputs
        run = self._unless_refused(outputs, lambda: self._write(segment))
        if run is None:
            return None

        def compute(use: Use) -> list[Any] | None:
            return self._unless_refused(outputs, lambda: [use(i, values) for i, values in enumerate(run())])

        return compute

    def _unless_refused(self, outputs: Sequence[TensorNode], step: Callable[[], _Result]) -> _Result | None:
        """Returns the result of a step; None if onnxruntime cannot do it, which is remembered."""
        if any(node in self._refused for node in outputs):
            return None
        try:
            return step()
        except (EngineError, ExportError) as error:
            _LOG.info(f"MegEngine computes up to {outputs[-1].name}: {error}")
            self._refused.update(outputs)
            return None

    def _write(self, segment: GraphSegment) -> Callable[[], Iterator[list[np.ndarray]]]:
        """Writes the segment; returns what opens it and yields the outputs of each batch."""
        traced, batches = segment.traced, segment.batches
        if traced not in self._writers:
            self._writers[traced] = PreparedSegments(self._model.view(traced))
        inputs = {node: (value.dtype, _shape(node, batches)) for node, value in batches[0].items()}
        data, names, results = self._writers[traced].model(
            segment.exprs, inputs, segment.fixed, segment.outputs
        )
        content = [data]

        def feeds_of(values: Mapping[TensorNode, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: np.ascontiguousarray(values[n]) for name, n in zip(names, inputs, strict=True)}

        def run() -> Iterator[list[np.ndarray]]:
            session = start_session(content.pop(), fuse_integers=False)  # which copies the weights
            return prefetch_map(lambda v: run_session(session, results, feeds_of(v)), batches, self._threads)

        return run


def _shape(node: TensorNode, batches: Sequence[Mapping[TensorNode, np.ndarray]]) -> list[Any]:
    """Returns the shape of a node in all batches, with None for each length that varies."""
    shapes = {values[node].shape for values in batches}
    if len({len(shape) for shape in shapes}) > 1:
        raise EngineError(f"{node.name} has another number of axes in each batch")
    return [lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True)]
