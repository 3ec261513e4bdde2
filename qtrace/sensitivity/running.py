"""Runs a graph on some batches: at once by a fast engine where there is one, else by MegEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, evaluating, translate_errors
from qtrace.graph.stepping import SegmentEngine, Stepper, as_array, keep
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.outputs.replay import SelectionTape, TapedRun
from qtrace.sensitivity.metrics import Outputs
from qtrace.verification.lanes import leaves

__all__ = ["begin_outputs", "outputs_of", "rows_of"]


def outputs_of(model: TracedModule, batches: Iterable[Any], engine: SegmentEngine | None = None) -> Outputs:
    """Returns the outputs of a graph for each batch, in eval mode and in its present phases.

    Args:
        model: the graph; a flat one if there is an engine.
        batches: inputs as for ``qtrace.calibrate``.
        engine: computes the whole graph where it can, with the parameters and phases of this moment.

    Raises:
        CalibrationError: when a batch does not fit the graph.
    """
    batches = list(batches)
    with evaluating(model):
        if engine is not None:
            arguments = [as_arguments(batch, model, index) for index, batch in enumerate(batches)]
            try:
                stepper = Stepper(model, arguments, engine=_Whole(engine))
                return [[as_array(value) for value in stepper.finish(i)] for i in range(stepper.count)]
            except _RefusedError:
                pass
        return [_run(model, batch, index) for index, batch in enumerate(batches)]


def begin_outputs(
    model: TracedModule, batches: Iterable[Any], engine: SegmentEngine
) -> Callable[[], Outputs | None] | None:
    """Begins what `outputs_of` does with an engine: the graph may change before the outputs are computed.

    Args:
        model: a flat graph.
        batches: inputs as for ``qtrace.calibrate``.
        engine: computes the whole graph.

    Returns:
        A function that gives the outputs, to be called once, on any thread; or None. Either is None where the
        engine cannot compute all of the graph, or not all that is left at once.

    Raises:
        CalibrationError: when a batch does not fit the graph.
    """
    with evaluating(model):
        arguments = [as_arguments(batch, model, index) for index, batch in enumerate(batches)]
        last = _Begun(engine, model.graph.outputs)
        try:
            stepper = Stepper(model, arguments, engine=last)
            ends = [stepper.finish(index) for index in range(stepper.count)]
        except _RefusedError:
            return None
    finish = last.finish
    if finish is None:
        return None
    # Outputs that are inputs of the graph, or depend on parameters alone, are known.
    known = [[v if isinstance(v, _Awaited) else as_array(v) for v in values] for values in ends]

    def compute() -> Outputs | None:
        computed = finish()
        if computed is None:
            return None
        return [
            [own[value.index] if isinstance(value, _Awaited) else value for value in values]
            for values, own in zip(known, computed, strict=True)
        ]

    return compute


def rows_of(
    model: TracedModule, batches: Iterable[Any], places: Sequence[Sequence[np.ndarray]] | None = None
) -> tuple[Outputs, list[SelectionTape]]:
    """Returns what `outputs_of` does, and the selections of each batch.

    Args:
        model: the graph.
        batches: inputs as for ``qtrace.calibrate``.
        places: for each batch the places to select; None for those by the graph's own values.

    Raises:
        CalibrationError: when a batch does not fit the graph.
    """
    outputs, tapes = [], []
    with evaluating(model):
        for index, batch in enumerate(batches):
            run = TapedRun(model, None if places is None else places[index])
            args, kwargs = as_arguments(batch, model, index)
            with translate_errors(model, (args, kwargs), index):
                outputs.append([tensor.numpy() for tensor in leaves(run.run(*args, **kwargs))])
            tapes.append(run.tape)
    return outputs, tapes


def _run(model: TracedModule, batch: Any, index: int) -> list[np.ndarray]:
    args, kwargs = as_arguments(batch, model, index)
    with translate_errors(model, (args, kwargs), index):
        return [tensor.numpy() for tensor in leaves(model(*args, **kwargs))]


class _RefusedError(Exception):
    """The engine leaves the graph to MegEngine."""


class _Whole:
    """An engine that computes a graph as a whole or not at all."""

    def __init__(self, engine: SegmentEngine) -> None:
        self._engine = engine

    def compute(
        self,
        traced: TracedModule,
        exprs: Sequence[Expr],
        fixed: Mapping[Node, np.ndarray],
        batches: Sequence[Mapping[TensorNode, np.ndarray]],
        outputs: Sequence[TensorNode],
        use: Callable[[int, list[np.ndarray]], Any] = keep,
    ) -> list[Any]:
        """Does what the engine does; see `SegmentEngine`.

        Raises:
            _RefusedError: when the engine cannot.
        """
        results = self._engine.compute(traced, exprs, fixed, batches, outputs, use)
        if results is None:
            raise _RefusedError
        return results

    def begin(
        self,
        traced: TracedModule,
        exprs: Sequence[Expr],
        fixed: Mapping[Node, np.ndarray],
        batches: Sequence[Mapping[TensorNode, np.ndarray]],
        outputs: Sequence[TensorNode],
    ) -> Callable[[], list[list[np.ndarray]] | None] | None:
        """Does what the engine does; see `SegmentEngine`."""
        return self._engine.begin(traced, exprs, fixed, batches, outputs)


@dataclass(frozen=True)
class _Awaited:
    """The value of an output that is computed later.

    Attributes:
        index: its number among those of its batch.
    """

    index: int


class _Begun(_Whole):
    """An engine that begins the last part of a graph, and computes those before it.

    Attributes:
        finish: computes the values that are awaited; None if no part was begun.
    """

    def __init__(self, engine: SegmentEngine, ends: Sequence[Node]) -> None:
        super().__init__(engine)
        self._ends = frozenset(ends)
        self.finish: Callable[[], list[list[np.ndarray]] | None] | None = None

    def compute(
        self,
        traced: TracedModule,
        exprs: Sequence[Expr],
        fixed: Mapping[Node, np.ndarray],
        batches: Sequence[Mapping[TensorNode, np.ndarray]],
        outputs: Sequence[TensorNode],
        use: Callable[[int, list[np.ndarray]], Any] = keep,
    ) -> list[Any]:
        """Gives awaited values where they are outputs of the graph that no other part reads.

        Raises:
            _RefusedError: when the engine cannot compute the part.
        """
        is_last = self.finish is None and all(node in self._ends and not node.users for node in outputs)
        if not is_last or use is not keep:
            return super().compute(traced, exprs, fixed, batches, outputs, use)
        self.finish = self.begin(traced, exprs, fixed, batches, outputs)
        if self.finish is None:
            raise _RefusedError
        return [[_Awaited(index) for index in range(len(outputs))] for _ in batches]
